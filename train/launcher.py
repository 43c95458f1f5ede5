"""DeepSpeed's launcher as a child that can be stopped: SIGTERM reaches the ranks, and their success is ours.

The bare launcher dies of SIGTERM with status 143 and leaves its ranks behind; the one here is deaf to it
(deaf_launcher.py). Where a rank dies, it ends the others.
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
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from longdraft.models.device import VISIBLE, check_device, default_device, n_gpus
from longdraft.train.stop import SIGNALS, stop_signals
from longdraft.train.typed import UNREADABLE, read_yaml

POLL_S = 0.2
# A rank is a process that the launcher started with this argument.
RANK_MARK = "--local_rank="
DEVICE_FIELD = "train.device"


def settle_device(path: str | Path, overrides: Sequence[str]) -> str:
    """Sees to it that training runs where `train.device` of this config says; returns "cuda" or "cpu". For all stages
    of a config at once: the ranks are one group of processes.

    Raises: ValueError where the config cannot be read, where it asks for a GPU and there is none, and where it leaves
        the device open and there is a GPU that PyTorch cannot use.
    """
    raw = read_yaml(path, overrides)
    try:
        wanted = OmegaConf.select(raw, DEVICE_FIELD, default="auto")
    except UNREADABLE:  # which is named with all the rest of the config
        wanted = "auto"
    if wanted == "cpu":
        os.environ[VISIBLE] = "-1"
        return "cpu"
    if wanted == "cuda":
        return check_device("cuda", DEVICE_FIELD).type
    return default_device(DEVICE_FIELD, f"set {DEVICE_FIELD}=cpu").type


def rank_devices(num_gpus: int | None, device: str) -> list[str]:
    """What each rank of this machine has, in the words of CUDA_VISIBLE_DEVICES: numbers or UUIDs of GPUs or of parts of
    them, the first of those that it names where it is set; on a CPU -1, which hides all.

    Args:
        num_gpus: ranks, at least 1; None: all GPUs there are, or one rank on a CPU.
        device: "cuda" or "cpu".

    Raises: ValueError where there are fewer GPUs.
    """
    if device == "cpu":
        return ["-1"] * (num_gpus or 1)
    count, visible = n_gpus(), os.environ.get(VISIBLE)
    # CUDA takes what it is told up to the first that is not there.
    names = [str(i) for i in range(count)] if visible is None else [name.strip() for name in visible.split(",")][:count]
    if num_gpus is not None and num_gpus > len(names):
        whose = "this machine has" if visible is None else f"{VISIBLE}={visible} leaves"
        raise ValueError(f"num_gpus: {num_gpus} ranks, but {whose} {len(names)} GPUs; start at most {len(names)}")
    return names[:num_gpus]


def launch_with_deepspeed(argv: Sequence[str], devices: Sequence[str]) -> int:
    """Runs ARGV under DeepSpeed's launcher, one rank a device, and returns its exit status; a wish to stop (SIGNALS)
    goes to the ranks alone, once to each.

    `deepspeed --num_gpus` and `--include` end in the same launcher, but the first forgets CUDA_VISIBLE_DEVICES, and
    neither knows UUIDs.

    Args:
        argv: script and its arguments.
        devices: as `rank_devices` gives them.
    """
    machine = base64.urlsafe_b64encode(json.dumps({"localhost": list(devices)}).encode()).decode()
    command = [sys.executable, "-u", "-m", "longdraft.train.deaf_launcher", "--log_level=error"]
    command += [f"--world_info={machine}", "--master_addr=127.0.0.1"]
    command += [f"--master_port={free_port()}"]  # DeepSpeed's own is one for all: a second run would fail
    # Else its import looks for a GPU, and warns where there is none.
    on_cpu = {"DS_ACCELERATOR": "cpu"} if devices[0] == "-1" else {}
    with stop_signals() as received:
        # A session of its own: Ctrl-C in the terminal must not reach launcher and ranks behind our back.
        child = subprocess.Popen([*command, *argv], start_new_session=True, env=os.environ | on_cpu)
        told: set[int] = set()
        while child.poll() is None:
            if received:
                for rank in _ranks(child.pid):
                    if rank.pid not in told:
                        told.add(rank.pid)
                        rank.send_signal(SIGNALS[0])
            time.sleep(POLL_S)
    if child.returncode < 0:  # nobody is left to end the ranks, which are of its session
        with suppress(ProcessLookupError):
            os.killpg(child.pid, SIGNALS[0])
    _explain(child.returncode)
    return child.returncode


def _explain(status: int) -> None:
    """A line about a rank that could not speak for itself, or about DeepSpeed's launcher, whose status is 256 less the
    signal's number where a rank was killed."""
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
    """The rank processes under the launcher, those that are just ending left out."""
    found = []
    try:
        for process in psutil.Process(launcher).children(recursive=True):
            if any(argument.startswith(RANK_MARK) for argument in process.cmdline()):
                found.append(process)
    except psutil.NoSuchProcess:
        pass
    return found
