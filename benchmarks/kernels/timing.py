"""Times implementations in turns, from cold caches, and measures the machine's ceilings.

On a GPU `triton.testing.do_bench` times the calls, behind a write that empties the L2 cache; on a CPU each call is
timed by the wall clock behind such a write.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch

from longdraft.benchmarks.drafters.timing import SPUN_OUT, seconds_of, take_turns
from longdraft.kernels.cpu.library import decoding
from longdraft.kernels.linear import emulates_bf16
from longdraft.models.device import available_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLUSHED = 2**28  # bytes written before each call on a CPU, more than its caches hold
DO_BENCH_MS = {"warmup": 5, "rep": 25}  # of one turn on a GPU
# Bytes of the copied tensor and width of the square matrices, both larger than caches: (full, quick).
CEILING_SIZES = {"cuda": ((2**30, 8192), (2**29, 8192)), "cpu": ((2**28, 1024), (2**26, 512))}


class Ceilings(NamedTuple):
    """The best this machine does: bytes per second read and written by a copy, FLOP/s of square matrix products."""

    copy: float
    bf16: float
    fp32: float

    def products(self, dtype: torch.dtype) -> float:
        """FLOP/s in this dtype. A CPU that emulates bf16 is faster in fp32, and may compute in that."""
        return self.fp32 if dtype == torch.float32 else max(self.bf16, self.fp32)

    def __str__(self) -> str:
        return (
            f"ceilings: copy {self.copy / 1e9:,.1f} GB/s (read and written), products {self.bf16 / 1e12:,.3f} TFLOP/s "
            f"in bf16, {self.fp32 / 1e12:,.3f} in fp32"
        )


@dataclass
class Bench:
    """What all benchmarks of one run share. At most `turns` turns are timed, and whatever has not begun within `budget`
    seconds is reported as not measured."""

    device: torch.device
    dtype: torch.dtype
    turns: int
    budget: float
    quick: bool = False
    log: Callable[[str], object] = print
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.begun + self.budget - time.monotonic()

    @property
    def free_bytes(self) -> int:
        """Bytes of memory that can still be allocated."""
        found = available_bytes(self.device)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if found is None else found

    def in_turns(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """The median seconds of each run, after a warm-up."""
        for run in runs.values():
            run()
        found = take_turns(runs, self.turns, self._once, lambda turn: turn > 0 and self.left < 0)
        return {name: median(seconds) for name, seconds in found.items()}

    def _once(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            from triton.testing import do_bench

            milliseconds: Any = do_bench(run, **DO_BENCH_MS, return_mode="median")
            return milliseconds / 1e3
        # One thread writes, and then we wait: PyTorch's threads spin for a while after each operation, beside the next.
        with decoding(True):
            self._flushed.fill_(1)
        time.sleep(SPUN_OUT)
        return seconds_of(run)

    @cached_property
    def _flushed(self) -> torch.Tensor:
        return torch.empty(FLUSHED, dtype=torch.uint8)

    @cached_property
    @torch.no_grad()
    def ceilings(self) -> Ceilings:
        """Measured when first asked for. TF32 must be off."""
        n_bytes, width = CEILING_SIZES[self.device.type][self.quick]
        source = torch.ones(n_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        # Emulated bf16 is a hundred times slower, which a small product shows as well.
        low_width = min(width, 256) if self.device.type == "cpu" and emulates_bf16() else width
        low = torch.randn(low_width, low_width, device=self.device, dtype=torch.bfloat16)
        high = torch.randn(width, width, device=self.device)
        products = {"bf16": lambda: low @ low, "fp32": lambda: high @ high}
        times = self.in_turns({"copy": lambda: target.copy_(source), **products})
        return Ceilings(2 * n_bytes / times["copy"], 2 * low_width**3 / times["bf16"], 2 * width**3 / times["fp32"])
