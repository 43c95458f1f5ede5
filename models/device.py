"""Checks and chooses the device of a target; tells how much memory is free there."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

NODES, MEMORY = Path("/dev"), Path("/proc/meminfo")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """`device` as a torch.device.

    Raises ValueError, which begins with `name`, for one that is not supported or that this machine does not have.
    """
    count = n_gpus()
    here = ", ".join(["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))])
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: {str(device)!r} is no device for a target; this machine has {here}")
    if found.type == "cuda" and (found.index or 0) >= count:
        why = f" ({_unusable()})" if _nodes() and not count else ""
        raise ValueError(f"{name}: {str(device)!r} is not here{why}; this machine has {here}")
    return found


def default_device(name: str, otherwise: str) -> torch.device:
    """The first GPU; the CPU if there is none, or if CUDA_VISIBLE_DEVICES hides them all (empty or -1).

    Args:
        otherwise: what a user does to ask for the CPU, for the message.
    Raises: ValueError, which begins with `name`, if there is a GPU that PyTorch cannot use: work that was meant for it
        would take days on a CPU.
    """
    if n_gpus():
        return torch.device("cuda")
    if _nodes() and not hidden():
        raise ValueError(f"{name}: {_unusable()}; if the CPU is meant, {otherwise}")
    return torch.device("cpu")


def n_gpus() -> int:
    """How many GPUs PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides all GPUs on purpose."""
    first = os.environ.get(VISIBLE, "0").split(",")[0].strip()
    return first in ("", "-1")


def start(device: torch.device, name: str) -> None:
    """Start CUDA on a GPU, which takes some of its memory. Does nothing for a CPU.

    Raises ValueError, which begins with `name`, if CUDA does not start: another process has the GPU for itself, it is
    out of order, or the machine is not up yet.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: CUDA does not start on {device}: {_first_line(error)}; look at nvidia-smi, or name another device"
        ) from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what PyTorch's allocator has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU or of this machine; None where the system does not tell."""
    if device.type == "cuda":
        return free_bytes(device)
    if not MEMORY.exists():
        return None
    fields = dict(line.split(":", 1) for line in MEMORY.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes this GPU the current one: Triton launches kernels on the current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _nodes() -> list[Path]:
    """The device files of the GPUs that the driver has found."""
    return sorted(node for node in NODES.glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit())


def _unusable() -> str:
    """PyTorch's own reason why it does not see the GPUs of this machine."""
    try:
        torch.cuda.init()
        why = "it gives no reason"
    except (RuntimeError, AssertionError) as error:
        why = _first_line(error)
    return (
        f"this machine has a GPU ({_nodes()[0]}) that PyTorch cannot use: {why} ({VISIBLE}="
        f"{os.environ.get(VISIBLE, 'unset')}); look at nvidia-smi"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
