"""Turns errors that only the user can correct (a full disk, a missing right, a lost network) into ValueErrors of one
line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longdraft.models.files import DISK_FULL

KEPT = "what is finished is kept: call again"


@contextmanager
def failures_described(path: Path) -> Iterator[None]:
    """Turn an OSError or a lost connection to the hub into a ValueError that says what to do.

    path: the folder that is made or read."""
    try:
        yield
    except Exception as error:
        hub_errors = sys.modules.get("huggingface_hub.errors")  # absent if the hub's client was never used
        if hub_errors is not None and isinstance(error, hub_errors.HTTPError):
            raise ValueError(f"the hub could not be read to the end ({error}); {KEPT}") from error
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise
        if error.errno in DISK_FULL:
            raise ValueError(f"no room for {path} ({error.strerror}); make room; {KEPT}") from error
        where, why = str(error.filename or path), error.strerror or error
        raise ValueError(f"{where[:200]}: {why}; change its rights or its place; {KEPT}") from error
