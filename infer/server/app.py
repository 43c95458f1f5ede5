"""An HTTP server with OpenAI's interface: chats and completions, streamed and whole, on one engine.

No request can name a file: a body has only text, token ids and numbers. The command line is in launch/serve.py.
"""

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from longdraft.infer.engine import Engine
from longdraft.infer.generation import Generation
from longdraft.infer.server.answers import Answers
from longdraft.infer.server.engine_thread import EngineThread, Job
from longdraft.infer.server.protocol import ApiError, Body, Chat, Completion, parse, requests_of

PAGE = Path(__file__).with_name("page.html")
# Limits of a request's body.
BODY_BYTES, BODY_SECONDS = 4 << 20, 30.0
# Seconds that a client may leave the end of its answer unread while the server ends. Then uvicorn cuts it off.
UNREAD_SECONDS = 10
GONE = 499  # proxies' status for a client that has hung up; nobody reads it
MOST_NAMES, MOST_CHARACTERS = 100, 64  # of ignored fields that /metrics names: clients choose them
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
# Counters of finished requests: their names without our prefix, descriptions, and what is counted.
FIGURES = {
    "prompt_tokens": ("Tokens of prompts", lambda one: len(one.prompt)),
    "generation_tokens": ("Tokens that were generated", lambda one: len(one.tokens)),
    "steps": ("Steps, counted once for each request in them", lambda one: one.stats.steps),
    "speculative_steps": ("Steps that verified drafted tokens", lambda one: one.stats.speculative_steps),
    "draft_tokens": ("Drafted tokens that were verified", lambda one: one.stats.drafted),
    "accepted_draft_tokens": ("Drafted tokens that were accepted", lambda one: sum(one.stats.accepted_at_depth)),
}


@dataclass(frozen=True)
class Settings:
    """How the engine is served.

    Attributes:
        model: the model's name in requests.
        api_key: the bearer token that /v1 requires; empty if it requires none.
        queue: requests that may wait for a slot; more are answered with 429.
        cors: origins of web pages that may read answers, "*" for all.
    """

    model: str
    api_key: str = ""
    queue: int = 256
    cors: Sequence[str] = ()


class Meters:
    """The metrics that Prometheus reads at /metrics."""

    def __init__(self):
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="longdraft", registry=self.registry)
        seconds = partial(Histogram, namespace="longdraft", registry=self.registry, buckets=SECONDS)
        self.requests = counter("requests", "Requests that ended, by reason", ["finish_reason"])
        self.errors = counter("errors", "Answers with an error, by status", ["status"])
        self.ignored_fields = counter(
            "ignored_fields", "Requests with a field that is not read, by its name", ["field"]
        )
        self.figures = {name: counter(name, text) for name, (text, _) in FIGURES.items()}
        self.first_token = seconds("time_to_first_token_seconds", "From a request's arrival to its first token")
        self.duration = seconds("request_seconds", "From a request's arrival to its end")
        self._names = set[str]()  # of ignored fields

    def watch(self, thread: EngineThread) -> None:
        """Add gauges of the thread's requests, which are read on demand."""
        for name, read in (("waiting", lambda: thread.waiting), ("running", lambda: thread.in_flight - thread.waiting)):
            Gauge(f"longdraft_requests_{name}", f"Requests {name}", registry=self.registry).set_function(read)

    def finish(self, generation: Generation, taken: float) -> None:
        """Count a finished request, which took `taken` seconds."""
        self.duration.observe(taken)
        self.requests.labels(generation.finish_reason).inc()
        for name, (_, count) in FIGURES.items():
            self.figures[name].inc(count(generation))

    def ignore(self, names: set[str]) -> None:
        """Count a request's fields that are not read."""
        for name in sorted(name[:MOST_CHARACTERS] for name in names):
            self._names |= {name} if len(self._names) < MOST_NAMES else set()
            self.ignored_fields.labels(name if name in self._names else "others").inc()


class Events(StreamingResponse):
    """Server-sent events. When the response ends, for whatever reason, the job is cancelled."""

    def __init__(self, events: AsyncIterator[bytes], thread: EngineThread, job: Job):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._thread, self._job = thread, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._thread.cancel(self._job)


class Service:
    """The handlers of one engine's routes."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings, self.meters = engine, settings, Meters()
        self._created, meters = int(time.time()), self.meters
        self.thread = EngineThread(engine, settings.queue, meters.first_token.observe, meters.finish)
        meters.watch(self.thread)

    async def chat(self, request: Request) -> Response:
        return await self._answer(Chat, request)

    async def completion(self, request: Request) -> Response:
        return await self._answer(Completion, request)

    async def models(self, request: Request) -> Response:
        """The list of models, which has one entry, or the model of this name."""
        self._check_key(request)
        name = request.path_params.get("name")
        self._check_model(name)
        model = {"id": self.settings.model, "object": "model", "created": self._created, "owned_by": "longdraft"}
        model |= {"max_model_len": self.engine.max_length}
        return JSONResponse({"object": "list", "data": [model]} if name is None else model)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.thread.alive else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.meters.registry), media_type=CONTENT_TYPE_LATEST)

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE)

    async def _answer(self, body_type: type[Body], request: Request) -> Response:
        """Answer a chat or a completion, whole or streamed."""
        engine = self.engine
        self._check_key(request)
        body = parse(body_type, await _read(request))
        self._check_model(body.model)
        requests = await asyncio.to_thread(requests_of, body, engine.target, engine.max_length)
        identity, max_depth = secrets.token_hex(12), engine.drafter.max_depth
        answers = Answers(body, requests, engine.target, identity, self.settings.model, max_depth)
        self.meters.ignore(body.ignored)
        job = self.thread.submit(requests, body.stream)
        if body.stream:
            return Events(_events(job, answers), self.thread, job)
        try:
            generations = await _unless_gone(request, job)
        finally:
            self.thread.cancel(job)
        return JSONResponse(await asyncio.to_thread(answers.response, generations))  # log-probabilities take a while

    def _check_model(self, name: str | None) -> None:
        served = self.settings.model
        if name not in (None, served):
            raise ApiError(404, f"model: {name!r} is not served here, {served!r} is", "model", "model_not_found")

    def _check_key(self, request: Request) -> None:
        """Raise ApiError for a request without the key."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = self.settings.api_key
        if key and not (scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), key.encode())):
            raise ApiError(401, "give the server's key as Authorization: Bearer KEY", code="invalid_api_key")

    def respond(self, request: Request, error: Exception) -> Response:
        """Answer an error in the form that OpenAI's clients read."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=GONE)
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        elif not isinstance(error, ApiError):
            error = ApiError(500, "the server failed at this request; see its log")
        self.meters.errors.labels(error.status).inc()
        return JSONResponse(error.body, error.status, error.headers)


def create_app(service: Service) -> Starlette:
    """The application and its routes. The engine's thread starts and ends with it, and finishes submitted requests."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await service.thread.close()

    routes = [
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completion, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
        Route("/", service.page),
    ]
    errors = ApiError, ClientDisconnect, HTTPException, Exception
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(errors, service.respond))
    if origins := service.settings.cors:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


class Server(uvicorn.Server):
    """Ends when the engine has failed, so that whoever supervises the process can restart it. It gives up the answers
    that are not done `drain_seconds` after the signal, so that each of them ends with an error; uvicorn itself would
    cut them off and log tracebacks."""

    def __init__(self, service: Service, drain_seconds: int):
        patience, app = drain_seconds + UNREAD_SECONDS, create_app(service)
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=patience))
        self._thread, self._drain_seconds = service.thread, drain_seconds

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._thread.failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.get_running_loop().call_later(self._drain_seconds, self._thread.give_up)
        await super().shutdown(sockets)
        giving_up.cancel()


def serve(engine: Engine, settings: Settings, listening: socket.socket, drain_seconds: int) -> bool:
    """Serve until a signal comes. Running answers then have `drain_seconds` left. Returns False if the engine
    failed."""
    service = Service(engine, settings)
    Server(service, drain_seconds).run([listening])
    return not service.thread.failed


async def _read(request: Request) -> bytes:
    """Read a JSON body. Raises ApiError if it has another type, is too large or too slow, and ClientDisconnect."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "give the body as Content-Type: application/json")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > BODY_BYTES:
                    text = f"the body has more than {BODY_BYTES} bytes; shorten the prompt"
                    raise ApiError(413, text, code="context_length_exceeded")
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s; send it again") from error
    return bytes(data)


async def _unless_gone(request: Request, job: Job) -> list[Generation]:
    """The job's generations. Raises ClientDisconnect if the client, whose body was read, hangs up before that."""
    done, gone = asyncio.ensure_future(job.generations()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        done.cancel()
        gone.cancel()


async def _events(job: Job, answers: Answers) -> AsyncIterator[bytes]:
    """A stream's chunks and its end."""
    done = dict[int, Generation]()
    for index in range(len(job.requests)):
        if (first := answers.first(index)) is not None:
            yield _event(first)
    try:
        async for index, piece in job.pieces():
            chunks = [answers.chunk(index, piece)] if piece.text or piece.generation or answers.tells_tokens else []
            if piece.generation is not None:
                done[index] = piece.generation
            if len(done) == len(job.requests):
                chunks = answers.end(chunks[0], [done[i] for i in sorted(done)])
            for chunk in chunks:
                yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except ApiError as error:  # the status is sent already, so the error becomes an event
        yield _event(error.body)


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
