"""Copies of small tensors between host and device, either way, without waiting for work queued on the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longdraft.kernels import backend


class HostCopy:
    """Tensors on their way to the host, all in one copy.

    The copy is queued now, and `lists` waits for it and for nothing that is queued later. So a step's tensors can
    be read while the next step runs and perhaps overwrites them. On a CPU a step ends before the next one begins, so
    nothing is copied.
    """

    def __init__(self, *tensors: Tensor):
        self._tensors, self._arrived = list(tensors), None
        if tensors[0].is_cuda:
            # As bytes, the widest numbers first, so that all are aligned.
            order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
            flat = [tensors[i].flatten().contiguous().view(torch.uint8) for i in order]
            joined = flat[0] if len(flat) == 1 else torch.cat(flat)
            host = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True).copy_(joined, non_blocking=True)
            for i, part in zip(order, host.split([len(x) for x in flat]), strict=True):
                self._tensors[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))
        elif not backend.is_host(tensors[0].device):
            self._tensors = [x.clone() for x in tensors]

    def lists(self) -> list:
        """Wait for the copy and return each tensor's `tolist`."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [x.tolist() for x in self._tensors]


class Moment:
    """The moment when all work queued now will be done: by the device's own clock on CUDA, elsewhere by `clock`."""

    def __init__(self, device: torch.device, clock: Callable[[], float]):
        self._event, self._at = None, 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._at = clock()

    def seconds_to(self, later: "Moment") -> float:
        """Seconds from this moment to a later one on the same device. Both must have passed: something that was queued
        after them has been read."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1e3


def from_host(x: Tensor, device: torch.device) -> Tensor:
    """`x.to(device)`, but a copy from the host to CUDA is only queued, where `to` would wait for all work before it."""
    if x.is_cuda or device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def fill_from_host(to: Tensor, x: Tensor) -> None:
    """`to.copy_(x)`, where a copy from the host to CUDA is only queued."""
    to.copy_(x.pin_memory() if to.is_cuda else x, non_blocking=True)


def integers(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """The numbers as an int64 tensor on the device, without a wait."""
    return from_host(torch.as_tensor(numbers, dtype=torch.int64), device)


def read_together(*tensors: Tensor) -> list[list]:
    """Each tensor's `tolist`, with a single read from the device. All are int64 or bool, [B, ...]."""
    if not tensors or backend.is_host(tensors[0].device):
        return [x.tolist() for x in tensors]
    joined = torch.cat([x.flatten(1) if x.dim() > 1 else x[:, None] for x in tensors], dim=1).tolist()
    lists, first = [], 0
    for x in tensors:
        width = x.numel() // max(len(x), 1)
        rows = [row[first : first + width] for row in joined]
        lists.append([row[0] for row in rows] if x.dim() == 1 else rows)
        first += width
    return lists
