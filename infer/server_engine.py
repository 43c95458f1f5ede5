"""The engine on a thread of its own, for a server: requests come from an event loop, their pieces go back to it.

Not here: HTTP (infer/server.py), what OpenAI's fields mean (infer/server_protocol.py), the loop of decoding
(infer/engine.py).
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from longdraft.infer.drafters.base import Request
from longdraft.infer.engine import MOST_SLOTS, Engine
from longdraft.infer.results import Generation, Piece

# How much of the time that a request is guessed to take is that of the ones before the last.
FADING = 0.9
LONGEST_RETRY = 60  # seconds


class Full(Exception):
    """No place in the queue; `retry_after`: seconds until there may be one."""

    def __init__(self, retry_after: int):
        super().__init__(f"all slots and all places to wait for one are taken; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The engine has failed, or the server ends."""


@dataclass
class Job:
    """What one caller has submitted: requests of any number, whose pieces come as they are decoded.

    Attributes:
        streamed: whether every piece is wanted, and not the last one of each alone.
        came: when it was submitted, by `time.perf_counter`.
        unfinished: indices of the requests that are not done. silent: of those without a token yet.
    """

    requests: list[Request]
    streamed: bool
    came: float = field(default_factory=time.perf_counter)
    _pieces: asyncio.Queue[Piece | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self):
        self.unfinished = {one.index for one in self.requests}
        self.silent = set(self.unfinished)

    def put(self, piece: Piece | None) -> None:
        """A piece that came, None where none will come any more."""
        self._pieces.put_nowait(piece)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(which of the requests, its next piece) until the last one's generation. Raises: Stopped."""
        places = {one.index: place for place, one in enumerate(self.requests)}
        left = len(places)
        while left:
            if (piece := await self._pieces.get()) is None:
                raise Stopped("the engine has stopped")
            left -= piece.generation is not None
            yield places[piece.index], piece

    async def generations(self) -> list[Generation]:
        """All of them, finished, in the requests' order. Raises: Stopped."""
        done = [(place, piece.generation) async for place, piece in self.pieces() if piece.generation is not None]
        return [generation for _, generation in sorted(done, key=lambda one: one[0])]


class EngineThread:
    """Decodes what is submitted until it is closed. What it does on its thread is marked; all else is the event loop's.

    Args:
        engine: nobody else may use it from `start` on.
        queue: so many requests may wait for a slot.
        on_finish: told of each generation, with the seconds since it was submitted.
        on_first_token: told of these seconds, once a request.
        on_failure: told what the engine raised; then nothing is decoded any more.
    """

    def __init__(
        self,
        engine: Engine,
        queue: int,
        on_first_token: Callable[[float], None],
        on_finish: Callable[[Generation, float], None],
        on_failure: Callable[[BaseException], None],
    ):
        self.engine, self.slots = engine, engine.slots or MOST_SLOTS
        self._most = self.slots + queue
        self._on_first_token, self._on_finish, self._on_failure = on_first_token, on_finish, on_failure
        self._inbox = SimpleQueue[Request | int | None]()  # a request, an index to cancel, or None: no more
        self._outbox: list[Piece] = []  # of the step that runs; the thread's own
        self._jobs: dict[int, Job] = {}
        self._indices = itertools.count()
        self._seconds = 0.0  # what a request takes on its slot, of late
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ending = False  # the thread's own
        self.failed = self._closed = False

    def start(self) -> None:
        """Begin, from the event loop that pieces go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return not (self.failed or self._closed)

    @property
    def in_flight(self) -> int:
        """Requests that are decoded or wait for a slot."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return max(0, self.in_flight - self.slots)

    def submit(self, requests: Sequence[Request], streamed: bool) -> Job:
        """All of them or none; they get indices of their own. Raises: Full, Stopped, ValueError for more than it ever
        holds."""
        if not self.alive:
            raise Stopped("the server is ending")
        if len(requests) > self._most:
            raise ValueError(
                f"n: {len(requests)} answers in one request, and this server holds {self._most} at a time, running and "
                "waiting; ask for fewer, or start it with a longer --queue"
            )
        if self.in_flight + len(requests) > self._most:
            rounds = 1 + (self.waiting + len(requests)) / self.slots
            raise Full(min(LONGEST_RETRY, max(1, round(rounds * self._seconds))))
        job = Job([replace(one, index=next(self._indices)) for one in requests], streamed)
        for request in job.requests:
            self._jobs[request.index] = job
            self._inbox.put(request)
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any longer; what of it is done is left alone."""
        for index in job.unfinished:
            self._inbox.put(index)

    async def close(self) -> None:
        """Decode what was submitted to its end, and stop."""
        self._closed = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # On the thread.

    def _run(self) -> None:
        try:
            for piece in self.engine.serve(self._arrivals):
                self._outbox.append(piece)
            self._send()
        except BaseException as error:
            self._send()  # what was done before
            self._call(self._fail, error)
            raise

    def _arrivals(self, idle: bool) -> list[Request] | None:
        """What came since the last step; while it waits, and while the next step runs, that step's pieces are sent."""
        self._send()
        came: list[Request] = []
        while True:
            idle = idle and not came
            try:
                item = self._inbox.get(block=idle and not self._ending)
            except Empty:
                return None if idle and self._ending else came
            if item is None:
                self._ending = True
            elif isinstance(item, Request):
                came.append(item)
            else:
                self.engine.cancel(item)

    def _send(self) -> None:
        if self._outbox:
            pieces, self._outbox = self._outbox, []
            self._call(self._deliver, pieces)

    def _call(self, function: Callable, argument: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    # On the loop again.

    def _deliver(self, pieces: Sequence[Piece]) -> None:
        now = time.perf_counter()
        for piece in pieces:
            job, generation = self._jobs[piece.index], piece.generation
            if piece.tokens and piece.index in job.silent:
                job.silent.discard(piece.index)
                self._on_first_token(now - job.came)
            if generation is not None:
                del self._jobs[piece.index]
                job.unfinished.discard(piece.index)
                if generation.finish_reason != "cancelled":  # they take less, or nothing
                    taken = generation.stats.prefill_seconds + generation.stats.decode_seconds
                    self._seconds = FADING * (self._seconds or taken) + (1 - FADING) * taken
                self._on_finish(generation, now - job.came)
            if job.streamed or generation is not None:
                job.put(piece)

    def _fail(self, error: BaseException) -> None:
        self.failed = True
        for job in self._jobs.values():
            job.put(None)
        self._jobs.clear()
        self._on_failure(error)
