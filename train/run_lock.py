"""A lock on a run's folder, so that no two processes train in it."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from longdraft.train.ranks import Ranks

# Errors of locking on a file system that has no locks: Lustre without its option flock, NFS without lockd.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(run_dir: str | Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder against other runs; all ranks enter together. The system releases the lock when a process
    dies.

    Raises ValueError, on all ranks, where another process trains in this folder or it cannot be written.
    """
    handles: list[TextIO] = []  # on the first rank alone
    ranks.from_first(lambda: handles.append(_lock(Path(run_dir))))
    try:
        yield
    finally:
        for handle in handles:
            handle.close()


def _lock(folder: Path) -> TextIO:
    """A file of the folder that is locked until it is closed; on a file system without locks a warning is printed."""
    handle = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if handle is not None and error.errno in WITHOUT_LOCKS:
            print(
                f"train.run_dir: {folder} lies on a file system without locks ({error.strerror}); training goes on, "
                "but nothing keeps another process from training there too",
                flush=True,
            )
            return handle
        if handle is not None:
            handle.close()
        if isinstance(error, BlockingIOError):
            raise ValueError(
                f"train.run_dir: another process trains in {folder}; stop it (an orphaned rank, perhaps) or give "
                "another folder"
            ) from None
        raise ValueError(f"train.run_dir: {folder} cannot be written: {error.strerror}; give another folder") from error
    return handle
