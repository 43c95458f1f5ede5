"""A command's progress on standard error: what it does, how far it is, and how long the rest will take.

On a terminal this is one line that is redrawn, in a pipe or a file a plain line now and then. The remaining time is
estimated in benchmarks/progress.py.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from longdraft.benchmarks.progress import Phase, TimeLeft, Watch, duration
from longdraft.launch.console import discard_output, note

REDRAW_EVERY = 0.5  # seconds between two drawings of the line
PLAIN_EVERY = 30.0  # seconds between two plain lines
CLEAR = "\r\033[K"


class Progress(Watch):
    """A Watch that shows progress. What others write to standard error meanwhile appears on lines above."""

    def __init__(self, name: str):
        self._name, self._time = name, TimeLeft([])
        self._stream: TextIO = sys.stderr
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lock, self._ended = threading.RLock(), threading.Event()
        self._printed_at, self._drawn, self._mid_line = -PLAIN_EVERY, False, False

    def __enter__(self) -> "Progress":
        if self._live:
            sys.stderr = _AboveLine(self)
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
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
        """The progress in one line."""
        phase, left = self._time.phase, self._time.seconds()
        assert phase is not None, "no phase has begun"
        rest = "time left not known yet" if left is None else f"about {duration(left)} left"
        place = f"{self._time.number + 1} of {len(self._time.phases)}"
        return f"{self._name}: {place}, {self._time.fraction:.0%} of it done, {rest}: {phase.name}"

    def _tick(self) -> None:
        while not self._ended.wait(REDRAW_EVERY):
            with self._lock:
                self._show()

    def _show(self) -> None:
        if self._time.phase is None:
            return
        if self._live and not self._mid_line:
            self._write(CLEAR + self.describe()[: self._width() - 1])
            self._drawn = True
        elif not self._live and time.monotonic() - self._printed_at >= PLAIN_EVERY:
            note(self.describe())
            self._printed_at = time.monotonic()

    def _width(self) -> int:
        """The width of standard error's terminal."""
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
            discard_output(2)

    def fileno(self) -> int:
        """The descriptor of standard error itself."""
        return self._stream.fileno()

    def write_above(self, text: str) -> None:
        """Write someone else's text. The line is cleared for it, and drawn again later."""
        with self._lock:
            self._clear()
            self._write(text)
            self._mid_line = not text.endswith("\n")


class _AboveLine(io.TextIOBase):
    """Standard error while the progress line is drawn there."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def write(self, text: str) -> int:
        self._progress.write_above(text)
        return len(text)

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._progress.fileno()
