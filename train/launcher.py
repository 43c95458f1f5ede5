"""DeepSpeed's launcher as a child that can be stopped: SIGTERM reaches the ranks, and their success is ours.

The bare launcher dies of SIGTERM with status 143 and leaves its ranks behind. Where a rank dies, it ends the others.
"""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

from longdraft.train.stop import SIGNALS, stop_signals

POLL_S = 0.2
# A rank is a process that the launcher started with this argument.
RANK_MARK = "--local_rank="


def launch_with_deepspeed(argv: Sequence[str], num_gpus: int | None = None) -> int:
    """Runs `deepspeed ARGV` and returns its exit status; SIGTERM and SIGINT go to the ranks alone, each once.

    Args:
        argv: script and its arguments.
        num_gpus: ranks on this machine, at least 1; None leaves it to DeepSpeed (the GPUs; 1 on a CPU).
    """
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--log_level", "error"]
    command += ["--num_gpus", str(num_gpus)] if num_gpus is not None else []
    command += ["--master_port", str(free_port())]  # DeepSpeed's own is one for all: a second run would fail
    with stop_signals() as received:
        # A session of its own: Ctrl-C in the terminal must not reach launcher and ranks behind our back.
        child = subprocess.Popen([*command, *argv], start_new_session=True)
        told: set[int] = set()
        while child.poll() is None:
            if received:
                for rank in _ranks(child.pid):
                    if rank.pid not in told:
                        told.add(rank.pid)
                        rank.send_signal(SIGNALS[0])
            time.sleep(POLL_S)
    _explain(child.returncode)
    return child.returncode


def _explain(status: int) -> None:
    """A line about a rank that could not speak for itself; the launcher's status is 256 less the signal's number."""
    try:
        name = signal.Signals(256 - status).name
    except ValueError:
        return
    print(
        f"longdraft train: error: a rank was killed by {name} (SIGKILL is often the system's answer to a lack of "
        "memory) and the others were ended; the same command goes on from the newest checkpoint, or from the beginning "
        "where there is none",
        file=sys.stderr,
        flush=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ranks(launcher: int) -> list[psutil.Process]:
    """The rank processes under the launcher, those that are just ending left out."""
    found = []
    try:
        for process in psutil.Process(launcher).children(recursive=True):
            if any(argument.startswith(RANK_MARK) for argument in process.cmdline()):
                found.append(process)
    except psutil.NoSuchProcess:
        pass
    return found
