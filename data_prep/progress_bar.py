"""Progress bars on standard error."""

import sys
from typing import Any

from tqdm import tqdm

PLAIN_EVERY = 30.0  # seconds between two lines where there is no terminal


def progress_bar(**options: Any) -> tqdm:
    """tqdm, redrawn on a terminal, else written now and then. Use it as a context manager: it then ends its line before
    anything else is printed."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    how = {"dynamic_ncols": True, **options} if is_terminal else {**options, "mininterval": PLAIN_EVERY}
    return tqdm(**how, miniters=0)  # how often it is drawn is a matter of time alone
