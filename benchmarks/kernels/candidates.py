"""Candidates: several implementations of the same thing. One is timed only if its output is right.

A candidate's error against the fp32 reference may be at most twice (for gradients three times) that of plain PyTorch in
the same precision on the same numbers. Nothing is left out silently: each candidate gets a row for each shape, whose
`status` is "ok", "wrong", "failed" (ours raised), "not available" (a peer cannot run here) or "not measured".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from longdraft.benchmarks.drafters.timing import peak_bytes
from longdraft.benchmarks.kernels.profiles import Work
from longdraft.benchmarks.kernels.timing import Bench, Times

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
    cases: Sequence[Any],
    verdict: Verdict,
    work: Work,
    memory: bool = False,
) -> list[dict]:
    """Return a row for every candidate, with `shape` in it. Those whose output is right are timed in turns.

    Args:
        builds: by name; a name that begins with OURS is ours.
        cases: each has a reference as its `exact`, or None; the last case is timed.
        memory: also measure the peak of allocated bytes.
    """
    rows, ready = [], {}
    for name, build in builds.items():
        outcome, run = admit(bench, name, build, cases, verdict)
        rows.append({**shape, "implementation": name, **outcome})
        if run is not None:
            ready[name] = run
            if memory:
                rows[-1]["peak_bytes"] = peak_bytes(run, bench.device)
    times = bench.in_turns(ready)
    for row in rows:
        if row["implementation"] in times:
            row |= figures(bench, times[row["implementation"]], work)
    ratios(rows)
    return rows


def refused(shape: Mapping[str, Any], names: Iterable[str], reason: str) -> list[dict]:
    """Return a row for every candidate of a shape that is not measured."""
    return [{**shape, "implementation": name, "status": "not measured", "reason": reason} for name in names]


def figures(bench: Bench, times: Times, work: Work) -> dict:
    """Times in ms, and their relation to this machine's ceilings; `over_floor` is the time relative to moving the bytes
    once."""
    bytes_per_second, flops_per_second = work.bytes / times.median, work.flops / times.median
    return {
        "ms": 1e3 * times.median,
        "least_ms": 1e3 * times.least,
        "spread": times.spread,
        "turns": times.turns,
        "bytes": work.bytes,
        "flops": work.flops,
        "bytes_per_second": bytes_per_second,
        "flops_per_second": flops_per_second,
        "share_of_copy": bytes_per_second / bench.ceilings.copy,
        "share_of_products": flops_per_second / bench.ceilings.products(bench.dtype),
        "over_floor": times.median / (work.bytes / bench.ceilings.memory),
    }


def admit(
    bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict
) -> tuple[dict[str, str], Run | None]:
    """Return the row's entries for a candidate, and the function to time, or None if it is not to be timed."""
    status, reason, run = _examine(bench, name, build, cases, verdict)
    if run is not None:
        return {"status": status}, run
    bench.log(f"  {name}: {status}: {reason}")
    return {"status": status, "reason": reason}, None


def _examine(
    bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict
) -> tuple[str, str, Run | None]:
    run = None
    try:
        if bench.left < 0:
            return "not measured", bench.spent, None
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
        return "failed" if name.startswith(OURS) else "not available", _first_line(error), None
    return "ok", "", run


def _first_line(error: Exception) -> str:
    """The first line of an error's message that is not empty, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def ratios(rows: Sequence[dict]) -> None:
    """Add to the timed rows of one shape their time relative to that of OURS."""
    ours = next((row["ms"] for row in rows if row["implementation"] == OURS and "ms" in row), None)
    for row in rows:
        if ours and "ms" in row:
            row["over_longdraft"] = row["ms"] / ours
