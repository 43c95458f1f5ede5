"""How tasks are divided: among machines (`--shard i/n`), and on each machine among processes.

If any of these processes is killed, none of the others keeps running.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """One of `of` machines that share the tasks of a folder; `number` counts from 1."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise ValueError(f"shard is {self.number}/{self.of}, valid: 1/n to n/n")


def read_machine(text: str) -> Machine:
    """Parse the i/n of --shard."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise ValueError(f"--shard: {text!r} does not have the form i/n, such as 1/4 for the first of four machines")
    return Machine(int(number), int(of))


def tasks_of(machine: Machine | None, tasks: Sequence[T]) -> Sequence[T]:
    """The machine's tasks: every `of`-th one, beginning with the `number`-th. Without a machine, all of them."""
    return tasks if machine is None else tasks[machine.number - 1 :: machine.of]


def run_in_processes(
    work: Callable[[T], object], tasks: Sequence[T], n_workers: int, on_done: Callable[[T], object]
) -> None:
    """Call `work(task)` for all tasks, in the given order, in `n_workers` processes.

    on_done: called in this process with each task that is done.
    Raises ValueError if a worker was killed, and whatever `work` raises. After Ctrl-C no worker is left.
    """
    # spawn: a fork would copy the locks of threads that the caller's libraries run (torch, tokenizers).
    context = multiprocessing.get_context("spawn")
    not_ours = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (_Inherited(work),))
    try:
        with _sigint_blocked():  # the first submit starts the workers, which inherit the mask and keep it
            futures = {pool.submit(_work_on, task): task for task in tasks}
        for future in as_completed(futures):
            future.result()
            on_done(futures[future])
    except BrokenProcessPool:
        raise ValueError(
            "a worker was killed (out of memory?); finished shards are kept: call again, with fewer --workers"
        ) from None
    except KeyboardInterrupt:
        # A task takes seconds, and nothing of a half-done task is kept anyway.
        for worker in set(multiprocessing.active_children()) - not_ours:
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Processes started inside never receive it, from their first instruction on.

    The mask is this thread's alone. If another thread (tqdm's) gets the signal, Python still calls the handler here.
    Its exception would leave a worker half started, which ends with a traceback. So the handler only notes the signal.
    """
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and handler is not None
    if ours:
        signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if ours:
            signal.signal(signal.SIGINT, handler)
        for number in noted[:1]:
            signal.raise_signal(number)


_work: Callable[[Any], object] | None = None  # set in worker processes only


class _Inherited:
    """An object that worker processes read from a file without a name, whose descriptor they inherit.

    A plain argument goes through a pipe, which holds less than a tokenizer's megabytes. So the next worker would start
    only once this one has begun to read, 0.4 s later.
    """

    def __init__(self, value: object):
        self._file = TemporaryFile()  # noqa: SIM115 - open for as long as workers are started
        self._file.write(pickle.dumps(value))
        self._file.flush()

    def __reduce__(self) -> tuple:
        return _read_inherited, (DupFd(self._file.fileno()),)


def _read_inherited(descriptor: Any) -> Any:
    """The object in the file of `_Inherited`."""
    with os.fdopen(descriptor.detach(), "rb") as file:
        # From its start, wherever other processes are in it.
        return pickle.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))


def _begin_worker(work: Any) -> None:
    """work: what was `_Inherited` in the process that started this one."""
    global _work
    _work = work
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End this worker when its parent dies. It would wait for work forever: the workers hold the pool's pipe open."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    wait([parent.sentinel])
    os._exit(1)


def _work_on(task: Any) -> None:
    assert _work is not None, "the pool did not call _begin_worker"
    _work(task)
