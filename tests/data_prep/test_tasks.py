"""Workers start side by side, however much each of them is told."""

import os
import signal
import threading
import time
from functools import partial
from multiprocessing import popen_spawn_posix as spawn

from longdraft.data_prep.tasks import run_in_processes


def test_a_worker_starts_before_the_one_before_it_has_read_its_work(monkeypatch):
    """Each worker is stopped at its first instruction, until all have been started."""
    start, workers, done = spawn.util.spawnv_passfds, list[int](), list[float]()
    late = threading.Timer(60, lambda: [os.kill(pid, signal.SIGCONT) for pid in workers])

    def stopped(path, args, descriptors):
        pid = start(path, args, descriptors)
        if any(b"spawn_main" in os.fsencode(arg) for arg in args) and not late.finished.is_set():
            os.kill(pid, signal.SIGSTOP)
            workers.append(pid)
            if len(workers) == 3:
                late.cancel()
                for worker in workers:
                    os.kill(worker, signal.SIGCONT)
        return pid

    monkeypatch.setattr(spawn.util, "spawnv_passfds", stopped)
    late.start()
    begin = time.monotonic()
    run_in_processes(partial(pow, exp=1, mod=1 << 8_000_000), [3, 5, 7, 9], 3, done.append)  # a megabyte of work
    assert sorted(done) == [3, 5, 7, 9] and len(workers) == 3
    assert time.monotonic() - begin < 60, "the second worker waited for the first"
