"""Bars of progress that never stop the work: where standard error cannot be written, it goes on without them."""

import os
import sys
from typing import Any

from tqdm import tqdm


class _Errors:
    """Standard error; once it refuses what is written, nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def __eq__(self, other: object) -> bool:
        """So that tqdm knows who else writes there, and takes a bar away for as long."""
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python would try again at its end, and fail


def bar(**options: Any) -> tqdm:
    """tqdm on standard error. To be used as a context: it ends its line before anything else is said."""
    return tqdm(file=_Errors(), **options)  # pyright: ignore[reportArgumentType]
