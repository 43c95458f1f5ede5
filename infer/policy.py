"""What pays, step by step: how many of the proposed nodes are verified, and whether the drafter is asked at all.

The policy learns how often nodes of each class are right when their parent was, from every proposal, verified or not,
because the committed tokens say afterwards which nodes would have been right; so nothing is risked where a method does
not pay, and a request on which nothing pays is decoded plainly. What a pass of so many query tokens costs is measured
as it happens. Only speed depends on any of this, never a token. Not here: which nodes those are (infer/prune.py), what
times a step (infer/runner.py).
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from statistics import fmean, mean, median

from longdraft.infer.depth import FIRST_RATE, FIRST_WEIGHT, Depth
from longdraft.infer.measured import EARLIER_FADING, ROW_COST, Costs, Rates, bounded
from longdraft.infer.tree import Lists

# Query tokens a slot that a pass may have, where the policy chooses them; the widest is the drafter's own.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# An expensive drafter that surely lost in its last TRIAL_STEPS to MOST_TRIALS steps rests, twice as long every time.
TRIAL_STEPS, MOST_TRIALS, FIRST_REST, LONGEST_REST = 8, 32, 16, 128
CHEAP_DRAFT = 0.1
# Wider passes must promise so much more speed than plain decoding; smaller differences are noise of the clock.
HURDLE = 1.05
# After TRIAL_STEPS steps on which no node was worth its row, so many steps do without a proposal before the next one.
SKIPPED = 3


def widths_up_to(max_nodes: int, automatic: bool) -> list[int]:
    """The widths of passes: with the root alone, with all nodes, and where the policy chooses, some between."""
    return [1, *(width for width in WIDTHS if automatic and width <= max_nodes), 1 + max_nodes]


class DraftPassChoice:
    """Whether a drafter's draft pass pays: one more pass a step, on a part of the cache, for one more level.

    That depends on how much of a pass is reading weights and how much is reading keys and values, so it is measured:
    some steps without, some with, the better until the longest context has doubled.

    Attributes:
        phase: "short" (a context within the budget is in the selected cache whole, so the pass costs a whole one and
            brings the one token that plain decoding would bring for it), "without" and "with" (steps being measured),
            "decided".
        with_pass: whether steps are to have the pass now.
        taken: whether the last proposal had it, for a drafter that takes it to say.
        description: what was decided.
    """

    def __init__(self, budget: int):
        self._budget, self._decided_at, self.taken = budget, 0, False
        self._samples: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        self._be_short()

    def _be_short(self) -> None:
        self.phase, self.with_pass = "short", False
        self.description = f"never: up to {self._budget} tokens of context the selected cache is the whole one"

    def plan(self, longest: int) -> None:
        """A step begins; `longest`: tokens of the longest context."""
        self.taken = False
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
        draft_pass_budget: of a drafter whose draft pass is to be tried out (`Drafter.draft_pass_budget`).
        stages: of each class, the stage of the proposal that it comes from (`Drafter.class_stages`).
        beforehand: whether how many stages a proposal has is fixed before it begins.
        slots_add_up: whether a row of each slot is taken to cost as much as so many rows of one, before it is measured.
    """

    def __init__(
        self,
        n_classes: int,
        widths: Sequence[int],
        automatic: bool = True,
        stages: Sequence[int] = (),
        beforehand: bool = False,
        slots_add_up: bool = False,
        draft_pass_budget: int | None = None,
    ):
        self.draft_pass = None if draft_pass_budget is None else DraftPassChoice(draft_pass_budget)
        self.widths, self.automatic = tuple(sorted(set(widths))), automatic
        self.depth, self._slots_add_up = Depth(stages, beforehand, self.speed), slots_add_up
        self._costs: dict[int, Costs] = {}  # by the number of slots
        first = [FIRST_RATE * FIRST_WEIGHT] * n_classes, [FIRST_WEIGHT] * n_classes
        self._all = Rates(*first, EARLIER_FADING)
        self.start(1)

    def start(self, batch: int) -> None:
        """A call with this many slots begins."""
        self.start_step(batch)
        self.depth.start(batch)
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
        self.depth.start_step(n_slots)

    def start_request(self, slot: int) -> None:
        """This slot's next request starts with the rates of all earlier ones, and the drafter with a new trial."""
        self._gains: deque[float] = deque(maxlen=MOST_TRIALS)
        self._resting, self._rest = 0, FIRST_REST
        self._plain_steps = self._skipped = 0
        self.depth.start_request(slot)
        self._pause = SKIPPED
        if self.depth.idle():
            self._skipped = SKIPPED
        own = self._slots[slot] = self._all.passed_on()
        self.rates[slot] = [bounded(h / t) for h, t in zip(own.hits, own.trials, strict=True)]

    @property
    def rests(self) -> bool:
        """Whether the drafter need not propose in this step; in the first, against which all gain is measured, it need
        not."""
        return self._resting > 0 or self._skipped > 0 or (self.automatic and not self.costs.knows(1))

    def fitting(self, width: int) -> int:
        """The least of the widths that has place for so many nodes."""
        return next(wider for wider in self.widths if wider >= width)

    def speed(self, worths: Sequence[Sequence[float]], draft_seconds: float = 0.0) -> float:
        """Tokens a second at the best width, a hurdle over plain decoding where that is wider than the root.

        Args:
            worths: of each slot, its nodes' chances to be reached, the root's 1 first, the best first.
            draft_seconds: of the proposal.
        """
        places = worths[0] if len(worths) == 1 else map(sum, zip_longest(*worths, fillvalue=0.0))
        expected, best = list(accumulate(places)), 0.0
        for width, seconds in self.costs.table().items():
            if width > 1:
                best = max(best, expected[min(width, len(expected)) - 1] / (seconds + draft_seconds))
        return max(expected[0] / (self.costs.of(1) + draft_seconds), best / HURDLE)

    def decide(self, expected: list[float]) -> None:
        """The width with the most expected tokens a second. expected: [w - 1], of the w best nodes."""
        plain, drafting, fastest, best = self.costs.of(1), self.depth.seconds(self.depth.run), 0.0, 1
        for width, seconds in self.costs.table().items():
            nodes = min(width, len(expected))
            if (speed := expected[nodes - 1] / (seconds + drafting)) > fastest:
                fastest, best = speed, nodes
            if width >= len(expected):
                break
        self.width = best if fastest > HURDLE * expected[0] / (plain + drafting) else 1
        pays = self.width > 1 and fastest > HURDLE * expected[0] / plain
        self._plain_steps = 0 if pays else self._plain_steps + 1

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
        self.depth.learn(slot, proposal, committed)

    def record(
        self,
        width: int,
        seconds: float,
        draft_seconds: float,
        tokens: float,
        typical: bool = True,
        stages: int = 1,
    ) -> None:
        """What a step cost and brought.

        Args:
            width: query tokens of its pass.
            seconds: of the whole step. draft_seconds: of the proposal in it. stages: of the proposal.
            tokens: new ones a slot that took part.
            typical: False where it did what later steps will not do again; then its time says nothing.
        """
        resting = self.rests
        if typical:
            self.costs.record(width, seconds - draft_seconds)
        if resting:
            self._resting, self._skipped = max(0, self._resting - 1), max(0, self._skipped - 1)
            return
        if typical:
            self.depth.record(stages, draft_seconds)
        if self.depth.idle():
            self._skipped, self._pause = self._pause, min(2 * self._pause, LONGEST_REST)
        else:
            self._pause = SKIPPED
            if self._plain_steps >= TRIAL_STEPS:
                self._skipped = SKIPPED
        if not typical:
            return
        plain = self.costs.of(1)
        self._gains.append(tokens * plain / seconds)
        if draft_seconds < CHEAP_DRAFT * plain or len(self._gains) < TRIAL_STEPS:
            return
        # By two standard errors: steps bring whole tokens, so that the mean of a few says little.
        if (average := fmean(self._gains)) >= 1:
            return
        error = (fmean((gain - average) ** 2 for gain in self._gains) / len(self._gains)) ** 0.5
        if average + 2 * error < 1:
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
