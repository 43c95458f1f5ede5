"""Runs the engine on a thread of its own: requests come from an event loop, and their pieces go back to it."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

from longdraft.infer.engine import MOST_SLOTS, Engine
from longdraft.infer.generation import Generation, Piece
from longdraft.infer.requests import Request
from longdraft.infer.server.protocol import ApiError


@dataclass
class Job:
    """The requests of one caller, and their pieces as they are decoded.

    Attributes:
        stored: whether `on_end` may have them.
        inbox: the requests' pieces; None if the engine failed.
    """

    requests: list[Request]
    stored: bool
    inbox: asyncio.Queue[Piece | None] = field(default_factory=asyncio.Queue)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (index of the request in the job, its next piece) until all requests are finished. Raises ApiError if
        the engine fails."""
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
    """Decodes submitted requests until it is closed. Methods run on the event loop, except those marked below.

    Attributes:
        failed: whether the engine raised an error; it then decodes nothing more.

    Args:
        engine: from `start` on, nobody else may use it.
        queue: the number of requests that may wait for a slot.
        on_end: called with the generation of each finished request that may be stored.
    """

    def __init__(self, engine: Engine, queue: int, on_end: Callable[[Generation], object] | None = None):
        self.engine, self._capacity, self._on_end = engine, (engine.slots or MOST_SLOTS) + queue, on_end
        self._inbox = SimpleQueue[Request | int | None]()  # a request, an index to cancel, or None to wake the thread
        self._jobs: dict[int, Job] = {}
        self._indices = itertools.count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failed = self._closed = False

    def start(self) -> None:
        """Start the thread. Must be called on the event loop that pieces go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return not (self.failed or self._closed)

    def submit(self, requests: Sequence[Request], stored: bool = True) -> Job:
        """Submit all of these requests, or none; they get new indices. stored: whether `on_end` may have them. Raises
        ApiError if the queue is full, the server is shutting down, or an empty queue could not hold them."""
        if not self.alive:
            raise ApiError(503, "the server is shutting down")
        count = len(requests)
        if count > self._capacity:
            raise ApiError(400, f"n: {count} answers in one request; this server holds {self._capacity}", "n")
        if len(self._jobs) + count > self._capacity:
            raise ApiError(429, "all slots and the queue are full; try again", code="queue_full")
        job = Job([replace(one, index=next(self._indices)) for one in requests], stored)
        for request in job.requests:
            self._jobs[request.index] = job
            self._inbox.put(request)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel the job's unfinished requests."""
        for request in job.requests:
            if request.index in self._jobs:
                self._inbox.put(request.index)

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
        """`Engine.serve` calls this for the requests that arrived since the last step; None ends it."""
        arrived: list[Request] = []
        while not self._inbox.empty() or (idle and not arrived and not self._closed):
            item = self._inbox.get()
            if isinstance(item, Request):
                arrived.append(item)
            elif item is not None:
                self.engine.cancel(item)
        return None if idle and self._closed and not arrived else arrived

    def _call(self, function: Callable, *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # These run on the event loop, called by the thread.

    def _deliver(self, piece: Piece) -> None:
        job = self._jobs[piece.index]
        if piece.generation is not None:
            del self._jobs[piece.index]
            if self._on_end is not None and job.stored:
                self._on_end(piece.generation)
        job.inbox.put_nowait(piece)

    def _fail(self) -> None:
        self.failed = True
        for job in self._jobs.values():
            job.inbox.put_nowait(None)
        self._jobs.clear()
