"""Progress bars that never stop the work: if standard error cannot be written to, the work goes on without them."""

import os
import sys
from typing import Any

from tqdm import tqdm


class _Stderr:
    """Standard error that drops all output once a write has failed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def __eq__(self, other: object) -> bool:
        """Equal to sys.stderr, so that tqdm recognises other writers to it and clears a bar while they write."""
        return other is self or other is sys.stderr

    __hash__ = object.__hash__

    def write(self, text: str) -> None:
        self._try("write", text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, name: str, *arguments: str) -> None:
        try:
            if sys.stderr is not None:
                getattr(sys.stderr, name)(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # otherwise Python flushes it again at exit, and fails


def bar(**options: Any) -> tqdm:
    """tqdm on standard error. Use it as a context manager: it then ends its line before anything else is printed."""
    return tqdm(file=_Stderr(), **options)  # pyright: ignore[reportArgumentType]
