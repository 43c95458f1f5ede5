"""Tasks in several processes, which leave nothing behind whichever of them is killed."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, TypeVar

T = TypeVar("T")


def run_in_processes(
    work: Callable[[T], object], tasks: Sequence[T], n_workers: int, on_done: Callable[[T], object]
) -> None:
    """`work(task)` for all tasks, in the order given, in so many processes. `on_done` is told here of each that ends.

    Raises ValueError where a worker was killed, else what `work` raises; after Ctrl-C no worker is left.
    """
    # spawn: a fork would copy the threads' locks of whatever the caller has loaded (torch, tokenizers).
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (work,))
    try:
        with _no_ctrl_c():  # the workers start at the first of these, and keep it so
            futures = {pool.submit(_work_on, task): task for task in tasks}
        for future in as_completed(futures):
            future.result()
            on_done(futures[future])
    except BrokenProcessPool:
        raise ValueError(
            "a worker was killed (out of memory?); finished shards are kept: call again, with fewer --workers"
        ) from None
    except KeyboardInterrupt:
        # A task takes seconds, and half of one is nothing that is kept.
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Ctrl-C waits until the end; processes started inside never get it, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_work: Callable[[Any], object] | None = None  # in a worker process


def _begin_worker(work: Callable[[Any], object]) -> None:
    global _work
    _work = work
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: the pool's pipe stays open in the workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    wait([parent.sentinel])
    os._exit(1)


def _work_on(task: Any) -> None:
    assert _work is not None, "the pool did not call _begin_worker"
    _work(task)
