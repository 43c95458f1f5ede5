"""Times several implementations in turns, from cold caches; measures the machine's ceilings, and memory.

On a GPU each call is timed by CUDA events after a write that empties the L2 cache. The host runs ahead during that
write, so launches that keep up with the device cost nothing, but waiting for the host does. On a CPU the last level of
cache is emptied in the same way. Not here: whether an output is right (candidates.py).
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft.benchmarks.drafters.timing import SPUN_OUT, seconds_of, take_turns
from longdraft.kernels.cpu.threads import decoding
from longdraft.kernels.linear import emulates_bf16
from longdraft.models.device import available_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARM_UPS = 2
FEWEST_TURNS = 3
# Bytes of the copied tensor and width of the square matrices, both larger than caches: (full, quick).
CEILING_SIZES = {"cuda": ((2**30, 8192), (2**29, 8192)), "cpu": ((2**28, 1024), (2**26, 512))}


class Ceilings(NamedTuple):
    """The best this machine does: bytes per second read and written by a copy, bytes per second read by a sum, and
    FLOP/s of square matrix products in bf16 and fp32."""

    copy: float
    read: float
    bf16: float
    fp32: float

    @property
    def memory(self) -> float:
        """Bytes per second of the faster of copy and sum, for floors."""
        return max(self.copy, self.read)

    def products(self, dtype: torch.dtype) -> float:
        """FLOP/s in this dtype. A CPU that emulates bf16 is faster in fp32, and may compute in that."""
        return self.fp32 if dtype == torch.float32 else max(self.bf16, self.fp32)

    def __str__(self) -> str:
        return (
            f"ceilings: copy {self.copy / 1e9:,.1f} GB/s (read and written), sum {self.read / 1e9:,.1f} GB/s, "
            f"products {self.bf16 / 1e12:,.3f} TFLOP/s in bf16, {self.fp32 / 1e12:,.3f} in fp32"
        )


@dataclass
class Bench:
    """What all benchmarks of one run share. At most `repeats` turns are timed, and whatever has not begun within
    `budget` seconds is reported as not measured."""

    device: torch.device
    dtype: torch.dtype
    repeats: int
    budget: float
    quick: bool = False
    log: Callable[[str], object] = print
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.begun + self.budget - time.monotonic()

    @property
    def spent(self) -> str:
        """The reason why the rest is not measured."""
        return f"the budget of {self.budget:.0f} s was spent"

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @cached_property
    def _flush(self) -> torch.Tensor:
        # On a GPU at least a GiB, because writing it takes longer than the host needs to launch a few kernels.
        size = max(4 * cache_bytes(self.device), 2**30) if self.device.type == "cuda" else 2 * cache_bytes(self.device)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def cold(self) -> None:
        """Empty the device's caches by writing something else.

        On a CPU a single thread writes, and then we wait: PyTorch's threads spin for a while after each operation, and
        would spin beside what is timed.
        """
        with decoding(self.device.type == "cpu"):
            self._flush.fill_(1)
        if self.device.type == "cpu":
            time.sleep(SPUN_OUT)

    @cached_property
    @torch.no_grad()
    def ceilings(self) -> Ceilings:
        """The best of several turns, measured when first asked for. TF32 must be off."""
        n_bytes, width = CEILING_SIZES[self.device.type][self.quick]
        source = torch.ones(n_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        # Emulated bf16 is a hundred times slower, which a small product shows as well.
        low_width = min(width, 256) if self.device.type == "cpu" and emulates_bf16() else width
        low = torch.randn(low_width, low_width, device=self.device, dtype=torch.bfloat16)
        high = torch.randn(width, width, device=self.device)
        times = self.in_turns(
            {
                "copy": lambda: target.copy_(source),
                "sum": source.sum,
                "dot": lambda: torch.dot(source, source),
                "bf16": lambda: low @ low,
                "fp32": lambda: high @ high,
            }
        )
        return Ceilings(
            copy=2 * n_bytes / times["copy"].least,
            read=n_bytes / min(times["sum"].least, times["dot"].least),
            bf16=2 * low_width**3 / times["bf16"].least,
            fp32=2 * width**3 / times["fp32"].least,
        )

    def in_turns(self, runs: Mapping[str, Callable[[], Any]]) -> dict[str, "Times"]:
        """Warm up each run, then time the runs in turns."""
        for run in runs.values():
            for _ in range(WARM_UPS):
                run()
        found = take_turns(runs, self.repeats, self._once, lambda turn: turn >= FEWEST_TURNS and self.left < 0)
        return {name: Times.of(seconds) for name, seconds in found.items()}

    def _once(self, run: Callable[[], Any]) -> float:
        self.cold()
        if self.device.type != "cuda":
            return seconds_of(run)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        start.record(stream)
        run()
        end.record(stream)
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3


class Times(NamedTuple):
    """Median and least seconds of `turns` calls; `spread` is the width of the middle half over the median."""

    median: float
    least: float
    spread: float
    turns: int

    @staticmethod
    def of(seconds: list[float]) -> "Times":
        median = statistics.median(seconds)
        quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [median] * 3
        return Times(median, min(seconds), (quarters[2] - quarters[0]) / median, len(seconds))


def cache_bytes(device: torch.device) -> int:
    """The size of the last level of cache, or if it is unknown more than any device has."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 128 * 2**20
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20}
    found = [int(text[:-1]) * units[text[-1]] for path in sizes if (text := path.read_text().strip())[-1] in units]
    return max(found, default=32 * 2**20)


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that can still be allocated."""
    found = available_bytes(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if found is None else found
