"""What pays, step by step: whether the drafter is asked for a proposal, and how many of its nodes are verified.

Who decides what, in the order of a step:

1. `Policy.rests`, read by the runner before the proposal: no proposal at all, where proposing was a loss lately.
2. `Policy.depth` (infer/depth.py), during the proposal: how many passes of its own a drafter makes for it.
3. `Policy.decide`, called by `prune` (infer/prune.py) after the proposal: the width of the target's pass. Where the
   host may not wait for the device, it is called when the step is read, and decides the width of a later step.
4. `Policy.learn` and `Policy.record`, called by the runner when the step is read: rates and costs for all of this.

Rates are learned from every proposal, verified or not: the committed tokens tell afterwards which nodes would have been
right. So nothing is risked where a method does not pay, and a request on which nothing pays is decoded plainly. Only
speed depends on any of this, never a token.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from statistics import fmean

from longdraft.infer.depth import FIRST_RATE, FIRST_WEIGHT, Depth
from longdraft.infer.draft_pass_trial import DraftPassTrial
from longdraft.infer.measured import EARLIER_FADING, ROW_COST, Costs, Rates, bounded
from longdraft.infer.tree import Lists

# Query tokens a slot that a pass may have, where the policy chooses; the widest is the drafter's own.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# An expensive drafter that surely lost in its last TRIAL_STEPS to MOST_TRIALS steps rests, twice as long every time.
TRIAL_STEPS, MOST_TRIALS, FIRST_REST, LONGEST_REST = 8, 32, 16, 128
# Below this share of a plain step a proposal is cheap.
CHEAP_DRAFT = 0.1
# Wider passes must promise this much more speed than plain decoding; smaller differences are noise of the clock.
HURDLE = 1.05
# After TRIAL_STEPS steps in which no node was worth its row, this many steps go without a proposal before the next one;
# while no depth of a proposal pays (`Depth.idle`), twice as many every time.
FIRST_PAUSE = 3


def widths_up_to(max_nodes: int, automatic: bool) -> list[int]:
    """Widths a pass may have: the root alone, the root with all nodes, and some between where the policy chooses."""
    return [1, *(width for width in WIDTHS if automatic and width <= max_nodes), 1 + max_nodes]


class Policy:
    """Learns rates and costs, and decides by them.

    Args:
        n_classes: the drafter's number of node classes.
        widths: query tokens that a pass may have, 1 included; one of them is chosen in each step.
        automatic: False verifies every proposal whole.
        stages: for each class, the stage of the proposal that it comes from (`Drafter.class_stages`).
        fixed_depth: whether the number of stages is fixed before a proposal begins (infer/depth.py).
        slots_add_up: before it is measured, a row in each of B slots is taken to cost as much as B rows of one slot.
        draft_pass_budget: of a drafter whose draft pass is to be tried out (`Drafter.draft_pass_budget`).

    Attributes:
        rates: for each slot, how often a node of each class is right when its parent was.
        width: the width chosen last.
        costs: what a pass of each width costs with the slots of this step.
        depth: how many stages a proposal has.
        draft_pass: the trial of the draft pass, if there is one to try out.
    """

    def __init__(
        self,
        n_classes: int,
        widths: Sequence[int],
        automatic: bool = True,
        stages: Sequence[int] = (),
        fixed_depth: bool = False,
        slots_add_up: bool = False,
        draft_pass_budget: int | None = None,
    ):
        self.draft_pass = None if draft_pass_budget is None else DraftPassTrial(draft_pass_budget)
        self.widths, self.automatic = tuple(sorted(set(widths))), automatic
        self.depth, self._slots_add_up = Depth(stages, fixed_depth, self.speed), slots_add_up
        self._costs: dict[int, Costs] = {}  # by the number of slots
        first = [FIRST_RATE * FIRST_WEIGHT] * n_classes, [FIRST_WEIGHT] * n_classes
        self._earlier = Rates(*first, EARLIER_FADING)  # of all requests so far
        self.start(1)

    def start(self, batch: int) -> None:
        """Begin a call on `batch` slots."""
        self.start_step(batch)
        self.depth.start(batch)
        self._of_slots = [self._earlier] * batch
        self.rates: list[list[float]] = [[]] * batch
        for slot in range(batch):
            self.start_request(slot)
        self.width = self.widths[-1]

    def start_step(self, n_slots: int) -> None:
        """Begin a step in which `n_slots` slots take part. Costs are learned for each number of slots by itself."""
        if n_slots not in self._costs:
            self._costs[n_slots] = Costs(self.widths, ROW_COST * (n_slots if self._slots_add_up else 1))
        self.costs = self._costs[n_slots]
        self.depth.start_step(n_slots)

    def start_request(self, slot: int) -> None:
        """Begin a request on this slot, with the rates of all earlier requests, and give the drafter a new trial."""
        self._gains: deque[float] = deque(maxlen=MOST_TRIALS)
        self._steps_off, self._next_rest = 0, FIRST_REST  # how many steps from now on go without a proposal
        self._plain_steps = 0
        self.depth.start_request(slot)
        self._next_pause = FIRST_PAUSE
        if self.depth.idle():
            self._steps_off = FIRST_PAUSE
        rates = self._of_slots[slot] = self._earlier.passed_on()
        self.rates[slot] = [bounded(hits / trials) for hits, trials in zip(rates.hits, rates.trials, strict=True)]

    @property
    def rests(self) -> bool:
        """Whether this step goes without a proposal. The first one does, because all gain is measured against it."""
        return self._steps_off > 0 or (self.automatic and not self.costs.knows(1))

    def fitting(self, width: int) -> int:
        """The narrowest pass that has room for `width` nodes."""
        return next(wider for wider in self.widths if wider >= width)

    def speed(self, worths: Sequence[Sequence[float]], draft_seconds: float = 0.0) -> float:
        """Tokens a second at the best width. Where that is wider than the root, HURDLE counts against it.

        Args:
            worths: for each slot, its nodes' chances to be reached, the best first, which is the root's 1.
            draft_seconds: of the proposal.
        """
        of_nodes = worths[0] if len(worths) == 1 else map(sum, zip_longest(*worths, fillvalue=0.0))
        expected, best = list(accumulate(of_nodes)), 0.0
        for width, seconds in self.costs.table().items():
            if width > 1:
                best = max(best, expected[min(width, len(expected)) - 1] / (seconds + draft_seconds))
        return max(expected[0] / (self.costs.of(1) + draft_seconds), best / HURDLE)

    def decide(self, expected: list[float]) -> None:
        """Choose the width with the most expected tokens a second. expected: [w - 1], tokens of the w best nodes."""
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
        """Learn which nodes of a slot's whole proposal were right. committed: the new tokens behind the root."""
        tokens, parents = proposal.tokens[slot], proposal.parents[slot]
        classes = None if proposal.classes is None else proposal.classes[slot]
        depth_on_path = {0: 0}
        for node in range(1, len(tokens)):
            depth = depth_on_path.get(parents[node])
            if depth is None or depth >= len(committed):
                continue
            kind, hit = node if classes is None else classes[node], tokens[node] == committed[depth]
            self._earlier.add(kind, hit)
            self.rates[slot][kind] = self._of_slots[slot].add(kind, hit)
            if hit:
                depth_on_path[node] = depth + 1
        self.depth.learn(slot, proposal, committed)

    def record(
        self, width: int, seconds: float, draft_seconds: float, tokens: float, typical: bool = True, stages: int = 1
    ) -> None:
        """Learn what a step cost and brought, and give the drafter a rest where it loses.

        Args:
            width: query tokens of its pass.
            seconds: of the whole step. draft_seconds: of the proposal in it. stages: of the proposal.
            tokens: new ones a slot that took part.
            typical: False where it did what later steps will not do again; then its time says nothing.
        """
        rested = self.rests
        if typical:
            self.costs.record(width, seconds - draft_seconds)
        if rested:
            self._steps_off = max(0, self._steps_off - 1)
            return
        if typical:
            self.depth.record(stages, draft_seconds)
        if self.depth.idle():
            self._steps_off, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_REST)
        else:
            self._next_pause = FIRST_PAUSE
            if self._plain_steps >= TRIAL_STEPS:
                self._steps_off = FIRST_PAUSE
        if typical and self._loses(seconds, draft_seconds, tokens):
            self._steps_off = max(self._steps_off, self._next_rest)
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._gains.clear()

    def _loses(self, seconds: float, draft_seconds: float, tokens: float) -> bool:
        """Whether, with this step, an expensive drafter surely made the last steps slower than plain ones."""
        plain = self.costs.of(1)
        self._gains.append(tokens * plain / seconds)
        if draft_seconds < CHEAP_DRAFT * plain or len(self._gains) < TRIAL_STEPS:
            return False
        # By two standard errors: steps bring whole tokens, so that the mean of a few says little.
        if (average := fmean(self._gains)) >= 1:
            return False
        error = (fmean((gain - average) ** 2 for gain in self._gains) / len(self._gains)) ** 0.5
        return average + 2 * error < 1

    def decisions(self) -> dict[str, str]:
        """What was decided, by name, for the statistics."""
        passes = {} if self.draft_pass is None else {"draft_pass": self.draft_pass.description}
        return passes | {"nodes": self._describe_widths()}

    def _describe_widths(self) -> str:
        if not self.automatic:
            return "every proposed node is verified"
        times = ", ".join(f"{width}: {1e3 * seconds:.1f} ms" for width, seconds in self.costs.measured().items())
        return f"chosen step by step; a step by the rows of its pass: {times}"
