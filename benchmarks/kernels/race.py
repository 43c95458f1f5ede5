"""Times implementations of an operation in turns, from cold caches, and only if their output is right.

A candidate's error against the fp32 reference may be at most twice (for gradients three times) that of plain PyTorch in
the same precision on the same numbers. Each candidate gets a row for each shape, with its time or its `problem`. No
call finds its inputs in a cache. On a GPU, events time it while the host is ahead (`seconds_on` of
kernels/triton/tuning.py), on a CPU the clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.timing import SPUN_OUT, peak_bytes, seconds_of, take_turns
from longdraft.kernels.cpu.library import decoding

OURS = "longdraft"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLUSHED = 2**28  # bytes written before each call on a CPU, more than its caches hold
# Bytes of the copied tensor and width of the square matrices, both larger than caches.
CEILING_SIZES = {"cuda": (2**29, 8192), "cpu": (2**26, 512)}
# In fp32 the error of plain PyTorch may happen to be zero; this fraction of the largest value is always allowed.
FLOOR = 2e-5

# What PyTorch and other libraries raise for unsupported calls, and `Wrong`.
UNSUPPORTED = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, AttributeError, LookupError)
if find_spec("triton") is not None:
    UNSUPPORTED += (import_module("triton").TritonError,)

Run = Callable[[], Any]
# Prepares a candidate for a case; masks, layouts and all else that the layers of a pass share are not timed.
Build = Callable[[Any], Run]


class Profile(NamedTuple):
    """The shapes of a model that the kernels depend on."""

    vocab_size: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int


PROFILES = {
    "llama3.1-8b": Profile(128256, 4096, 32, 8, 128),
    "llama2-7b": Profile(32000, 4096, 32, 32, 128),
    "qwen2.5-7b": Profile(152064, 3584, 28, 4, 128),
    "qwq-32b": Profile(152064, 5120, 40, 8, 128),
    "smollm2-135m": Profile(49152, 576, 9, 3, 64),
    "tiny": Profile(512, 64, 4, 2, 16),  # not a model, only for checks of the benchmarks themselves
}


class Work(NamedTuple):
    """The least number of bytes to move, and the number of floating-point operations."""

    bytes: int
    flops: int


class Wrong(ValueError):
    """A candidate's output is wrong."""


@dataclass
class Bench:
    """Shared by all benchmarks of one run. Each candidate is timed `turns` times."""

    device: torch.device
    dtype: torch.dtype
    turns: int

    def in_turns(self, runs: Mapping[str, Run]) -> dict[str, float]:
        """The median seconds of each run, after a warm-up."""
        for run in runs.values():
            run()
        return {name: median(seconds) for name, seconds in take_turns(runs, self.turns, self._once).items()}

    def _once(self, run: Run) -> float:
        if self.device.type == "cuda":
            from longdraft.kernels.triton.tuning import seconds_on

            return seconds_on(self.device, run)
        # One thread writes, and then we wait, because PyTorch's threads spin for a while after each operation.
        with decoding(True):
            self._flushed.fill_(1)
        time.sleep(SPUN_OUT)
        return seconds_of(run)

    @cached_property
    def _flushed(self) -> Tensor:
        return torch.empty(FLUSHED, dtype=torch.uint8)

    @cached_property
    @torch.no_grad()
    def ceilings(self) -> dict[str, float]:
        """The best that this machine does: bytes per second read and written by a `copy`, FLOP/s of square matrix
        `products` in the bench's dtype. TF32 must be off."""
        n_bytes, width = CEILING_SIZES[self.device.type]
        source = torch.ones(n_bytes // 4, device=self.device)
        target = torch.empty_like(source)
        square = torch.randn(width, width, device=self.device, dtype=self.dtype)
        times = self.in_turns({"copy": lambda: target.copy_(source), "products": lambda: square @ square})
        return {"copy": 2 * n_bytes / times["copy"], "products": 2 * width**3 / times["products"]}


def check_error(out: Tensor, exact: Tensor, plain: Tensor, times: int = 2, largest: bool = True) -> None:
    """Raise Wrong with both numbers if the error of `out` is too large.

    Args:
        exact: the fp32 reference. plain: plain PyTorch's output in the precision of `out`.
        times: how many times plain PyTorch's error is allowed. largest: compare the largest error instead of the norm.
    """
    size = (lambda x: float(x.float().abs().max())) if largest else (lambda x: float(x.float().norm()))
    error = size(out.float() - exact)
    allowed = times * size(plain.float() - exact) + FLOOR * size(exact)
    if not error <= allowed:  # also rejects NaN
        raise Wrong(f"{'max' if largest else 'norm of the'} error {error:.3g}, allowed {allowed:.3g}")


def check_output(name: str, case: Any, out: Tensor) -> None:
    """Allow twice plain PyTorch's error: the largest for ours, the norm for peers. Peers that round before merging
    sometimes double the largest error, but never the norm."""
    check_error(out, case.exact, case.plain, largest=name.startswith(OURS))


def race(
    bench: Bench,
    shape: Mapping[str, Any],
    builds: Mapping[str, Build],
    cases: Sequence[Any],
    work: Work,
    check: Callable[[str, Any, Any], None] = check_output,
    memory: bool = False,
) -> list[dict]:
    """Return one row for every candidate, with `shape` in it. Candidates with a right output are timed in turns.

    Args:
        builds: by name.
        cases: a case's `exact` is its reference, or None for no check; the last case is timed.
        check: gets a candidate's name, a case with a reference and the output; raises Wrong if that is wrong.
        memory: also measure the peak of allocated memory.
    """
    print(", ".join(f"{key} {value}" for key, value in shape.items()), flush=True)
    rows, ready = {}, {}
    for name, build in builds.items():
        rows[name] = {**shape, "implementation": name}
        try:
            ready[name] = _examined(name, build, cases, check)
        except UNSUPPORTED as error:
            rows[name]["problem"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]
            print(f"  {name}: {rows[name]['problem']}", flush=True)
            continue
        if memory:
            rows[name]["peak_mib"] = peak_bytes(ready[name], bench.device) / 2**20
    times = bench.in_turns(ready)
    for name, seconds in times.items():
        rows[name] |= {
            "ms": 1e3 * seconds,
            "share_of_copy": work.bytes / seconds / bench.ceilings["copy"],
            "share_of_products": work.flops / seconds / bench.ceilings["products"],
        }
        if OURS in times:
            rows[name]["over_longdraft"] = seconds / times[OURS]
    return list(rows.values())


def _examined(name: str, build: Build, cases: Sequence[Any], check: Callable[[str, Any, Any], None]) -> Run:
    """The candidate built for the last case, after the outputs of all cases were checked."""
    runs = []
    for case in cases:
        runs.append(build(case))
        out = runs[-1]()
        if case.exact is not None:
            check(name, case, out)
    return runs[-1]
