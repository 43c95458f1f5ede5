"""Checks and chooses the device of a target; tells how much memory is free there."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

NODES, MEMORY = Path("/dev"), Path("/proc/meminfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """`device` as a torch.device. Raises ValueError, which begins with `name`, for one that is not on this machine."""
    count = n_gpus()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is not None and (found.type == "cpu" or (found.type == "cuda" and (found.index or 0) < count)):
        return found
    here = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    why = f" ({_unusable()})" if _has_gpu() and not count else ""
    raise ValueError(f"{name}: {str(device)!r} is no device for a target{why}; this machine has {here}")


def default_device(name: str, otherwise: str) -> torch.device:
    """The first GPU; the CPU if there is none, or if CUDA_VISIBLE_DEVICES hides them all (empty or -1).

    Args:
        otherwise: what a user does to ask for the CPU, for the message.
    Raises: ValueError, which begins with `name`, if there is a GPU that PyTorch cannot use: work that was meant for it
        would take days on a CPU.
    """
    if n_gpus():
        return torch.device("cuda")
    is_hidden = os.environ.get(VISIBLE, "0").split(",")[0].strip() in ("", "-1")
    if _has_gpu() and not is_hidden:
        raise ValueError(f"{name}: {_unusable()}; if the CPU is meant, {otherwise}")
    return torch.device("cpu")


def n_gpus() -> int:
    """How many GPUs PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start(device: torch.device, name: str) -> None:
    """Start CUDA on a GPU, which takes some of its memory; nothing for a CPU. Raises ValueError, which begins with
    `name`, if CUDA does not start, as where another process has the GPU for itself."""
    try:
        if device.type == "cuda":
            torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise ValueError(f"{name}: CUDA does not start on {device}: {_first_line(error)}; see nvidia-smi") from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what PyTorch's allocator has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU or of this machine; None where the system does not tell."""
    if device.type == "cuda":
        return free_bytes(device)
    lines = MEMORY.read_text().splitlines() if MEMORY.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes this GPU the current one: Triton launches kernels on the current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _has_gpu() -> bool:
    """Whether the driver has found a GPU."""
    return any(NODES.glob("nvidia[0-9]*"))


def _unusable() -> str:
    """PyTorch's own reason why it does not see the GPUs of this machine."""
    try:
        torch.cuda.init()
        why = "it gives no reason"
    except (RuntimeError, AssertionError) as error:
        why = _first_line(error)
    visible = os.environ.get(VISIBLE, "unset")
    return f"this machine has a GPU that PyTorch cannot use: {why} ({VISIBLE}={visible}); see nvidia-smi"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
