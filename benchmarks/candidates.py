"""One way of doing something beside others: it is timed only if its output is right, and named where it cannot run.

A candidate's error against the fp32 reference is at most twice (gradients: three times) the error of plain PyTorch in
the same precision on the same numbers. Nothing is left out in silence: each candidate of each shape gives a row, whose
`status` is "ok", "wrong", "failed" (ours raised), "not available" (a peer cannot run here) or "not measured".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from longdraft.benchmarks.profiles import Work
from longdraft.benchmarks.timing import Bench, Times, peak_bytes

OURS = "longdraft"
# What PyTorch, compilers and other libraries raise where a shape, a dtype or a device is not theirs. Triton's errors
# derive from Exception alone, and are known by their module.
_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, AttributeError, IndexError, KeyError)
# In fp32 the error of plain PyTorch may be zero by chance; this share of the largest value is always allowed.
FLOOR = 2e-5

Run = Callable[[], Any]
# A candidate made ready for a case: masks, layouts and whatever the layers of a pass share are not timed.
Build = Callable[[Any], Run]
# (Name, case, output) -> None if the output is right or the case has no reference, else why it is not.
Verdict = Callable[[str, Any, Any], str | None]


class Unavailable(Exception):
    """A candidate cannot run here, and why."""


def too_far(out: Tensor, exact: Tensor, plain: Tensor, times: int = 2, largest: bool = True) -> str | None:
    """None where `out` is within the rule, else words with both numbers.

    Args:
        exact: the fp32 reference. plain: plain PyTorch's output in the precision of `out`.
        times: what the error may be of plain PyTorch's. largest: the largest error counts, else the norm of all.
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
    """A row for every candidate, `shape` in each; those that are right are timed in turns.

    Args:
        builds: by name; a name that begins with OURS is ours.
        cases: what outputs are looked at on; the last is what is timed.
        memory: also the peak of allocated bytes.
    """
    rows, ready = [], {}
    for name, build in builds.items():
        status, reason, run = admit(bench, name, build, cases, verdict)
        rows.append({**shape, "implementation": name, "status": status})
        if run is None:
            rows[-1]["reason"] = reason
        else:
            ready[name] = run
            if memory:
                rows[-1]["peak_bytes"] = peak_bytes(run, bench.device)
    times = bench.in_turns(ready)
    for row in rows:
        if row["implementation"] in times:
            row |= figures(bench, times[row["implementation"]], work)
    return rows


def refused(shape: Mapping[str, Any], names: Iterable[str], reason: str) -> list[dict]:
    """A row for every candidate of a shape that is not measured."""
    return [{**shape, "implementation": name, "status": "not measured", "reason": reason} for name in names]


def figures(bench: Bench, times: Times, work: Work) -> dict:
    """Times in ms, and what they are of this machine's ceilings; `over_floor` is the time over that of moving the
    bytes once."""
    assert bench.ceilings is not None, "ceilings are measured first"
    moved, done = work.bytes / times.median, work.flops / times.median
    return {
        "ms": 1e3 * times.median,
        "least_ms": 1e3 * times.least,
        "spread": times.spread,
        "turns": times.turns,
        "bytes": work.bytes,
        "flops": work.flops,
        "bytes_per_second": moved,
        "flops_per_second": done,
        "share_of_copy": moved / bench.ceilings.copy,
        "share_of_products": done / bench.ceilings.products(bench.dtype),
        "over_floor": times.median / (work.bytes / bench.ceilings.memory),
    }


def admit(bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict) -> tuple[str, str, Run | None]:
    """(Status, reason, what to time or None where it is not to be timed)."""
    found = _examine(bench, name, build, cases, verdict)
    if found[2] is None:
        bench.log(f"  {name}: {found[0]}: {found[1]}")
    return found


def _examine(
    bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict
) -> tuple[str, str, Run | None]:
    run = None
    try:
        if bench.left < 0:
            return "not measured", bench.spent, None
        for case in cases:
            run = build(case)
            found = verdict(name, case, run())
            if found:
                return "wrong", found, None
    except Unavailable as absent:
        return "not available", str(absent), None
    except Exception as error:
        if not (isinstance(error, _ERRORS) or type(error).__module__.startswith("triton")):
            raise
        return "failed" if name.startswith(OURS) else "not available", _first_line(error), None
    return "ok", "", run


def _first_line(error: Exception) -> str:
    """The first line of an error that says something, not too long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def ratios(rows: Sequence[dict], of: str = OURS, key: str = "over_longdraft") -> None:
    """Add to the rows that were timed their time over that of the one called `of`, all of one shape."""
    ours = next((row["ms"] for row in rows if row["implementation"] == of and "ms" in row), None)
    for row in rows:
        if ours and "ms" in row:
            row[key] = row["ms"] / ours
