"""What pays, step by step: how many of the proposed nodes are verified, and whether the drafter is asked at all.

The policy learns how often nodes of each class are right when their parent was, from every proposal, verified or not,
because the committed tokens say afterwards which nodes would have been right; so nothing is risked where a method does
not pay, and a request on which nothing pays is decoded plainly. What a pass of so many query tokens costs is measured
as it happens. Only speed depends on any of this, never a token. Not here: which nodes those are (infer/prune.py), what
times a step (infer/runner.py).
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import mean, median

import numpy as np

from longdraft.infer.tree import Lists

# Query tokens a slot that a pass may have, where the policy chooses them; the widest is the drafter's own.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A class that was never seen is right as often as FIRST_RATE, which counts as so many trials.
FIRST_RATE, FIRST_WEIGHT = 0.3, 1.0
# A request starts with what earlier requests taught, as so many trials; its own older trials fade.
EARLIER_WEIGHT, FADING, EARLIER_FADING = 4.0, 0.97, 0.999
# Before it is measured, a further row is taken to cost this share of a pass of one row.
ROW_COST = 0.04
SAMPLES = 9
# Without a gain in this many steps an expensive drafter rests, twice as long every time.
TRIAL_STEPS, FIRST_REST, LONGEST_REST = 8, 16, 128
CHEAP_DRAFT = 0.1
# Wider passes must promise so much more speed than plain decoding; smaller differences are noise of the clock.
HURDLE = 1.05
# After TRIAL_STEPS steps on which no node was worth its row, so many steps do without a proposal before the next one.
SKIPPED = 3


def widths_up_to(max_nodes: int, automatic: bool) -> list[int]:
    """The widths of passes: with the root alone, with all nodes, and where the policy chooses, some between."""
    return [1, *(width for width in WIDTHS if automatic and width <= max_nodes), 1 + max_nodes]


class Costs:
    """Seconds of a step by the rows of its pass, for a fixed list of widths.

    Args:
        row_cost: what a further row is taken to cost before it is measured, as a share of a pass of one row.
    """

    def __init__(self, widths: Sequence[int], row_cost: float = ROW_COST):
        self.widths, self._row_cost = tuple(sorted(widths)), row_cost
        self._seconds: dict[int, deque[float]] = {}
        self._table = [1 + row_cost * (width - 1) for width in self.widths]

    def record(self, width: int, seconds: float) -> None:
        """One step whose pass had `width` rows."""
        self._seconds.setdefault(width, deque(maxlen=SAMPLES)).append(seconds)
        measured = self.measured()
        known = list(measured)
        row = self._row_cost * measured[known[0]] / (1 + self._row_cost * (known[0] - 1))
        between = np.interp(self.widths, known, list(measured.values())).tolist()
        table = [
            seconds + row * (min(width - known[0], 0) + max(width - known[-1], 0))
            for width, seconds in zip(self.widths, between, strict=True)
        ]
        # A wider pass is never cheaper: what seems so was disturbed.
        self._table = list(accumulate(table, max))

    def knows(self, width: int) -> bool:
        """Whether a pass of so many rows was measured."""
        return width in self._seconds

    def measured(self) -> dict[int, float]:
        """Width -> median of its last few steps."""
        return {width: median(self._seconds[width]) for width in sorted(self._seconds)}

    def of(self, width: int) -> float:
        """Measured, between two measured ones, or `row_cost` a row beyond; relative before anything is measured."""
        return self._table[self.widths.index(width)]


class _Rates:
    """How often nodes of each class were right when their parent was: hits and trials that fade."""

    def __init__(self, hits: list[float], trials: list[float], fading: float):
        self.hits, self.trials, self._fading = hits, trials, fading

    def add(self, kind: int, hit: bool) -> float:
        """One trial; the class's rate after it, never quite 0 or 1."""
        self.hits[kind] = self.hits[kind] * self._fading + hit
        self.trials[kind] = self.trials[kind] * self._fading + 1
        return _bounded(self.hits[kind] / self.trials[kind])

    def passed_on(self) -> "_Rates":
        """What a new request starts with."""
        shares = [EARLIER_WEIGHT / max(trials, EARLIER_WEIGHT) for trials in self.trials]
        hits = [hits * share for hits, share in zip(self.hits, shares, strict=True)]
        trials = [trials * share for trials, share in zip(self.trials, shares, strict=True)]
        return _Rates(hits, trials, FADING)


def _bounded(rate: float) -> float:
    return min(max(rate, 1e-3), 0.999)


class DraftPassChoice:
    """Whether a drafter's draft pass pays: one more pass a step, on a part of the cache, for one more level.

    That depends on how much of a pass is reading weights and how much is reading keys and values, so it is measured:
    some steps without, some with, the better until the longest context has doubled.

    Attributes:
        phase: "short" (a context within the budget is in the selected cache whole, so the pass costs a whole one and
            brings the one token that plain decoding would bring for it), "without" and "with" (steps being measured),
            "decided".
        with_pass: whether steps are to have the pass now.
        description: what was decided.
    """

    def __init__(self, budget: int):
        self._budget, self._decided_at = budget, 0
        self._samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        self._be_short()

    def _be_short(self) -> None:
        self.phase, self.with_pass = "short", False
        self.description = f"never: up to {self._budget} tokens of context the selected cache is the whole one"

    def plan(self, longest: int) -> None:
        """A step begins; `longest`: tokens of the longest context."""
        if longest <= self._budget:
            self._be_short()
        elif self.phase == "short" or (self.phase == "decided" and longest >= 2 * self._decided_at):
            self.phase, self._samples = "without", {False: [], True: []}
            self.with_pass, self._decided_at = False, longest
            self.description = (
                f"not decided: fewer than {2 * TRIAL_STEPS} steps at {longest} tokens of context and above"
            )

    def record(self, took: bool, seconds: float, tokens: float) -> None:
        """What a step took, whether it had the pass, and how many tokens a sequence it brought."""
        if self.phase not in ("without", "with") or took != self.with_pass:
            return
        samples = self._samples[self.with_pass]
        samples.append((seconds, tokens))
        if len(samples) < TRIAL_STEPS:
            return
        if not self.with_pass:
            self.phase, self.with_pass = "with", True
            return
        costs = {kind: _milliseconds_a_token(taken) for kind, taken in self._samples.items()}
        self.phase, self.with_pass = "decided", costs[True] < costs[False]
        name, better, worse = "always" if self.with_pass else "never", min(costs.values()), max(costs.values())
        self.description = (
            f"{name}: {better:.1f} against {worse:.1f} ms a token after {2 * TRIAL_STEPS} steps "
            f"at {self._decided_at} tokens of context"
        )


def _milliseconds_a_token(samples: list[tuple[float, float]]) -> float:
    """The median step over the mean tokens: one slow step says nothing, one long acceptance does."""
    return 1e3 * median(seconds for seconds, _ in samples) / mean(tokens for _, tokens in samples)


class Policy:
    """Learns rates and costs, and decides by them.

    Args:
        n_classes: of the drafter.
        widths: rows that a pass may have, 1 included; one of them is chosen each step.
        automatic: False verifies every proposal whole.
        draft_is_timed: whether `record` is told what proposals took; without it each counts as expensive.
        draft_pass_budget: of a drafter whose draft pass is to be tried out (`Drafter.draft_pass_budget`).
        slots_add_up: whether a row of each slot is taken to cost as much as so many rows of one, before it is measured.
    """

    def __init__(
        self,
        n_classes: int,
        widths: Sequence[int],
        automatic: bool = True,
        draft_is_timed: bool = True,
        slots_add_up: bool = False,
        draft_pass_budget: int | None = None,
    ):
        self.draft_pass = None if draft_pass_budget is None else DraftPassChoice(draft_pass_budget)
        self.widths, self.automatic = tuple(sorted(set(widths))), automatic
        self._draft_is_timed, self._slots_add_up = draft_is_timed, slots_add_up
        self._costs: dict[int, Costs] = {}  # by the number of slots
        first = [FIRST_RATE * FIRST_WEIGHT] * n_classes, [FIRST_WEIGHT] * n_classes
        self._all = _Rates(*first, EARLIER_FADING)
        self.start(1)

    def start(self, batch: int) -> None:
        """A call with this many slots begins."""
        self.start_step(batch)
        self._slots = [self._all] * batch
        self.rates: list[list[float]] = [[]] * batch
        for slot in range(batch):
            self.start_request(slot)
        self.width = self.widths[-1]

    def start_step(self, n_slots: int) -> None:
        """So many slots take part in the next step; what it costs is known for each number by itself."""
        if n_slots not in self._costs:
            self._costs[n_slots] = Costs(self.widths, ROW_COST * (n_slots if self._slots_add_up else 1))
        self.costs = self._costs[n_slots]

    def start_request(self, slot: int) -> None:
        """This slot's next request starts with the rates of all earlier ones, and the drafter with a new trial."""
        self._gains: deque[float] = deque(maxlen=TRIAL_STEPS)
        self._resting, self._rest = 0, FIRST_REST
        self._plain_steps = self._skipped = 0
        own = self._slots[slot] = self._all.passed_on()
        self.rates[slot] = [_bounded(h / t) for h, t in zip(own.hits, own.trials, strict=True)]

    @property
    def rests(self) -> bool:
        """Whether the drafter need not propose in this step; in the first, against which all gain is measured, it need
        not."""
        return self._resting > 0 or self._skipped > 0 or (self.automatic and not self.costs.knows(1))

    def fitting(self, width: int) -> int:
        """The least of the widths that has place for so many nodes."""
        return next(wider for wider in self.widths if wider >= width)

    def decide(self, expected: list[float]) -> None:
        """The width with the most expected tokens a second. expected: [w - 1], of the w best nodes."""
        widths = [width for width in self.widths if width <= len(expected)]
        if widths[-1] < len(expected):
            widths.append(len(expected))
        plain = expected[0] / self.costs.of(1)
        speeds = [expected[width - 1] / self.costs.of(self.fitting(width)) for width in widths]
        best = max(range(len(widths)), key=speeds.__getitem__)
        self.width = widths[best] if speeds[best] > HURDLE * plain else 1
        self._plain_steps = self._plain_steps + 1 if self.width == 1 else 0

    def learn(self, slot: int, proposal: Lists, committed: list[int]) -> None:
        """Which nodes of a slot's whole proposal were right. `committed`: the new tokens behind the root."""
        tokens, parents = proposal.tokens[slot], proposal.parents[slot]
        classes = None if proposal.classes is None else proposal.classes[slot]
        depth_on_path = {0: 0}
        for node in range(1, len(tokens)):
            depth = depth_on_path.get(parents[node])
            if depth is None or depth >= len(committed):
                continue
            kind, hit = node if classes is None else classes[node], tokens[node] == committed[depth]
            self._all.add(kind, hit)
            self.rates[slot][kind] = self._slots[slot].add(kind, hit)
            if hit:
                depth_on_path[node] = depth + 1

    def record(self, width: int, seconds: float, draft_seconds: float, tokens: float, typical: bool = True) -> None:
        """What a step cost and brought.

        Args:
            width: rows of its pass.
            seconds: of the whole step. draft_seconds: of the proposal in it.
            tokens: new ones a slot that took part.
            typical: False where it did what later steps will not do again; then its time says nothing.
        """
        resting = self.rests
        if typical:
            self.costs.record(width, seconds - draft_seconds)
        if resting:
            self._resting, self._skipped = max(0, self._resting - 1), max(0, self._skipped - 1)
            return
        if self._plain_steps >= TRIAL_STEPS:
            self._skipped = SKIPPED
        if not typical:
            return
        plain = self.costs.of(1)
        self._gains.append(tokens * plain / seconds)
        cheap = self._draft_is_timed and draft_seconds < CHEAP_DRAFT * plain
        if cheap or len(self._gains) < TRIAL_STEPS:
            return
        if sum(self._gains) < len(self._gains):
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._gains.clear()

    def decisions(self) -> dict[str, str]:
        """What was decided, by name, for the statistics."""
        passes = {} if self.draft_pass is None else {"draft_pass": self.draft_pass.description}
        return passes | {"nodes": self._describe_widths()}

    def _describe_widths(self) -> str:
        if not self.automatic:
            return "every proposed node is verified"
        times = ", ".join(f"{width}: {1e3 * seconds:.1f} ms" for width, seconds in self.costs.measured().items())
        return f"chosen step by step; a step by the rows of its pass: {times}"
