"""Starts the ranks of this machine and waits for them. It forwards stop signals to all of them and ends the others if
one dies; if it is killed itself, its ranks end too. DeepSpeed's launcher can also start ranks on other machines, but
dies of SIGTERM and leaves its ranks running.
"""

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from longdraft.models.files import STOP_SIGNALS, signals_noted

POLL_S = 0.2
# How long the other ranks have to exit by themselves after one has failed.
PATIENCE_S = 30.0
# The variable that tells a rank which process started it, and prctl's option (linux/prctl.h).
LAUNCHER, PR_SET_PDEATHSIG = "LONGDRAFT_LAUNCHER", 1
VISIBLE = "CUDA_VISIBLE_DEVICES"


def settle_device(setting: str) -> str:
    """Apply the setting `train.device`; returns "cuda" or "cpu".

    Raises ValueError if it asks for a GPU and there is none, or if it is auto and there is a GPU that PyTorch cannot
    use.
    """
    from longdraft.models.device import check_device, default_device  # they import PyTorch

    if setting == "cpu":
        os.environ[VISIBLE] = "-1"
        return "cpu"
    if setting == "cuda":
        return check_device("cuda", "train.device").type
    return default_device("train.device", "set train.device=cpu").type


def rank_devices(num_gpus: int | None, device: str, name: str = "num_gpus") -> list[str]:
    """The device of each rank of this machine, as a value of CUDA_VISIBLE_DEVICES: the number or UUID of a GPU or of a
    part of one, taken in order from that variable where it is set; on a CPU -1, which hides all GPUs.

    num_gpus: the number of ranks; None: one for each GPU, or a single one on a CPU. device: "cuda" or "cpu".
    Raises ValueError, which begins with `name`, if there are fewer GPUs.
    """
    from longdraft.models.device import n_gpus

    if device == "cpu":
        return ["-1"] * (num_gpus or 1)
    count, visible = n_gpus(), os.environ.get(VISIBLE)
    # CUDA reads the names in order, up to the first one that does not exist.
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")][:count]
    if num_gpus is not None and num_gpus > len(names):
        raise ValueError(f"{name}: {num_gpus} is more than the number of GPUs, {len(names)} ({VISIBLE}={visible})")
    return names[:num_gpus]


def launch_ranks(
    argv: Sequence[str],
    devices: Sequence[str],
    name: str = "longdraft train",
    remedy: str = "the same command resumes from the newest checkpoint",
) -> int:
    """Run a Python script once for each device. Returns the exit status: 0, or that of the first rank that fails (128
    plus the number of the signal that killed it, or that was forwarded). The other ranks are then ended. A stop signal
    (STOP_SIGNALS) is forwarded to the ranks as SIGTERM, and they are waited for, however long they take to save.

    Args:
        argv: the script and its arguments. The script calls `stop_with_launcher`.
        devices: as `rank_devices` returns them.
        name, remedy: of the message if a rank is killed.
    """
    size = str(len(devices))
    shared = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {VISIBLE: ",".join(devices), LAUNCHER: str(os.getpid())}
    if devices[0] == "-1":
        shared["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed's import warns that it found no GPU
    failure, told, kill_at = 0, False, math.inf
    with signals_noted() as received:
        # Each rank has a session of its own, so that Ctrl-C in the terminal does not reach it directly. Stop signals
        # stay blocked in it until it can note them (`signals_noted`).
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-u", *argv],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(len(devices))
        ]
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        while None in (statuses := [rank.poll() for rank in ranks]):
            failure = failure or _failure(statuses)
            kill_at = min(kill_at, time.monotonic() + PATIENCE_S) if failure else kill_at
            for rank in ranks:
                if time.monotonic() > kill_at:
                    rank.kill()
                elif (failure or received) and not told:
                    rank.terminate()
            told = told or bool(failure or received)
            time.sleep(POLL_S)
    failure = failure or _failure(statuses)
    if failure < 0 and not received:
        why = f"a rank was killed by {signal.Signals(-failure).name} (often out of memory) and the others were ended"
        print(f"{name}: error: {why}; {remedy}", file=sys.stderr)
    return failure if failure >= 0 else 128 + (received[0] if received else -failure)


def _failure(statuses: Sequence[int | None]) -> int:
    """The exit status of a failed rank, or 0. Ranks that a signal killed come first: others may fail as a result."""
    return min(filter(None, statuses), default=0)


def stop_with_launcher() -> None:
    """Have the system send a SIGTERM to this rank when `launch_ranks` dies, whatever kills it."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:  # started by DeepSpeed's launcher or by none
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != int(launcher):  # it had died before
        signal.raise_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
