"""How the tasks of a folder are divided among machines (`--shard i/n`) and processes, and their records added up."""

import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
NAMED_BAD = 20  # bad documents named in a manifest; all are counted


class Machine(NamedTuple):
    """One of `of` machines that share the tasks of a folder; `number` counts from 1."""

    number: int
    of: int


def read_machine(text: str) -> Machine:
    """Parse the i/n of --shard."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise ValueError(f"--shard: {text!r} is not valid; give i/n from 1/n to n/n, such as 1/4 for the first of four")
    return Machine(int(number), int(of))


def tasks_of(machine: Machine | None, tasks: Sequence[T]) -> Sequence[T]:
    """The machine's tasks: every `of`-th one, beginning with the `number`-th. Without a machine, all of them."""
    return tasks if machine is None else tasks[machine.number - 1 :: machine.of]


def run_in_processes(
    work: Callable[[T], object], tasks: Sequence[T], n_workers: int, on_done: Callable[[T], object]
) -> None:
    """Call `work(task)` for all tasks, in the given order, in `n_workers` processes. They die with this process.

    on_done: called in this process with each task that is done.
    Raises ValueError if a worker was killed, and whatever `work` raises. After Ctrl-C no worker is left.
    """
    # spawn: a fork would copy the locks of threads that the caller's libraries run (torch, tokenizers).
    context, not_ours = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    with NamedTemporaryFile() as file:  # workers read it at the same time; a pipe would make them start one by one
        file.write(pickle.dumps(work))
        file.flush()
        pool = ProcessPoolExecutor(n_workers, context, _begin_worker, (file.name,))
        try:
            # The first submit starts the workers. They inherit this mask and so never receive Ctrl-C.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                futures = {pool.submit(_work_on, task): task for task in tasks}
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for future in as_completed(futures):
                future.result()
                on_done(futures[future])
        except BrokenProcessPool:
            raise ValueError(
                "a worker was killed (out of memory?); finished shards are kept: call again, with fewer --workers"
            ) from None
        except KeyboardInterrupt:
            for worker in set(multiprocessing.active_children()) - not_ours:
                worker.kill()  # nothing of a half-done task is kept anyway
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_work: Callable[[Any], object]  # set in worker processes only


def _begin_worker(file: str) -> None:
    global _work
    _work = pickle.loads(Path(file).read_bytes())
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """End this worker when its parent dies. It would wait for work forever: the workers hold the pool's pipe open."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker process"
    wait([parent.sentinel])
    os._exit(1)


def _work_on(task: Any) -> None:
    _work(task)


def add_up(records: Sequence[dict]) -> dict:
    """Combine records of tasks into one with the first record's fields. Numbers are added, lists concatenated, dicts
    combined key by key with their keys sorted, and of texts the first is taken."""
    return {name: _added([record[name] for record in records if name in record]) for name in records[0]}


def _added(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        names = sorted(set().union(*values))
        return {name: _added([value[name] for value in values if name in value]) for name in names}
    if isinstance(values[0], list):
        return [*chain.from_iterable(values)]
    return values[0] if isinstance(values[0], str) else sum(values)


def count_and_hash(sources: Mapping[str, dict]) -> dict:
    """The number of a plan's source files, and one hash over their names and hashes."""
    return {"files": len(sources), "sha256": hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()}
