"""Runs the engine on a thread of its own: requests come from an event loop, and their pieces go back to it."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from longdraft.infer.engine import MOST_SLOTS, Engine
from longdraft.infer.generation import Generation, Piece
from longdraft.infer.requests import Request
from longdraft.infer.server.protocol import ApiError

RETRY_SECONDS = 5  # what a client is told to wait while the queue is full


@dataclass
class Job:
    """The requests of one caller, whose pieces come as they are decoded.

    Attributes:
        streamed: whether the caller wants every piece, or only the last one of each request.
        submitted: when it was submitted, by `time.perf_counter`.
        inbox: its pieces, and None if no more will come.
        silent: indices of the requests without a token yet.
    """

    requests: list[Request]
    streamed: bool
    submitted: float = field(default_factory=time.perf_counter)
    inbox: asyncio.Queue[Piece | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self):
        self.silent = {one.index for one in self.requests}

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (place of the request in the job, its next piece) until all requests are finished. Raises ApiError if
        the engine fails or the server gives up."""
        places = {one.index: place for place, one in enumerate(self.requests)}
        left = len(places)
        while left:
            if (piece := await self.inbox.get()) is None:
                raise ApiError(503, "the server stopped before this was done")
            left -= piece.generation is not None
            yield places[piece.index], piece

    async def generations(self) -> list[Generation]:
        """Wait for all generations, in the requests' order. Raises ApiError."""
        done = {place: piece.generation async for place, piece in self.pieces() if piece.generation is not None}
        return [done[place] for place in sorted(done)]


class EngineThread:
    """Decodes what is submitted, until it is closed. Methods run on the event loop, except those marked below.

    Attributes:
        failed: whether the engine raised. After that nothing is decoded any more.

    Args:
        engine: from `start` on, nobody else may use it.
        queue: the number of requests that may wait for a slot.
        on_first_token: called once for each request, with the seconds since its submission.
        on_finish: called with each generation and the seconds since its submission.
    """

    def __init__(
        self,
        engine: Engine,
        queue: int,
        on_first_token: Callable[[float], None],
        on_finish: Callable[[Generation, float], None],
    ):
        self.engine, self.slots = engine, engine.slots or MOST_SLOTS
        self._capacity = self.slots + queue
        self._on_first_token, self._on_finish = on_first_token, on_finish
        self._inbox = SimpleQueue[Request | int | None]()  # a request, an index to cancel, or None for the end
        self._jobs: dict[int, Job] = {}
        self._indices = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ending = False  # used only by the thread
        self.failed = self._closed = False

    def start(self) -> None:
        """Start the thread. Must be called on the event loop that pieces go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return not (self.failed or self._closed)

    @property
    def in_flight(self) -> int:
        """The number of requests that are being decoded or wait for a slot."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return max(0, self.in_flight - self.slots)

    def submit(self, requests: Sequence[Request], streamed: bool) -> Job:
        """Submit all of these requests, or none; they get new indices. Raises ApiError: a full queue, a server that is
        ending, or more requests than an empty queue holds."""
        if not self.alive:
            raise ApiError(503, "the server is ending")
        count = len(requests)
        if count > self._capacity:
            raise ApiError(400, f"n: {count} answers in one request, and this server holds {self._capacity}", "n")
        if self.in_flight + count > self._capacity:
            headers = {"Retry-After": str(RETRY_SECONDS)}
            raise ApiError(429, "all slots and the queue are full; try again", code="queue_full", headers=headers)
        job = Job([replace(one, index=next(self._indices)) for one in requests], streamed)
        for request in job.requests:
            self._jobs[request.index] = job
            self._inbox.put(request)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel the job's requests, as far as they are not finished."""
        for request in job.requests:
            if request.index in self._jobs:
                self._inbox.put(request.index)

    def give_up(self) -> None:
        """Accept nothing more, and cancel what is not done. Whoever waits for it gets an ApiError."""
        self._closed = True
        for index, job in self._jobs.items():
            self._inbox.put(index)
            job.inbox.put_nowait(None)

    async def close(self) -> None:
        """Finish what was submitted, and stop."""
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # These run on the engine's thread.

    def _run(self) -> None:
        try:
            for piece in self.engine.serve(self._arrivals):
                self._call(self._deliver, piece)
        except BaseException:
            self._call(self._fail)
            raise

    def _arrivals(self, idle: bool) -> list[Request] | None:
        """The requests that arrived since the last step, as `Engine.serve` asks for them; None ends it."""
        arrived: list[Request] = []
        while True:
            idle = idle and not arrived
            try:
                item = self._inbox.get(block=idle and not self._ending)
            except Empty:
                return None if idle and self._ending else arrived
            if item is None:
                self._ending = True
            elif isinstance(item, Request):
                arrived.append(item)
            else:
                self.engine.cancel(item)

    def _call(self, function: Callable, *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # These run on the event loop, called by the thread.

    def _deliver(self, piece: Piece) -> None:
        job = self._jobs[piece.index]
        seconds = time.perf_counter() - job.submitted
        if piece.tokens and piece.index in job.silent:
            job.silent.discard(piece.index)
            self._on_first_token(seconds)
        if piece.generation is not None:
            del self._jobs[piece.index]
            self._on_finish(piece.generation, seconds)
        if job.streamed or piece.generation is not None:
            job.inbox.put_nowait(piece)

    def _fail(self) -> None:
        self.failed = True
        for job in self._jobs.values():
            job.inbox.put_nowait(None)
        self._jobs.clear()
