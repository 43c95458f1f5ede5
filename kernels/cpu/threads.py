"""Threads while decoding on a CPU: who has them, PyTorch or the C kernels, and a clock of the work that they do.

The threads themselves are threads.inc's.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from longdraft.kernels.cpu.library import library

# Whether this thread is inside `decoding`.
is_decoding: ContextVar[bool] = ContextVar("is_decoding", default=False)


@contextmanager
def decoding(enabled: bool = True) -> Iterator[None]:
    """A context in which this thread's passes of few rows go through the C kernels in fp32 too, on as many threads as
    PyTorch has.

    PyTorch's own operations between them run on one thread: two pools that wait for work by spinning would take the
    processors from each other. Without the kernels, or if not `enabled`, nothing changes.
    """
    lib = library() if enabled else None
    if lib is None:
        yield
        return
    token, taken = is_decoding.set(True), lib.take_threads(1)
    try:
        yield
    finally:
        lib.give_threads(taken)
        is_decoding.reset(token)


@contextmanager
def free_processors(enabled: bool = True) -> Iterator[None]:
    """A context in which PyTorch's operations of this thread run on as many threads as there are processors that no
    other process uses at the moment, at least one.

    OpenMP's threads wait for each other at the end of every operation, so one that has no processor holds up all.
    """
    lib, elsewhere = (library(), running_elsewhere()) if enabled else (None, 0)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    taken = lib.take_threads(max(1, processors - elsewhere)) if lib is not None and elsewhere else 0
    try:
        yield
    finally:
        if lib is not None:
            lib.give_threads(taken)


def running_elsewhere() -> int:
    """How many threads of other processes run or wait for a processor now; 0 where the system does not tell."""
    try:
        running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
        ours = sum(
            (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            for task in Path("/proc/self/task").iterdir()
        )
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, running - ours)


def work_seconds() -> float:
    """A clock of this thread's work, in seconds. It runs at the speed of time on an idle machine and stands still while
    other processes have the processors. The C kernels' work counts as an even share of what all threads spend on it."""
    lib = library()
    return time.thread_time() - (0.0 if lib is None else lib.uneven_seconds())
