"""Writes files so that they are there whole or not at all, with the permissions that the umask gives, and names a file
that cannot be read.

Every folder may import this file: it loads neither torch nor anything of ours.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The system's errors for a full disk, a quota and too large a file.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# The beginning of the text that Git LFS leaves in place of a file that it has not fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside `path`, sync it and rename it to `path`. Whatever fails, `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with a new file's usual permissions; safetensors itself would make it 0600."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # as the umask, or the folder's default ACL, gives
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode & 0o7777)


@contextmanager
def damage_named(*files: Path, remedy: str = "fetch it again") -> Iterator[None]:
    """Wrap the reading of these files: an error becomes a ValueError of one sentence that names the damaged file.

    A missing package (ImportError) and a lack of memory (MemoryError) are raised as they are, and the remedy is left
    out if the system does not let the file be read. An empty file and a pointer of Git LFS are refused before anything
    is read. Of several files, those that are no JSON and should be are named, or all if there are none.
    """
    named: tuple[Path, ...] = ()
    try:
        for file in files:
            named = (file,)
            with file.open("rb") as stream:
                start = stream.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                remedy = "run `git lfs pull` in its folder"
                raise ValueError("it is a pointer of Git LFS, not the file itself")
            if not start:
                raise ValueError("it is empty")
        named = ()
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        of_system = error.strerror if isinstance(error, OSError) else None
        if not of_system:
            named = named or tuple(file for file in files if file.suffix == ".json" and not _is_json(file))
        reason = of_system or " ".join(str(error).split()) or type(error).__name__
        advice = "" if of_system and not isinstance(error, FileNotFoundError) else f"; {remedy}"
        raise ValueError(f"{', '.join(map(str, named or files))}: cannot be read ({reason}){advice}") from error


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def sync(path: Path) -> None:
    """Wait until what was written to this file, or renamed in this folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_home(path: str) -> str:
    """`path` with a leading `~` expanded, which YAML does not do, nor a shell after a `=`."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
