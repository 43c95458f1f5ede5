"""Progress bars on standard error, which is a terminal, a pipe, a file, or cannot be written to at all."""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

PLAIN_EVERY = 30.0  # seconds between two lines where there is no terminal


class _Stderr:
    """The stream of a bar. Without a terminal each drawing is a line of its own. All output is dropped once a write has
    failed, so that the work goes on."""

    def __init__(self, stream: TextIO | None, is_terminal: bool):
        self._stream, self._is_terminal = stream, is_terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        """Equal to its terminal, so that tqdm recognises other writers to it and clears a bar while they write."""
        return other is self or (self._is_terminal and other is self._stream)

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        if self._is_terminal:
            self._try("write", text)
        elif line := text.strip("\r\n "):
            self._try("write", f"{line}\n")

    def flush(self) -> None:
        self._try("flush")

    def _try(self, name: str, *arguments: str) -> None:
        try:
            if self._stream is not None:
                getattr(self._stream, name)(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # otherwise Python flushes it again at exit, and fails


def bar(**options: Any) -> tqdm:
    """tqdm on standard error, redrawn on a terminal, else a line now and then. Use it as a context manager: it then
    ends its line before anything else is printed."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    how = {"dynamic_ncols": True, **options} if is_terminal else {**options, "mininterval": PLAIN_EVERY}
    # `miniters`: how often it is drawn is a matter of time alone.
    return tqdm(file=_Stderr(sys.stderr, is_terminal), miniters=0, **how)  # pyright: ignore[reportArgumentType]
