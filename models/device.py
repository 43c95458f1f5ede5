"""Checks and chooses the device of a target; tells how much memory is free there."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

NODES, MEMORY = Path("/dev"), Path("/proc/meminfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_CAPABILITY = 8, 0  # the oldest GPU that the kernels compile for


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """`device` as a torch.device. Raises ValueError, which begins with `name`, if PyTorch does not see it."""
    here = ["cpu", *(f"cuda:{i}" for i in range(n_gpus()))]
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or str(found) not in [*here, *(["cuda"] if here[1:] else [])]:
        raise ValueError(f"{name}: {str(device)!r} is not a device for a target; PyTorch sees {', '.join(here)}")
    return found


def default_device(name: str, otherwise: str) -> torch.device:
    """The first GPU; the CPU if there is none, or if CUDA_VISIBLE_DEVICES hides them all (empty or -1).

    Args:
        otherwise: how a user asks for the CPU, for the message.
    Raises: ValueError, which begins with `name`, if there is a GPU that PyTorch cannot use: work that was meant for it
        would take days on a CPU.
    """
    if n_gpus():
        return torch.device("cuda")
    visible = os.environ.get(VISIBLE, "unset")
    if any(NODES.glob("nvidia[0-9]*")) and visible.split(",")[0].strip() not in ("", "-1"):
        raise ValueError(
            f"{name}: PyTorch cannot use the GPU of this machine ({VISIBLE}={visible}; see nvidia-smi); if the CPU is "
            f"meant, {otherwise}"
        )
    return torch.device("cpu")


def option_device(given: str | None) -> torch.device:
    """The device of a command's option --device: the given one, else `default_device`."""
    return check_device(given, "--device") if given else default_device("--device", "give --device cpu")


def n_gpus() -> int:
    """How many GPUs PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start(device: torch.device, name: str) -> None:
    """Start CUDA on a GPU, which takes some of its memory; does nothing for a CPU. Raises ValueError, which begins with
    `name`, if CUDA does not start (another process may hold the GPU exclusively) or the GPU is too old for the
    kernels."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name}: CUDA does not start on {device} (nvidia-smi tells who uses it): {reason}") from error
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise ValueError(
            f"{name}: {device} is {torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}), and the "
            "kernels need sm_80 (Ampere) or later; give another GPU, or cpu"
        )


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including what PyTorch's allocator has reserved but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU or of this machine; None if the system does not report it."""
    if device.type == "cuda":
        return free_bytes(device)
    lines = MEMORY.read_text().splitlines() if MEMORY.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes this GPU the current one: Triton launches kernels on the current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
