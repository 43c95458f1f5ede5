"""Progress bars on standard error."""

import sys
from contextlib import suppress
from typing import Any

from tqdm import tqdm

PLAIN_EVERY = 30.0  # seconds between two lines where there is no terminal


class _Lines:
    """Standard error as a file or a pipe: each drawing is a line of its own. Errors of writing are ignored."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            if sys.stderr is not None and (line := text.strip("\r\n ")):
                print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress_bar(**options: Any) -> tqdm:
    """tqdm, redrawn on a terminal, else a line now and then. Use it as a context manager: it then ends its line before
    anything else is printed."""
    # `miniters`: how often it is drawn is a matter of time alone.
    if sys.stderr is not None and sys.stderr.isatty():
        return tqdm(**{"dynamic_ncols": True, **options}, miniters=0)
    return tqdm(**{**options, "mininterval": PLAIN_EVERY}, miniters=0, file=_Lines())  # pyright: ignore[reportArgumentType]
