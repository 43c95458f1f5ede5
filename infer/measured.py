"""What decoding measures about itself: seconds by size, and how often a class of events happens.

infer/policy.py and infer/depth.py decide by it.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

# A request starts with the rates of earlier requests, which count as EARLIER_WEIGHT trials; its own older trials fade.
# With a weight of only 4, nodes that are seldom right, of which a tree has many, were rated by their luck of the moment
# (docs/LOG.md).
EARLIER_WEIGHT, FADING, EARLIER_FADING = 12.0, 0.97, 0.999
# Before it is measured, a further query token is taken to cost this fraction of a pass of one token.
ROW_COST = 0.04
# The last SAMPLES of a width are kept, and dropped when the width was not used for SAMPLE_STEPS steps: measured in a
# slow moment, it would never be tried again.
SAMPLES, SAMPLE_STEPS = 9, 128


class Costs:
    """Seconds of a step by the width of its pass, for a fixed list of widths.

    Args:
        row_cost: what a further query token is taken to cost before it is measured, as a share of a pass of one.
    """

    def __init__(self, widths: Sequence[int], row_cost: float = ROW_COST):
        self.widths, self._row_cost = tuple(sorted(widths)), row_cost
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._steps, self._last_step = 0, dict[int, int]()  # the number of steps; the last one of each width
        # Seconds of each width, in passes of one row before anything is measured. None: to be computed anew.
        self._table: dict[int, float] | None = {width: 1 + row_cost * (width - 1) for width in self.widths}

    def record(self, width: int, seconds: float) -> None:
        """Note what a step took whose pass had this width."""
        self._steps += 1
        self._last_step[width] = self._steps
        samples = self._seconds.setdefault(width, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians[width] = median(samples)
        if min(self._last_step.values()) <= self._steps - SAMPLE_STEPS:
            for stale in [known for known, step in self._last_step.items() if step <= self._steps - SAMPLE_STEPS]:
                del self._last_step[stale], self._seconds[stale], self._medians[stale]
        self._table = None

    def table(self) -> dict[int, float]:
        """Seconds by width: measured, interpolated between measured widths, or extrapolated by `row_cost` a row.

        A wider pass never costs less than a narrower one: where it seems to, a measurement was disturbed.
        """
        if self._table is None:
            known = sorted(self._medians.items())
            (least, first), (most, last) = known[0], known[-1]
            row = self._row_cost * first / (1 + self._row_cost * (least - 1))
            table, right = list[float](), 0
            for width in self.widths:
                while right < len(known) - 1 and known[right][0] < width:
                    right += 1
                (below, lower), (above, upper) = known[max(right - 1, 0)], known[right]
                if least < width < most:
                    table.append(lower + (upper - lower) * (width - below) / (above - below))
                else:
                    table.append((first + row * (width - least)) if width <= least else (last + row * (width - most)))
            self._table = dict(zip(self.widths, accumulate(table, max), strict=True))
        return self._table

    def knows(self, width: int) -> bool:
        """Whether a pass of this width was measured."""
        return width in self._seconds

    def measured(self) -> dict[int, float]:
        """The median seconds of the last steps of each measured width."""
        return dict(sorted(self._medians.items()))

    def of(self, width: int) -> float:
        """Seconds of a pass of this width (see `table`)."""
        return self.table()[width]


class Rates:
    """How often nodes of each class were right when their parent was, as hits and trials that fade."""

    def __init__(self, hits: list[float], trials: list[float], fading: float):
        self.hits, self.trials, self._fading = hits, trials, fading

    def add(self, kind: int, hit: bool) -> float:
        """Count a trial. Returns the class's rate after it, which is never quite 0 or 1."""
        self.hits[kind] = self.hits[kind] * self._fading + hit
        self.trials[kind] = self.trials[kind] * self._fading + 1
        return bounded(self.hits[kind] / self.trials[kind])

    def passed_on(self) -> "Rates":
        """The rates that a new request starts with."""
        shares = [EARLIER_WEIGHT / max(trials, EARLIER_WEIGHT) for trials in self.trials]
        hits = [hits * share for hits, share in zip(self.hits, shares, strict=True)]
        trials = [trials * share for trials, share in zip(self.trials, shares, strict=True)]
        return Rates(hits, trials, FADING)


def bounded(rate: float) -> float:
    return min(max(rate, 1e-3), 0.999)
