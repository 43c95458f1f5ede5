"""Runs the tasks of a folder in processes, adds up their records, and describes errors that the user must correct."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

T = TypeVar("T")
KEPT = "finished work is kept: call again"


@contextmanager
def failures_described(path: Path) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into a ValueError of one line. path: the folder that is made."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{str(path)[:200]}: {reason}; fix this and call again: finished work is kept") from error


def run_in_processes(
    work: Callable[[T], object], tasks: Sequence[T], n_workers: int, on_done: Callable[[], object]
) -> None:
    """Call `work(task)` for all tasks, in the given order, in `n_workers` processes. They die with this process.

    on_done: called in this process after each task.
    Raises ValueError if a worker was killed, and whatever `work` raises. After Ctrl-C no worker is left.
    """
    with NamedTemporaryFile() as file:  # workers read it simultaneously; a pipe would start them one by one
        file.write(pickle.dumps(work))
        file.flush()
        # spawn: a fork would copy locks held by threads of the caller's libraries (torch, tokenizers).
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (file.name,))
        try:
            # The first submit starts the workers. They inherit this mask and so never receive Ctrl-C.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                futures = [pool.submit(_work_on, task) for task in tasks]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for future in as_completed(futures):
                future.result()
                on_done()
        except BrokenProcessPool:
            raise ValueError(f"a worker was killed (out of memory?); {KEPT}, with fewer --workers") from None
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.kill()  # a half-done task leaves nothing to keep anyway
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_work: Callable[[Any], object]  # set in worker processes only


def _begin_worker(file: str) -> None:
    global _work
    _work = pickle.loads(Path(file).read_bytes())
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End this worker when its parent dies. It would otherwise wait forever: the workers hold the pool's pipe open."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    wait([parent.sentinel])
    os._exit(1)


def _work_on(task: Any) -> None:
    _work(task)


def add_up(records: Sequence[dict]) -> dict:
    """Combine records of tasks into one with the first record's fields. Numbers are added, lists concatenated, and
    dicts combined key by key with sorted keys; of texts the first is kept."""
    return {name: _added([record[name] for record in records if name in record]) for name in records[0]}


def _added(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        names = sorted(set().union(*values))
        return {name: _added([value[name] for value in values if name in value]) for name in names}
    if isinstance(values[0], list):
        return [*chain.from_iterable(values)]
    return values[0] if isinstance(values[0], str) else sum(values)
