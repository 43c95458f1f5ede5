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
# (Name, case that has a reference, output) -> None if the output is right, else why it is not.
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
        cases: each with a reference as its `exact`, or None; the last is what is timed.
        memory: also the peak of allocated bytes.
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
    """A row for every candidate of a shape that is not measured."""
    return [{**shape, "implementation": name, "status": "not measured", "reason": reason} for name in names]


def figures(bench: Bench, times: Times, work: Work) -> dict:
    """Times in ms, and what they are of this machine's ceilings; `over_floor` is the time over that of moving the
    bytes once."""
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


def admit(
    bench: Bench, name: str, build: Build, cases: Sequence[Any], verdict: Verdict
) -> tuple[dict[str, str], Run | None]:
    """What a row says of a candidate, and what is timed of it: None where nothing is."""
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
            if case.exact is not None and (wrong := verdict(name, case, out)):
                return "wrong", wrong, None
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


def ratios(rows: Sequence[dict]) -> None:
    """Add to the rows that were timed their time over that of OURS, all of one shape."""
    ours = next((row["ms"] for row in rows if row["implementation"] == OURS and "ms" in row), None)
    for row in rows:
        if ours and "ms" in row:
            row["over_longdraft"] = row["ms"] / ours
