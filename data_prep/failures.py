"""Turns errors that only the user can fix (an impossible folder, a full disk, a lost network) into ValueErrors of one
line."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longdraft.data_prep.hub import is_network_error
from longdraft.models.files import DISK_FULL


@contextmanager
def failures_described(path: Path) -> Iterator[None]:
    """Turn a full disk, a file that may not be read or written, and a lost connection into a ValueError that says what
    to do: these are not faults of the program. path: the folder that is made, or read."""
    try:
        yield
    except Exception as error:
        if is_network_error(error):
            raise ValueError(
                f"the hub could not be read to the end ({error}); what is finished is kept: call again"
            ) from error
        if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
            raise
        if error.errno in DISK_FULL:
            raise ValueError(
                f"no room for {path} ({error.strerror}); what is finished is kept: make room, call again"
            ) from error
        raise ValueError(
            f"{error.filename or path}: {error.strerror or error}; mend its rights or its place and call again: "
            "what is finished is kept"
        ) from error


def check_out(out: Path) -> None:
    """Raises ValueError, before any work is done, if it is already clear that the folder cannot be made."""
    try:
        existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:  # the name is too long, or a parent may not be read
        raise ValueError(f"out {_short(out)} cannot be made ({error.strerror}); give another by --out") from error
    if existing == out and not out.is_dir():
        raise ValueError(f"out {out} is a file; give the folder to make")
    if not existing.is_dir():
        raise ValueError(f"out {out} cannot be made: {existing} is a file; give another folder by --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"out {out} cannot be written: {existing} allows no writing; give another folder by --out")


def check_outside(out: Path, sources: Iterable[str]) -> None:
    """Raises ValueError if the folder to make lies in a source, so that its files would be read as a source."""
    for source in map(Path, sources):
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"out {out} lies in the source {source}, and would be read as one; choose another")


def make_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ValueError(
            f"out {_short(out)} cannot be made ({error.strerror}); give another folder by --out"
        ) from error


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
