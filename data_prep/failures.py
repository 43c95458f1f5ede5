"""Turns errors that only the user can fix (an impossible folder, a full disk, a lost network) into ValueErrors of one
line."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longdraft.models.files import DISK_FULL

KEPT = "what is finished is kept: call again"


@contextmanager
def failures_described(path: Path) -> Iterator[None]:
    """Turn a full disk, a file that may not be read or written, and a lost connection into a ValueError that says what
    to do: these are not faults of the program. path: the folder that is made, or read."""
    try:
        yield
    except Exception as error:
        if _is_network_error(error):
            raise ValueError(f"the hub could not be read to the end ({error}); {KEPT}") from error
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise
        if error.errno in DISK_FULL:
            raise ValueError(f"no room for {path} ({error.strerror}); make room; {KEPT}") from error
        where, why = str(error.filename or path), error.strerror or error
        raise ValueError(f"{where[:200]}: {why}; change its rights or its place; {KEPT}") from error


def check_out(out: Path) -> None:
    """Raises ValueError, before any work is done, if it is already clear that the folder cannot be made."""
    try:
        existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:  # the name is too long, or a parent may not be read
        raise ValueError(f"out: {str(out)[:200]} cannot be made ({error.strerror}); give another folder") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "allows no writing" if existing.is_dir() else "is a file"
        raise ValueError(f"out: {out} cannot be made, since {existing} {why}; give another folder")


def check_outside(out: Path, sources: Iterable[str]) -> None:
    """Raises ValueError if the folder to make lies in a source, so that its files would be read as a source."""
    for source in map(Path, sources):
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"out: {out} lies in the source {source}, and would be read as one; choose another")


def _is_network_error(error: BaseException) -> bool:
    """Whether the error says that the hub's client lost its connection; False if the client was never imported."""
    if "huggingface_hub" not in sys.modules:
        return False
    from huggingface_hub import errors

    return isinstance(error, errors.HTTPError)  # pyright: ignore[reportPrivateImportUsage]
