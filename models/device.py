"""Which devices a target can be on, whether this machine has the one that is asked for, and what is free there.

Nothing here starts CUDA, but for `start` and `free_bytes`.
"""

import os
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

# Where a driver shows the GPUs that it has found, and where it says its version.
NODES, VERSION = Path("/dev"), Path("/proc/driver/nvidia/version")
VISIBLE = "CUDA_VISIBLE_DEVICES"
# What PyTorch and CUDA say where a sound driver shows them no GPU.
NONE_SEEN = "No CUDA GPUs are available|no CUDA-capable device"
# The first driver for each major version of CUDA, on Linux.
DRIVERS = {"11": 450, "12": 525, "13": 580}


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """The device that is meant.

    Raises: ValueError, beginning with `name`, for one that is not supported or that this machine does not have.
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
        why = "" if count else " (PyTorch sees no CUDA device)"
        if not count and _nodes():
            why = f" ({_unusable()})"
        raise ValueError(f"{name}: {str(device)!r} is not here{why}; this machine has {here}")
    return found


def default_device(name: str, otherwise: str) -> torch.device:
    """The first GPU; on a machine without any, and where CUDA_VISIBLE_DEVICES hides them all by being empty or -1, the
    CPU.

    Args:
        otherwise: how the CPU is asked for.

    Raises: ValueError, beginning with `name`, where there is a GPU and PyTorch cannot use it: what was meant for it
        would take days on a CPU.
    """
    if n_gpus():
        return torch.device("cuda")
    if _nodes() and not hidden():
        raise ValueError(f"{name}: {_unusable()}; if the CPU is meant, {otherwise}")
    return torch.device("cpu")


def n_gpus() -> int:
    """GPUs that PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves no GPU on purpose."""
    first = os.environ.get(VISIBLE, "0").split(",")[0].strip()
    return first in ("", "-1")


def start(device: torch.device, name: str) -> None:
    """Start CUDA on a GPU, which takes some of its memory; nothing for a CPU.

    Raises: ValueError, beginning with `name`, where it does not start: a GPU that another process has for itself, one
        that is out of order, a machine that is not up yet.
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
    """Of a GPU's memory; what PyTorch keeps for itself without using it is free, too."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, this GPU is the current one: Triton launches its kernels there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _nodes() -> list[Path]:
    return sorted(node for node in NODES.glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdigit())


def _unusable() -> str:
    """What was found of the GPUs that PyTorch does not see, and what to do."""
    nodes, needed = _nodes(), torch.version.cuda
    found = f"this machine has a GPU ({nodes[0]}) that PyTorch cannot use: "
    if needed is None:
        return f"{found}{torch.__version__} is a build of PyTorch without CUDA; install one with CUDA"
    driver, least = _driver(), DRIVERS.get(needed.split(".")[0])
    if driver is not None and least is not None and int(driver.split(".")[0]) < least:
        return f"{found}its driver is {driver}, and CUDA {needed} needs {least} or newer; update the driver"
    try:
        torch.cuda.init()
        why = "it gives no reason"
    except (RuntimeError, AssertionError) as error:
        why = _first_line(error)
    if (visible := os.environ.get(VISIBLE)) is not None and re.search(NONE_SEEN, why):
        return f"{found}{VISIBLE}={visible} names none that is there; name those of nvidia-smi -L, or unset it"
    return f"{found}{why} (driver {driver or 'unknown'}, CUDA {needed}); look at nvidia-smi"


def _driver() -> str | None:
    """Version of the NVIDIA driver that is loaded."""
    if not VERSION.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", VERSION.read_text(encoding="utf-8", errors="replace"))
    return None if found is None else found[1]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
