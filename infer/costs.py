"""What decoding measures about itself: seconds by size, rates by class, and whether TokenSwift's draft pass pays.

infer/budget.py decides by it.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

# Steps of which a median of seconds or a mean of gains is taken.
RECENT = 8
# A width's seconds are forgotten after this many steps without it.
STALE = 128
# A class that was never seen is right this often, which counts as one trial.
FIRST_RATE = 0.3
# A request starts with the rates of earlier ones, which count as EARLIER trials. Its trials fade, and theirs.
EARLIER, FADING, EARLIER_FADING = 12.0, 0.97, 0.999


class Seconds:
    """Measured seconds by size, for a fixed list of sizes: query tokens of a pass, or stages of a proposal.

    Args:
        per_unit: what one unit more is taken to cost before it is measured, as a fraction of the smallest size's cost.

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
        """Note what a step of this size took."""
        self._steps += 1
        self._last_step[size] = self._steps
        self._samples.setdefault(size, deque(maxlen=RECENT)).append(seconds)
        self.medians[size] = median(self._samples[size])
        for stale in [known for known, step in self._last_step.items() if step <= self._steps - STALE]:
            # Measured in a slow moment, it would never be tried again.
            del self._last_step[stale], self._samples[stale], self.medians[stale]
        known, smallest, largest = sorted(self.medians), self._sizes[0], self._sizes[-1]
        first, last = self.medians[known[0]], self.medians[known[-1]]
        slope = self._per_unit * first / (1 + self._per_unit * (known[0] - smallest))
        ends = first - slope * (known[0] - smallest), last + slope * (largest - known[-1])
        measured = [ends[0], *(self.medians[one] for one in known), ends[1]]
        seconds_of = np.interp(self._sizes, [smallest, *known, largest], measured)
        self.table = dict(zip(self._sizes, np.maximum.accumulate(seconds_of).tolist(), strict=True))


class Rates:
    """How often events of each class happened, from hits and trials that fade. Attributes: values: the rates."""

    def __init__(self, hits: list[float], trials: list[float], fading: float):
        self.hits, self.trials, self._fading = hits, trials, fading
        self.values = [self.rate(kind) for kind in range(len(hits))]

    def add(self, kind: int, hit: bool) -> None:
        """Count a trial."""
        self.hits[kind] = self.hits[kind] * self._fading + hit
        self.trials[kind] = self.trials[kind] * self._fading + 1
        self.values[kind] = self.rate(kind)

    def rate(self, kind: int, before: float = FIRST_RATE) -> float:
        """The rate of a class, never quite 0 or 1. before: what it is before the first trial."""
        return _bounded((self.hits[kind] + before) / (self.trials[kind] + 1))

    def passed_on(self) -> "Rates":
        """The rates that a new request starts with."""
        fractions = [EARLIER / max(trials, EARLIER) for trials in self.trials]
        hits, trials = ([x * y for x, y in zip(of, fractions, strict=True)] for of in (self.hits, self.trials))
        return Rates(hits, trials, FADING)


class DraftPassTrial:
    """Whether TokenSwift's draft pass pays: one more pass of the target, on a part of its cache, for one more level.

    Some steps are measured without the pass and then some with it. The better way is kept until the longest context
    has doubled. Up to `budget` tokens the part is the whole cache, so the pass would cost as much as a step.

    Attributes:
        with_pass: whether the next proposal is to have the pass.
        decided: whether both ways are measured.
        description: what was decided, in words.
    """

    def __init__(self, budget: int):
        self._budget, self._begun_at = budget, 0
        self.start_step(0)

    def start_step(self, longest: int) -> bool:
        """Begin a step, and return `with_pass`. longest: tokens of the longest context."""
        if longest <= self._budget:
            self._begin(0, f"never: up to {self._budget} tokens of context the selected cache is the whole one")
        elif not self._begun_at or (self.decided and longest >= 2 * self._begun_at):
            self._begin(longest, f"not decided: fewer than {2 * RECENT} steps at {longest} tokens of context and above")
        return self.with_pass

    def _begin(self, begun_at: int, description: str) -> None:
        self._begun_at, self.description, self.with_pass, self.decided = begun_at, description, False, False
        self._samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}

    def record(self, took: bool, seconds: float, tokens: float) -> None:
        """Note whether a step had the pass, the seconds it took, and the tokens it brought a slot."""
        if not self._begun_at or self.decided or took != self.with_pass:
            return
        self._samples[took].append((seconds, tokens))
        if len(self._samples[took]) == RECENT:
            self.with_pass, self.decided = not took, took
        if self.decided:
            without, with_pass = map(self._milliseconds, (False, True))
            self.with_pass = with_pass < without
            word, better, worse = "always" if self.with_pass else "never", *sorted((without, with_pass))
            self.description = (
                f"{word}: {better:.1f} against {worse:.1f} ms a token after {2 * RECENT} steps "
                f"at {self._begun_at} tokens of context"
            )

    def _milliseconds(self, with_pass: bool) -> float:
        """For each token: median time of a step over mean tokens, because one slow step says nothing."""
        seconds, tokens = zip(*self._samples[with_pass], strict=True)
        return 1e3 * median(seconds) / fmean(tokens)


def _bounded(rate: float) -> float:
    return min(max(rate, 1e-3), 0.999)
