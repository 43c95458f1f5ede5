"""What only the user can mend becomes a ValueError of one line: no place for a folder, a full disk, a lost network."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longdraft.data_prep.hub import is_network_error
from longdraft.models.files import DISK_FULL


@contextmanager
def failures_described(path: Path) -> Iterator[None]:
    """A full disk, what the system does not let us read or write, and a lost connection are the user's to mend, not
    faults of the program: they become a ValueError that says so."""
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
    """Raises ValueError, before any work, where it can be seen now that the folder cannot be made."""
    try:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    except OSError as error:  # a name too long, or no right to look
        raise ValueError(f"out {_short(out)} cannot be made ({error.strerror}); give another by --out") from error
    if there == out and not out.is_dir():
        raise ValueError(f"out {out} is a file; give the folder to make")
    if not there.is_dir():
        raise ValueError(f"out {out} cannot be made: {there} is a file; give another folder by --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"out {out} cannot be written: {there} allows no writing; give another folder by --out")


def check_outside(out: Path, sources: Iterable[str]) -> None:
    """Raises ValueError where the folder to make lies within a source, and would be read as one."""
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
