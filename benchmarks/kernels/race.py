"""Times implementations of the same thing in turns, from cold caches, and only those whose output is right.

A candidate's error against the fp32 reference may be at most twice (for gradients three times) that of plain PyTorch in
the same precision on the same numbers. Each candidate gets a row for each shape, whose `status` is "ok", "wrong",
"failed" (ours raised), "not available" (a peer cannot run here) or "not measured" (the budget is spent).
On a GPU `triton.testing.do_bench` times the calls; on a CPU the clock does, behind a write that empties the caches.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.timing import SPUN_OUT, peak_bytes, seconds_of, take_turns
from longdraft.benchmarks.kernels.profiles import Work
from longdraft.kernels.cpu.library import decoding
from longdraft.kernels.linear import emulates_bf16
from longdraft.models.device import available_bytes

OURS = "longdraft"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLUSHED = 2**28  # bytes written before each call on a CPU, more than its caches hold
# Bytes of the copied tensor and width of the square matrices, both larger than caches.
CEILING_SIZES = {"cuda": (2**29, 8192), "cpu": (2**26, 512)}
# In fp32 the error of plain PyTorch may happen to be zero; this fraction of the largest value is always allowed.
FLOOR = 2e-5

# What PyTorch, compilers and other libraries raise for what they do not support; Triton's errors derive from Exception.
UNSUPPORTED = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, AttributeError, LookupError)

Run = Callable[[], Any]
# Prepares a candidate for a case; masks, layouts and whatever else the layers of a pass share are not timed.
Build = Callable[[Any], Run]


class NotTimed(Exception):
    """A candidate is not timed. status: as in the rows."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status = status


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
    """What all benchmarks of one run share. Each candidate is timed `turns` times, and whatever has not begun within
    `budget` seconds is reported as not measured."""

    device: torch.device
    dtype: torch.dtype
    turns: int
    budget: float
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

    def in_turns(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """The median seconds of each run, after a warm-up."""
        for run in runs.values():
            run()
        return {name: median(seconds) for name, seconds in take_turns(runs, self.turns, self._once).items()}

    def _once(self, run: Run) -> float:
        if self.device.type == "cuda":
            from triton.testing import do_bench

            milliseconds: Any = do_bench(run, warmup=5, rep=25, return_mode="median")
            return milliseconds / 1e3
        # One thread writes, and then we wait: PyTorch's threads spin for a while after each operation, beside the next.
        with decoding(True):
            self._flushed.fill_(1)
        time.sleep(SPUN_OUT)
        return seconds_of(run)

    @cached_property
    def _flushed(self) -> Tensor:
        return torch.empty(FLUSHED, dtype=torch.uint8)

    @cached_property
    @torch.no_grad()
    def ceilings(self) -> Ceilings:
        """Measured when first asked for. TF32 must be off."""
        n_bytes, width = CEILING_SIZES[self.device.type]
        source = torch.ones(n_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        # Emulated bf16 is a hundred times slower, which a small product shows as well.
        low_width = min(width, 256) if self.device.type == "cpu" and emulates_bf16() else width
        low = torch.randn(low_width, low_width, device=self.device, dtype=torch.bfloat16)
        high = torch.randn(width, width, device=self.device)
        products = {"bf16": lambda: low @ low, "fp32": lambda: high @ high}
        times = self.in_turns({"copy": lambda: target.copy_(source), **products})
        return Ceilings(2 * n_bytes / times["copy"], 2 * low_width**3 / times["bf16"], 2 * width**3 / times["fp32"])

    def attempt(self, name: str, work: Callable[[], Any]) -> tuple[Any, dict[str, str]]:
        """Do a candidate's work within the budget. Returns its result or None, and the row's status and reason."""
        if self.left < 0:
            return None, {"status": "not measured", "reason": f"the budget of {self.budget:.0f} s was spent"}
        try:
            return work(), {"status": "ok"}
        except NotTimed as error:
            return None, {"status": error.status, "reason": str(error)}
        except Exception as error:
            if not isinstance(error, UNSUPPORTED) and not type(error).__module__.startswith("triton"):
                raise
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            return None, {"status": "failed" if name.startswith(OURS) else "not available", "reason": reason}

    def figures(self, seconds: float, work: Work) -> dict[str, float]:
        """The time in ms, and its relation to this machine's ceilings."""
        bytes_per_second, flops_per_second = work.bytes / seconds, work.flops / seconds
        return {
            "ms": 1e3 * seconds,
            "bytes_per_second": bytes_per_second,
            "flops_per_second": flops_per_second,
            "share_of_copy": bytes_per_second / self.ceilings.copy,
            "share_of_products": flops_per_second / self.ceilings.products(self.dtype),
        }


def check_error(out: Tensor, exact: Tensor, plain: Tensor, times: int = 2, largest: bool = True) -> None:
    """Raise NotTimed ("wrong") with both numbers if the error of `out` is too large.

    Args:
        exact: the fp32 reference. plain: plain PyTorch's output in the precision of `out`.
        times: how many times plain PyTorch's error is allowed. largest: compare the largest error instead of the norm.
    """
    size = (lambda x: float(x.float().abs().max())) if largest else (lambda x: float(x.float().norm()))
    if out.shape != exact.shape:
        raise NotTimed("wrong", f"shape {tuple(out.shape)} instead of {tuple(exact.shape)}")
    error = size(out.float() - exact)
    allowed = times * size(plain.float() - exact) + FLOOR * size(exact)
    if not error <= allowed:  # nor for NaN
        raise NotTimed("wrong", f"{'max' if largest else 'norm of the'} error {error:.3g}, allowed {allowed:.3g}")


def race(
    bench: Bench,
    shape: Mapping[str, Any],
    builds: Mapping[str, Build],
    cases: Callable[[], Sequence[Any]],
    check: Callable[[str, Any, Any], None],
    work: Work,
    memory: bool = False,
) -> list[dict]:
    """Return a row for every candidate, with `shape` in it. Those whose output is right are timed in turns.

    Args:
        builds: by name; a name that begins with OURS is ours.
        cases: makes the cases, unless the budget is spent. A case's `exact` is its reference or None; the last one is
            timed.
        check: raises NotTimed for a candidate's name, a case with a reference and a wrong output.
        memory: also measure the peak of allocated bytes.
    """
    bench.log(", ".join(f"{key} {value}" for key, value in shape.items()))
    made = cases() if bench.left > 0 else ()
    rows, ready = {}, {}
    for name, build in builds.items():

        def examined(name: str = name, build: Build = build) -> Run:
            for case in made:
                run = build(case)
                out = run()
                if case.exact is not None:
                    check(name, case, out)
            return run

        ready[name], found = bench.attempt(name, examined)
        rows[name] = {**shape, "implementation": name, **found}
        if ready[name] is None:
            bench.log(f"  {name}: {found['status']}: {found['reason']}")
        elif memory:
            rows[name]["peak_bytes"] = peak_bytes(ready[name], bench.device)
    times = bench.in_turns({name: run for name, run in ready.items() if run is not None})
    for name, seconds in times.items():
        rows[name] |= bench.figures(seconds, work)
        if OURS in times:
            rows[name]["over_longdraft"] = seconds / times[OURS]
    return list(rows.values())
