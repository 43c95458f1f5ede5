"""Writes files so that they are there whole or not at all, with the permissions that the umask gives.

Every folder may import this file: it loads neither torch nor anything of ours.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The system's errors for a full disk, a quota and too large a file.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
