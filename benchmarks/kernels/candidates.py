"""Candidates: several implementations of the same thing. One is timed only if its output is right.

A candidate's error against the fp32 reference may be at most twice (for gradients three times) that of plain PyTorch in
the same precision on the same numbers. Each candidate gets a row for each shape, whose `status` is "ok", "wrong",
"failed" (ours raised), "not available" (a peer cannot run here) or "not measured" (the budget is spent).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels.profiles import Work
from longdraft.benchmarks.kernels.timing import Bench

OURS = "longdraft"
# What PyTorch, compilers and other libraries raise for a shape, dtype or device that they do not support. Triton's
# errors derive directly from Exception and are recognised by their module.
_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, AttributeError, IndexError, KeyError)
# In fp32 the error of plain PyTorch may happen to be zero; this fraction of the largest value is always allowed.
FLOOR = 2e-5

Run = Callable[[], Any]
# Prepares a candidate for a case; masks, layouts and whatever else the layers of a pass share are not timed.
Build = Callable[[Any], Run]
# (Name, case with a reference, output) -> None if the output is right, otherwise what is wrong.
Verdict = Callable[[str, Any, Any], str | None]


class Unavailable(Exception):
    """A candidate cannot run here; the message says why."""


def too_far(out: Tensor, exact: Tensor, plain: Tensor, times: int = 2, largest: bool = True) -> str | None:
    """Return None if the error of `out` is small enough, otherwise both numbers in words.

    Args:
        exact: the fp32 reference. plain: plain PyTorch's output in the precision of `out`.
        times: how many times plain PyTorch's error is allowed. largest: compare the largest error instead of the norm.
    """
    size = (lambda x: float(x.float().abs().max())) if largest else (lambda x: float(x.float().norm()))
    if out.shape != exact.shape:
        return f"shape {tuple(out.shape)} instead of {tuple(exact.shape)}"
    error = size(out.float() - exact)
    allowed = times * size(plain.float() - exact) + FLOOR * size(exact)
    if error <= allowed:  # false for NaN
        return None
    return f"{'max' if largest else 'norm of the'} error {error:.3g}, allowed {allowed:.3g}"


def race(
    bench: Bench,
    shape: Mapping[str, Any],
    builds: Mapping[str, Build],
    cases: Callable[[], Sequence[Any]],
    verdict: Verdict,
    work: Work,
    memory: bool = False,
) -> list[dict]:
    """Return a row for every candidate, with `shape` in it. Those whose output is right are timed in turns.

    Args:
        builds: by name; a name that begins with OURS is ours.
        cases: makes the cases, unless the budget is spent. A case's `exact` is its reference or None; the last one is
            timed.
        memory: also measure the peak of allocated bytes.
    """
    rows = {name: {**shape, "implementation": name} for name in builds}
    bench.log(", ".join(f"{key} {value}" for key, value in shape.items()))
    made = cases() if bench.left > 0 else ()
    ready: dict[str, Run] = {}
    for name, build in builds.items():
        row = rows[name]
        row["status"], reason, run = _examine(bench, name, build, made, verdict)
        if run is None:
            row["reason"] = reason
            bench.log(f"  {name}: {row['status']}: {reason}")
            continue
        ready[name] = run
        if memory:
            row["peak_bytes"] = peak_bytes(run, bench.device)
    for name, seconds in bench.in_turns(ready).items():
        rows[name] |= figures(bench, seconds, work)
    compare(list(rows.values()))
    return list(rows.values())


def _examine(
    bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict
) -> tuple[str, str, Run | None]:
    """(Status, reason, the function to time or None)."""
    run = None
    try:
        if bench.left < 0:
            return "not measured", f"the budget of {bench.budget:.0f} s was spent", None
        for case in cases:
            run = build(case)
            out = run()
            if case.exact is not None and (reason := verdict(name, case, out)):
                return "wrong", reason, None
    except Unavailable as error:
        return "not available", str(error), None
    except Exception as error:
        if not (isinstance(error, _ERRORS) or type(error).__module__.startswith("triton")):
            raise
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return "failed" if name.startswith(OURS) else "not available", f"{type(error).__name__}: {line}"[:300], None
    return "ok", "", run


def figures(bench: Bench, seconds: float, work: Work) -> dict[str, float]:
    """The time in ms, and its relation to this machine's ceilings."""
    bytes_per_second, flops_per_second = work.bytes / seconds, work.flops / seconds
    return {
        "ms": 1e3 * seconds,
        "bytes_per_second": bytes_per_second,
        "flops_per_second": flops_per_second,
        "share_of_copy": bytes_per_second / bench.ceilings.copy,
        "share_of_products": flops_per_second / bench.ceilings.products(bench.dtype),
    }


def compare(rows: Sequence[dict]) -> None:
    """Add to the timed rows of one shape their time relative to that of OURS."""
    ours = next((row["ms"] for row in rows if row["implementation"] == OURS and "ms" in row), None)
    for row in rows:
        if ours and "ms" in row:
            row["over_longdraft"] = row["ms"] / ours
