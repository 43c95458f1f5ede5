"""What runs, how far it is and how long the rest takes, on standard error: one line that moves on a terminal, a plain
line now and then in a pipe or file.

Not here: how the rest is estimated (benchmarks/progress.py).
"""

import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from longdraft.benchmarks.progress import Phase, TimeLeft, Watch, duration
from longdraft.launch.console import note, to_nothing

REDRAWN = 0.5  # seconds between two states of the line that moves
PLAIN_EVERY = 30.0  # seconds between two plain lines
CLEAR = "\r\033[K"


class Progress(Watch):
    """A Watch that shows what it is told; what others write meanwhile stands on lines of its own above."""

    def __init__(self, name: str):
        self._name, self._time = name, TimeLeft([])
        self._stream: TextIO = sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock, self._over = threading.RLock(), threading.Event()
        self._said_at, self._drawn, self._amid = -PLAIN_EVERY, False, False

    def __enter__(self) -> "Progress":
        if self._live:
            sys.stderr = _Beside(self)
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._ticker.join()
        if self._live:
            sys.stderr = self._stream
            with self._lock:
                self._clear()

    def plan(self, phases: Sequence[Phase]) -> None:
        with self._lock:
            self._time = TimeLeft(phases)

    def begin(self, name: str) -> None:
        with self._lock:
            self._time.begin(name)
            self._show()

    def advance(self, cost: float) -> None:
        with self._lock:
            self._time.advance(cost)

    def describe(self) -> str:
        """The state in one line."""
        phase, left = self._time.phase, self._time.seconds()
        assert phase is not None, "no phase has begun"
        rest = "time left not known yet" if left is None else f"about {duration(left)} left"
        place = f"{self._time.number + 1} of {len(self._time.phases)}"
        return f"{self._name}: {place}, {self._time.fraction:.0%} of it done, {rest}: {phase.name}"

    def _tick(self) -> None:
        while not self._over.wait(REDRAWN):
            with self._lock:
                self._show()

    def _show(self) -> None:
        if self._time.phase is None:
            return
        if self._live and not self._amid:
            self._write(CLEAR + self.describe()[: self._width() - 1])
            self._drawn = True
        elif not self._live and time.monotonic() - self._said_at >= PLAIN_EVERY:
            note(self.describe())
            self._said_at = time.monotonic()

    def _width(self) -> int:
        """Of the terminal, wherever standard output goes."""
        if os.environ.get("COLUMNS", "").isdecimal():
            return int(os.environ["COLUMNS"])
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _clear(self) -> None:
        if self._drawn:
            self._write(CLEAR)
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            to_nothing(2)

    def fileno(self) -> int:
        """Of standard error itself."""
        return self._stream.fileno()

    def beside(self, text: str) -> None:
        """Write what is not the line itself: the line makes room, and comes back when it is due."""
        with self._lock:
            self._clear()
            self._write(text)
            self._amid = not text.endswith("\n")  # in a line of someone else's


class _Beside(io.TextIOBase):
    """Standard error while a line moves there."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def write(self, text: str) -> int:
        self._progress.beside(text)
        return len(text)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._progress.fileno()
