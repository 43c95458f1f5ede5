"""DeepSpeed's launcher as a child process that can be stopped: SIGTERM reaches the ranks, whose status we return.

The bare launcher dies of SIGTERM with status 143 and leaves its ranks behind; this one ignores it (deaf_launcher.py).
Where a rank dies, it ends the others.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from longdraft.models.device import VISIBLE, check_device, default_device, n_gpus
from longdraft.models.files import STOP_SIGNALS, signals_noted

POLL_S = 0.2
# The launcher starts every rank with this argument.
RANK_MARK = "--local_rank="
DEVICE_FIELD = "train.device"


def settle_device(setting: str) -> str:
    """Make training run where `train.device` says; returns "cuda" or "cpu".

    Raises ValueError where it asks for a GPU and there is none, and where it leaves the device open and there is a GPU
    that PyTorch cannot use.
    """
    if setting == "cpu":
        os.environ[VISIBLE] = "-1"
        return "cpu"
    if setting == "cuda":
        return check_device("cuda", DEVICE_FIELD).type
    return default_device(DEVICE_FIELD, f"set {DEVICE_FIELD}=cpu").type


def rank_devices(num_gpus: int | None, device: str) -> list[str]:
    """The device of each rank of this machine, as a value of CUDA_VISIBLE_DEVICES: the number or UUID of a GPU or of a
    part of one, taken in order from that variable where it is set; on a CPU -1, which hides all GPUs.

    Args:
        num_gpus: the number of ranks, at least 1. None: one for each GPU, or a single one on a CPU.
        device: "cuda" or "cpu".

    Raises ValueError where there are fewer GPUs.
    """
    if device == "cpu":
        return ["-1"] * (num_gpus or 1)
    count, visible = n_gpus(), os.environ.get(VISIBLE)
    # CUDA takes the names in order, up to the first one that does not exist.
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")][:count]
    if num_gpus is not None and num_gpus > len(names):
        whose = "this machine has" if visible is None else f"{VISIBLE}={visible} leaves"
        raise ValueError(f"num_gpus: {num_gpus} ranks, but {whose} {len(names)} GPUs; start at most {len(names)}")
    return names[:num_gpus]


def launch_with_deepspeed(argv: Sequence[str], devices: Sequence[str]) -> int:
    """Run ARGV under DeepSpeed's launcher, with one rank for each device, and return its exit status. A signal to stop
    (STOP_SIGNALS) is passed to the ranks alone, once to each.

    Why not `deepspeed --num_gpus` or `--include`, which start the same launcher: the first ignores
    CUDA_VISIBLE_DEVICES, and neither knows UUIDs.

    Args:
        argv: script and its arguments.
        devices: as `rank_devices` returns them.
    """
    machine = base64.urlsafe_b64encode(json.dumps({"localhost": list(devices)}).encode()).decode()
    command = [sys.executable, "-u", "-m", "longdraft.train.deaf_launcher", "--log_level=error"]
    command += [f"--world_info={machine}", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}"]  # DeepSpeed's default is fixed: a second run would fail
    # Else the import of DeepSpeed looks for a GPU, and warns where there is none.
    on_cpu = {"DS_ACCELERATOR": "cpu"} if devices[0] == "-1" else {}
    with signals_noted() as received:
        # A session of its own, so that Ctrl-C in the terminal does not reach launcher and ranks directly.
        child = subprocess.Popen([*command, *argv], start_new_session=True, env=os.environ | on_cpu)
        signalled: set[int] = set()
        while child.poll() is None:
            if received:
                for rank in _ranks(child.pid):
                    if rank.pid not in signalled:
                        signalled.add(rank.pid)
                        rank.send_signal(STOP_SIGNALS[0])
            time.sleep(POLL_S)
    if child.returncode < 0:  # nothing is left to end the ranks, which are in its session
        with suppress(ProcessLookupError):
            os.killpg(child.pid, STOP_SIGNALS[0])
    _explain(child.returncode)
    return child.returncode


def _explain(status: int) -> None:
    """Print a line about a rank, or DeepSpeed's launcher, that a signal has killed. The launcher's status is 256 less
    the signal's number where a rank was killed."""
    try:
        name = signal.Signals(-status if status < 0 else 256 - status).name
    except ValueError:
        return
    who, others = "a rank", "the others were ended"
    if status < 0:
        who, others = "DeepSpeed's launcher", "the ranks were told to save and leave"
    print(
        f"longdraft train: error: {who} was killed by {name} (SIGKILL is often the system's answer to a lack of "
        f"memory) and {others}; the same command goes on from the newest checkpoint, or from the beginning where there "
        "is none",
        file=sys.stderr,
        flush=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ranks(launcher: int) -> list[psutil.Process]:
    """The rank processes under the launcher, without those that are just ending."""
    found = []
    try:
        for process in psutil.Process(launcher).children(recursive=True):
            if any(argument.startswith(RANK_MARK) for argument in process.cmdline()):
                found.append(process)
    except psutil.NoSuchProcess:
        pass
    return found
