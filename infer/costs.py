"""The measurements by which infer/budget.py decides: seconds by size, and hit rates by class."""

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

# A median of seconds or a mean of gains is over this many steps.
RECENT = 8
# A size's seconds are forgotten after this many steps without it; a size measured in a slow moment would otherwise
# never be tried again.
STALE = 128
# The prior rate of a class, which counts as one trial.
FIRST_RATE = 0.3
# A request starts with the rates of earlier ones, which count as at most EARLIER trials. Each trial decays the
# request's own counts by FADING, and those of all requests by EARLIER_FADING.
EARLIER, FADING, EARLIER_FADING = 12.0, 0.97, 0.999


class Seconds:
    """Measured seconds by size, for a fixed list of sizes: query tokens of a pass, or stages of a proposal.

    Args:
        per_unit: assumed cost of one unit more before it is measured, as a fraction of the smallest size's cost.

    Attributes:
        medians: the median seconds of the last steps, by measured size.
        table: seconds by size: measured, interpolated, or extrapolated by `per_unit`. A larger size never costs less
            than a smaller one: where it seems to, a measurement was disturbed.
    """

    def __init__(self, sizes: Sequence[int], per_unit: float):
        self._sizes, self._per_unit, self._steps = tuple(sizes), per_unit, 0
        self._samples: dict[int, deque[float]] = {}
        self._last_step: dict[int, int] = {}
        self.medians: dict[int, float] = {}
        self.table = {size: 1 + per_unit * (size - self._sizes[0]) for size in self._sizes}

    def record(self, size: int, seconds: float) -> None:
        """Add the measured seconds of a step of this size."""
        self._steps += 1
        self._last_step[size] = self._steps
        self._samples.setdefault(size, deque(maxlen=RECENT)).append(seconds)
        self.medians[size] = median(self._samples[size])
        for stale in [known for known, step in self._last_step.items() if step <= self._steps - STALE]:
            del self._last_step[stale], self._samples[stale], self.medians[stale]
        known, smallest, largest = sorted(self.medians), self._sizes[0], self._sizes[-1]
        first, last = self.medians[known[0]], self.medians[known[-1]]
        slope = self._per_unit * first / (1 + self._per_unit * (known[0] - smallest))
        ends = first - slope * (known[0] - smallest), last + slope * (largest - known[-1])
        measured = [ends[0], *(self.medians[one] for one in known), ends[1]]
        seconds_of = np.interp(self._sizes, [smallest, *known, largest], measured)
        self.table = dict(zip(self._sizes, np.maximum.accumulate(seconds_of).tolist(), strict=True))


class Rates:
    """Hit rates by class. Attributes: values: the rates, limited to 0.001 to 0.999."""

    def __init__(self, hits: list[float], trials: list[float], fading: float):
        self._hits, self._trials, self._fading = hits, trials, fading
        self.values = [self.rate(kind) for kind in range(len(hits))]

    def add(self, kind: int, hit: bool) -> None:
        """Count a trial."""
        self._hits[kind] = self._hits[kind] * self._fading + hit
        self._trials[kind] = self._trials[kind] * self._fading + 1
        self.values[kind] = self.rate(kind)

    def rate(self, kind: int, before: float = FIRST_RATE) -> float:
        """The rate of a class. before: the prior, which counts as one trial."""
        return min(max((self._hits[kind] + before) / (self._trials[kind] + 1), 1e-3), 0.999)

    def passed_on(self) -> "Rates":
        """The rates that a new request starts with."""
        parts = [EARLIER / max(trials, EARLIER) for trials in self._trials]
        hits, trials = ([x * part for x, part in zip(of, parts, strict=True)] for of in (self._hits, self._trials))
        return Rates(hits, trials, FADING)
