"""Which devices a target can be on, and whether this machine has the one that is asked for."""

import torch


def check_device(device: torch.device | str, name: str = "device") -> torch.device:
    """The device that is meant.

    Raises: ValueError, beginning with `name`, for one that is not supported or that this machine does not have.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ", ".join(["cpu", *(["cuda"] if count else []), *(f"cuda:{i}" for i in range(count))])
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: {str(device)!r} is no device for a target; this machine has {here}")
    if found.type == "cuda" and (found.index or 0) >= count:
        why = "" if count else " (PyTorch sees no CUDA device)"
        raise ValueError(f"{name}: {str(device)!r} is not here{why}; this machine has {here}")
    return found
