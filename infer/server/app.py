"""An HTTP server with OpenAI's interface: chats and completions, streamed or complete, on one engine.

No request can name a file: a body has only text, token ids and numbers. The command line is in launch/serve.py.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from longdraft.infer.choice.grammar_trial import GrammarTrial
from longdraft.infer.engine import Engine
from longdraft.infer.generation import Generation
from longdraft.infer.server.answer_format import answer_format
from longdraft.infer.server.answers import Answers
from longdraft.infer.server.engine_thread import EngineThread, Job
from longdraft.infer.server.protocol import ApiError, Chat, Completion, parse, requests_of

PAGE = Path(__file__).with_name("page.html")
BODY_BYTES = 4 << 20  # the largest request body
LOOPBACK = ("127.0.0.1", "localhost", "::1")
DRAIN_SECONDS = 300  # how long running answers may continue during a shutdown


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
    """The handlers of one engine's routes.

    Args:
        model: the model's name in requests.
        api_key: the bearer token that /v1 requires; empty if it requires none.
        queue: requests that may wait for a slot; more are answered with 429.
        host: the address it listens on. On a loopback address without a key, requests with another Host name are
            refused, because a web page could point its own name at this address (DNS rebinding).
        on_end: called with each generation, unless its request has `store: false`.

    Raises ValueError if the tokenizer declares a format of answers that cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        api_key: str = "",
        queue: int = 256,
        host: str = "",
        on_end: Callable[[Generation], object] | None = None,
    ):
        self.engine, self._model, self._api_key, self._created = engine, model, api_key, int(time.time())
        self._names = LOOPBACK if host in LOOPBACK and not api_key else ()
        self.thread = EngineThread(engine, queue, on_end)
        self._trial, self._for_grammars = GrammarTrial(engine.target), ThreadPoolExecutor(max_workers=1)
        answer_format(engine.target.tokenizer, with_tools=True)

    async def close(self) -> None:
        """Finish what was submitted, and end the engine's thread."""
        await self.thread.close()
        await asyncio.to_thread(self._for_grammars.shutdown)
        self._trial.close()

    async def models(self, request: Request) -> Response:
        """The list of models, which has one entry, or the model of the requested name."""
        self._check(request)
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "longdraft"}
        model |= {"max_model_len": self.engine.max_length}
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [model]})
        self._check_model(name)
        return JSONResponse(model)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.thread.alive else 503)

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE)

    async def answer(self, body_type: type[Chat | Completion], request: Request) -> Response:
        """Answer a chat or a completion, streamed or complete."""
        target = self.engine.target
        self._check(request)
        body = parse(body_type, await _read(request))
        self._check_model(body.model)
        # Grammars, which may take long, do not occupy the threads of other requests.
        loop, executor = asyncio.get_running_loop(), self._for_grammars if body.has_form else None
        given = body, target, self.engine.max_length, self._trial.check
        requests = await loop.run_in_executor(executor, requests_of, *given)
        answers = Answers(body, requests, target.tokenizer, secrets.token_hex(12), self._model)
        job = self.thread.submit(requests, body.store)
        if body.stream:
            return Events(_events(job, answers), self.thread, job)
        try:
            generations = await _unless_gone(request, job)
        finally:
            self.thread.cancel(job)
        return JSONResponse(await asyncio.to_thread(answers.response, generations))  # log-probabilities take a while

    def _check_model(self, name: str | None) -> None:
        """Raise ApiError for another model's name."""
        if name not in (None, self._model):
            text = f"model: {name!r} is not served here, {self._model!r} is"
            raise ApiError(404, text, "model", "model_not_found")

    def _check(self, request: Request) -> None:
        """Raise ApiError for a request with another Host name, or without the key."""
        if self._names and request.url.hostname not in self._names:
            raise ApiError(403, f"Host: {request.url.hostname} is not this server's name; an API key allows others")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = self._api_key
        if key and not (scheme.lower() == "bearer" and secrets.compare_digest(token.strip().encode(), key.encode())):
            raise ApiError(401, "give the server's key as Authorization: Bearer KEY", code="invalid_api_key")

    def respond(self, request: Request, error: Exception) -> Response:
        """The response to an error, in the form that OpenAI's clients read."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # the client is gone
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        elif not isinstance(error, ApiError):
            error = ApiError(500, "the server failed to answer this request; see its log")
        return JSONResponse(error.body, error.status)


def create_app(service: Service) -> Starlette:
    """The application and its routes. The engine's thread starts and ends with it, and finishes submitted requests."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.thread.start()
        yield
        await service.close()

    routes = [
        Route("/v1/chat/completions", partial(service.answer, Chat), methods=["POST"]),
        Route("/v1/completions", partial(service.answer, Completion), methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/health", service.health),
        Route("/", service.page),
    ]
    errors = ApiError, ClientDisconnect, HTTPException, Exception
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(errors, service.respond))


class Server(uvicorn.Server):
    """Serves until a signal comes; running answers then have DRAIN_SECONDS left. Also ends if the engine fails, so that
    a supervisor can restart the process."""

    def __init__(self, service: Service):
        settings = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": DRAIN_SECONDS}
        super().__init__(uvicorn.Config(create_app(service), **settings))
        self._thread = service.thread

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._thread.failed


async def _read(request: Request) -> bytes:
    """Read a JSON body. Raises ApiError if it has another type or is too large, and ClientDisconnect."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "give the body as Content-Type: application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES:
            text = f"the body has more than {BODY_BYTES} bytes; shorten the prompt"
            raise ApiError(413, text, code="context_length_exceeded")
    return bytes(data)


async def _unless_gone(request: Request, job: Job) -> list[Generation]:
    """The job's generations. Raises ClientDisconnect if the client hangs up first. Its body must have been read."""
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
    """A stream's chunks and its end. Nothing is sent before the first piece, because load generators take the first
    chunk's time for the first token's."""
    started, done = set[int](), dict[int, Generation]()
    try:
        async for index, piece in job.pieces():
            if index not in started:
                started.add(index)
                for chunk in answers.start(index):
                    yield _event(chunk)
            yield _event(answers.chunk(index, piece))
            if piece.generation is not None:
                done[index] = piece.generation
        for chunk in answers.end([done[i] for i in sorted(done)]):
            yield _event(chunk)
        yield b"data: [DONE]\n\n"
    except ApiError as error:  # the status is sent already, so the error becomes an event
        yield _event(error.body)


def _event(value: dict[str, Any]) -> bytes:
    # In ASCII, because some clients take U+2028 and the like for the end of a line.
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
