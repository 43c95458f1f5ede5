"""Files that are there whole or not at all, and that others may read as far as the umask lets them.

All floors may import this file: it loads neither torch nor anything of ours.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# What the system says of a full disk, of a quota and of too large a file.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)` beside `path`, synced and renamed to it. Whatever fails, `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_tensors(tensors: "Mapping[str, Tensor]", path: Path, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file with the permissions of any new file here: safetensors itself gives 0600, for nobody else."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode  # what umask, or the folder's own rule, gives
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode & 0o7777)


def sync(path: Path) -> None:
    """What was written to this file, or renamed in this folder, is on the disk afterwards."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_home(path: str) -> str:
    """The same path, in the home folder where it begins with `~`, which neither YAML nor a shell behind `=` reads."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
