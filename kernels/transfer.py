"""Between host and device without waiting for what is queued there: small tensors on their way, either way."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longdraft.kernels import backend


class HostCopy:
    """Tensors on their way to the host. The copy is queued behind what is queued now; `lists` waits for it and for
    nothing that is queued later. So a step can be read while the next one runs, which may overwrite them. On a CPU,
    where one step ends before the next begins, nothing is copied."""

    def __init__(self, *tensors: Tensor):
        self._tensors, self._arrived = list(tensors), None
        if tensors[0].is_cuda:
            pinned = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors]
            self._tensors = [to.copy_(x, non_blocking=True) for to, x in zip(pinned, tensors, strict=True)]
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))
        elif not backend.is_host(tensors[0].device):
            self._tensors = [x.clone() for x in tensors]

    def lists(self) -> list:
        """Each tensor's `tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [x.tolist() for x in self._tensors]


class Moment:
    """When what is queued now will be done: on CUDA by the device's own clock, elsewhere by the host's, `clock`."""

    def __init__(self, device: torch.device, clock: Callable[[], float]):
        self._event, self._at = None, 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at = clock()

    def seconds_to(self, later: "Moment") -> float:
        """Of the device, up to a later moment of it; both have passed (something queued behind them has been read)."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1e3


def from_host(x: Tensor, device: torch.device | str | None) -> Tensor:
    """`x.to(device)`, queued where that would wait for all that is queued before."""
    if x.is_cuda or device is None or torch.device(device).type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def integers(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """These numbers there, int64, without a wait."""
    return from_host(torch.as_tensor(numbers, dtype=torch.int64), device)


def read_together(*tensors: Tensor) -> list[list]:
    """Each tensor's `tolist`, int64 or bool [B, ...] all; elsewhere than on a CPU in one read."""
    if not tensors or backend.is_host(tensors[0].device):
        return [x.tolist() for x in tensors]
    joined = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in tensors], dim=1).tolist()
    found, first = [], 0
    for x in tensors:
        width = x.numel() // max(len(x), 1)
        rows = [row[first : first + width] for row in joined]
        found.append([row[0] for row in rows] if x.dim() == 1 else rows)
        first += width
    return found
