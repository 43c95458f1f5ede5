"""Calls of rows.py recorded once and made again in one go: on a CPU what a CUDA graph is on a GPU.

A pass of one row through a model of 30 layers is 240 calls of some microseconds to a tenth of a millisecond, and takes
twice as long where Python prepares them one by one (docs/LOG.md). Not here: what is recorded, and when.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longdraft.kernels.cpu_impl import rows

T = TypeVar("T")


class Unrecordable(Exception):
    """The work does something that is no call of rows.py."""


class _Call(ctypes.Structure):
    """`call` of rows.c."""

    _fields_ = [("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p)]


class _NothingElse(TorchDispatchMode):
    """PyTorch may make views and allocate; whatever it would compute would be missing the next time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.new_empty.default:
            raise Unrecordable(str(func))
        return func(*args, **(kwargs or {}))


class Program(Generic[T]):
    """The calls that `work` makes, which are made at once.

    Every tensor they name is kept, so they always find their memory: `run` reads what the inputs then hold and writes
    the outputs anew. Whatever else of the host went into the calls is as it was, so `work` must not read tensors.

    Raises: Unrecordable, where `work` has PyTorch compute something; the calls before are made.
    """

    def __init__(self, work: Callable[[], T]):
        self._kept: list[tuple] = []
        token = rows.listener.set(lambda *call: self._kept.append(call))
        try:
            with _NothingElse():
                self.outputs = work()
        finally:
            rows.listener.reset(token)
        calls = [_Call(function, ctypes.addressof(given)) for function, given, _ in self._kept]
        self._calls = (_Call * len(calls))(*calls)

    def run(self) -> T:
        """Make the calls again: the same outputs, written anew."""
        library = rows.library()
        assert library is not None
        if library.make_calls(ctypes.addressof(self._calls), len(self._calls)):
            raise MemoryError("no memory for the rows of a pass")
        return self.outputs
