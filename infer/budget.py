"""Decides what a step drafts and verifies, by expected tokens per second.

Its measurements are in infer/costs.py; no other file uses measured times.

A step costs the seconds of its draft, which depend on the number of stages, and of the target's pass, which depend on
the width. A stage is a pass of the draft that adds a level to the tree. The expected number of committed tokens is one
plus all verified nodes' chances of acceptance, each the product of the rates along its path. In the order of a step:

1. `Policy.rests` says whether there is a proposal at all.
2. `Policy.budget` begins a proposal. `Budget` goes to the drafter and says how many stages it runs: chosen before the
   first one where the host may not wait for the device, else from stage to stage.
3. `Policy.prune` keeps the nodes worth verifying, at the width that `decide` chooses. For a tree on a device, for which
   the host must not wait, `decide` is called when the step is read, and chooses the width of a later step.
4. `Policy.learn` and `Policy.record` update the measurements when the step is read. Pruned nodes count too: the
   committed tokens show which of them were right.

Only speed depends on this, never a token. Shapes: B slots, N nodes, C classes.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from operator import mul
from statistics import fmean

import torch
from torch import Tensor

from longdraft.infer.costs import EARLIER_FADING, RECENT, STALE, Rates, Seconds
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, Lists, TokenTree
from longdraft.kernels.transfer import fill_from_host

# Widths that the policy may choose: query tokens of a pass for each slot. The widest one is the drafter's own.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
RECORDED_WIDTHS = (1, 4, 8, 16, 32, 64, 128)  # each is recorded; and a GPU takes hardly longer for a few more
ALL_STAGES = 1000  # more than any drafter has
# A wider pass, or a stage after several nodes, must promise a speed higher by this factor; less is measurement noise.
HURDLE = 1.05
# While proposals do not pay, they are tried so rarely that they cost this fraction of plain decoding's time.
TRYING = 0.01
# A new request tries the drafter again only if the last trial began at least this many steps ago.
TRIAL_EVERY = 32
# One proposal in this many runs one stage more than pays, so that the stage's seconds and rate stay known.
EXPLORE_EVERY = 32
# Before it is measured, each further query token is assumed to cost this fraction of a pass of one token.
ROW_COST = 0.04


def widths_up_to(max_nodes: int, automatic: bool, recorded: bool = False) -> list[int]:
    """Widths a pass may have: the root alone, the root with all nodes, and some between, which recorded work has only
    if `automatic`."""
    between = RECORDED_WIDTHS if recorded else WIDTHS
    return [1, *(width for width in between if (automatic or not recorded) and width <= max_nodes), 1 + max_nodes]


class Policy:
    """Measures rates and seconds, and decides by them what to draft and to verify.

    Args:
        class_stages: for each class of nodes, the stage of the proposal that it comes from (`Drafter.class_stages`).
        widths: query tokens that a pass may have, 1 included.
        automatic: False verifies all nodes of every proposal.
        on_host: whether the host reads results without waiting for a device. Before measurements, a query token in each
            of B slots is then assumed to cost as much as B in one slot.

    Attributes:
        width: the width chosen last. stages_run: how many stages the current or the last proposal runs.
        passes, drafting: what a pass of each width and a proposal of each depth cost with the slots of this step.
        rehearsed: while set, steps have this width and this many proposal stages (0: no proposal), and nothing is
            decided.
    """

    def __init__(
        self, class_stages: Sequence[int], widths: Sequence[int], automatic: bool = True, on_host: bool = False
    ):
        self.widths, self.automatic, self._on_host = tuple(sorted(set(widths))), automatic, on_host
        self.class_stages, self.n_stages = tuple(class_stages), max(1, *class_stages)
        # The rates of the nodes' classes, then each stage's: how often it is right where the stage above it is.
        self._stages_from = len(self.class_stages)
        zeros = [0.0] * (self._stages_from + 1 + self.n_stages)
        self._earlier = Rates(zeros, zeros.copy(), EARLIER_FADING)  # of all requests so far
        self._seconds: dict[int, tuple[Seconds, Seconds]] = {}  # by the number of slots
        self._proposals, self._more_stages, self._working = 0, 0, list[int]()
        self._steps_since_trial = TRIAL_EVERY
        self.width, self.stages_run = self.widths[-1], self.n_stages
        self.rehearsed: tuple[int, int] | None = None
        self._rates_C: Tensor | None = None  # the rates on the device, where recorded work reads them
        self.start_step(1)
        self.start_request()

    def start_request(self) -> None:
        """Start a request with the rates of all earlier ones. Try the drafter again if its last trial began at least
        TRIAL_EVERY steps ago."""
        self._rates = self._earlier.passed_on()
        if self._steps_since_trial < TRIAL_EVERY:  # short answers, or many slots: trials alone would cost too much
            return
        self._steps_since_trial = 0
        # Expected and measured speed of the last proposals, relative to plain decoding.
        self._expected, self._gains = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        self._steps_off = 0  # how many steps from now on go without a proposal

    def start_step(self, n_slots: int) -> None:
        """Begin a step in which `n_slots` slots take part. Costs are measured separately for each number of slots."""
        if n_slots not in self._seconds:
            passes = Seconds(self.widths, ROW_COST * (n_slots if self._on_host else 1))
            self._seconds[n_slots] = passes, Seconds(range(1, 1 + self.n_stages), 1.0)
        self.passes, self.drafting = self._seconds[n_slots]

    @property
    def rests(self) -> bool:
        """Whether this step goes without a proposal. The first one does, because gains are measured against it."""
        if self.rehearsed:
            return self.rehearsed[1] == 0
        return self._steps_off > 0 or (self.automatic and 1 not in self.passes.medians)

    def fitting(self, width: int) -> int:
        """The narrowest pass that has room for `width` nodes."""
        return next(wider for wider in self.widths if wider >= width)

    def _choose(self, expected: Sequence[float], stages: int) -> tuple[float, int]:
        """The most expected tokens a second and their number of nodes. Widths above 1 count with their speed / HURDLE.

        expected: entry [w - 1] is the expected tokens of the w best nodes. stages: of the proposal.
        """
        drafting = self.drafting.table[stages] if self.drafting.medians else 0.0
        speed, nodes = expected[0] / (self.passes.table[1] + drafting), 1
        for width, seconds in self.passes.table.items():
            known = min(width, len(expected))
            if width > 1 and (wider := expected[known - 1] / (HURDLE * (seconds + drafting))) > speed:
                speed, nodes = wider, known
            if width >= len(expected):
                break
        return speed, nodes

    def decide(self, expected: list[float]) -> None:
        """Choose the width with the most expected tokens a second. expected: as in `_choose`."""
        speed, self.width = self._choose(expected, self.stages_run)
        self._expected.append(speed * (HURDLE if self.width > 1 else 1.0) * self.passes.table[1] / expected[0])

    def prune(self, tree: TokenTree, state: SlotState) -> tuple[TokenTree, Tensor | None]:
        """Keep the nodes of `tree` that are worth verifying, best first, padded to one of the widths.

        Returns: the pruned tree; and the expected tokens by width, which `decide` must get once the host has read them.
            None if it has decided already.
        """
        rehearsed, stages = self.rehearsed or (0, 0)
        if not self.automatic or (tree.width == 1 and not stages):
            return tree.pad_to(self.fitting(max(tree.width, rehearsed))), None
        if tree.on_host:
            # Stable, so that parents come first.
            worth_BN, order_BN = self._worth(tree).sort(dim=1, descending=True, stable=True)
            if not rehearsed:
                working_B = torch.tensor([len(text) > 0 for text in state.committed])
                self.decide(_expected_by_width(worth_BN, working_B).tolist())
            width = min(rehearsed or self.width, tree.width)
            return tree.take(order_BN[:, :width]).pad_to(rehearsed or self.fitting(width)), None
        width = rehearsed or self.fitting(min(self.width, tree.width))
        rates = torch.tensor(self._rates.values)
        if self._rates_C is None:
            self._rates_C = rates.to(tree.tokens.device)
        fill_from_host(self._rates_C, rates)
        return state.run(("prune", width), (self._rates_C,), partial(_best, width, self._rates_C), tree)

    def _worth(self, tree: TokenTree) -> Tensor:
        """fp32 [B, N]: each node's chance of acceptance, 0 for padding. It is computed from lists, because a matrix of
        ancestors costs far more for thousands of nodes."""
        of_slots = enumerate(tree.lists.parents)
        return torch.tensor([worth_of(it, tree.lists.classes_of(slot), self._rates.values) for slot, it in of_slots])

    def budget(self, max_nodes: int, working: Sequence[int]) -> "Budget":
        """Start a proposal of at most `max_nodes` nodes. working: the slots with a request.

        The first proposal runs all stages, so that their seconds are known.
        """
        if self.rehearsed:
            return Budget(max_nodes, self.rehearsed[1])
        if not self.automatic:
            return Budget(max_nodes)
        self._proposals += 1
        explores = self._proposals % EXPLORE_EVERY == 0
        self._more_stages = self.n_stages if self._proposals == 1 else int(explores)
        self._working, self.stages_run = working, 1
        if self.n_stages == 1 or self._on_host:
            return Budget(max_nodes, policy=self)
        chances = list(accumulate(map(self.chance, range(1, 1 + self.n_stages)), mul, initial=1.0))
        speeds = {depth: self._speed([chances[: 1 + depth]], depth) for depth in range(1, 1 + self.n_stages)}
        self.stages_run = min(max(speeds, key=speeds.__getitem__) + self._more_stages, self.n_stages)
        return Budget(max_nodes, self.stages_run)

    def goes_on(self, tree: TokenTree, first_class: int) -> bool:
        """Whether one more stage pays after `tree`, which the draft has proposed so far. The stage is assumed to add a
        child to every node of the last one, at the stage's own rate, whether it extends all of them or the best.
        first_class: the first of the draft's own classes among the policy's."""
        proposal, now, then, stage, hurdle = tree.lists, list[list[float]](), list[list[float]](), 1, 1.0
        for slot in self._working:
            classes = [0, *(first_class + kind for kind in proposal.classes_of(slot)[1:])]
            worth = worth_of(proposal.parents[slot], classes, self._rates.values)
            stages = [self.class_stages[kind] for kind in classes]
            stage = max(stages)
            chance = self.chance(1 + stage)
            children = [chance * worth[node] for node, its_stage in enumerate(stages) if its_stage == stage]
            if len(children) > 1:  # the rate is that of all of them together, but counts for each
                hurdle = HURDLE
            now.append(worth)
            then.append(worth + children)
        pays = self._speed(then, 1 + stage) > hurdle * self._speed(now, stage)
        if not pays and self._more_stages > 0:
            self._more_stages, pays = self._more_stages - 1, True
        # Another drafter of a combination may have run more.
        self.stages_run = max(self.stages_run, stage + pays)
        return pays

    def _speed(self, worths: Iterable[Iterable[float]], stages: int) -> float:
        """Tokens a second at the best width. worths: each slot's nodes' chances of acceptance, root included. stages:
        of the proposal."""
        of_nodes = map(sum, zip_longest(*(sorted(worth, reverse=True) for worth in worths), fillvalue=0.0))
        return self._choose(list(accumulate(of_nodes)), stages)[0]

    def chance(self, stage: int) -> float:
        """How often this stage has the right token where the stage above has it. A stage that was never tried is
        assumed to be as good as the one above it."""
        above = {} if stage == 1 else {"before": self.chance(stage - 1)}
        return self._rates.rate(self._stages_from + stage, **above)

    def learn(self, slot: int, proposal: Lists, committed: Sequence[int]) -> None:
        """Update the rates by a slot's proposal, pruned nodes included. committed: the new tokens after the root."""
        found = list(_judged(proposal, slot, committed))
        events = found.copy()
        if self.n_stages > 1:
            nodes = zip(proposal.classes_of(slot)[1:], proposal.parents[slot][1:], strict=True)
            proposed = {self.class_stages[kind] for kind, parent in nodes if parent >= 0} - {0}
            right = {0, *(self.class_stages[kind] for kind, hit in found if hit)}
            tried = (stage for stage in proposed if stage - 1 in right and stage <= len(committed))
            events += [(self._stages_from + stage, stage in right) for stage in tried]
        for kind, hit in events:
            self._earlier.add(kind, hit)
            self._rates.add(kind, hit)

    def record(
        self, width: int, seconds: float, draft_seconds: float, tokens: float, stages: int = 1, typical: bool = True
    ) -> None:
        """Record the cost of a step, and pause the drafter if its last proposals did not pay.

        Args:
            width: query tokens of its pass.
            seconds: of the whole step. draft_seconds: of the proposal in it. stages: of the proposal.
            tokens: new tokens per slot that took part.
            typical: False if the step did work that later steps do not repeat; its time is then ignored.
        """
        self._steps_since_trial += 1
        if typical:
            self.passes.record(width, seconds - draft_seconds)
        if self._steps_off > 0:
            self._steps_off -= 1
        elif typical and self._proposals:
            self.drafting.record(stages, draft_seconds)
            self._gains.append(tokens * self.passes.table[1] / seconds)
            if len(self._expected) == RECENT and max(fmean(self._expected), fmean(self._gains)) < 1:
                self._steps_off = min(STALE, int(draft_seconds / (TRYING * self.passes.table[1])))


@dataclass(frozen=True)
class Budget:
    """What one proposal may spend. The runner gives it to `Drafter.propose`.

    Attributes:
        max_nodes: the most nodes below each root.
        stages: the most passes of the draft.
        policy: decides after each stage whether another one pays; None: all `stages` are run.
        first_class: the first of the drafter's own classes among the policy's.
    """

    max_nodes: int
    stages: int = ALL_STAGES
    policy: Policy | None = None
    first_class: int = 0

    def goes_on(self, tree: TokenTree) -> bool:
        """Whether one more stage pays after `tree`, which the drafter has proposed so far."""
        return self.policy is None or self.policy.goes_on(tree, self.first_class)


def _best(width: int, rates_C: Tensor, state: SlotState, tree: TokenTree) -> tuple[TokenTree, Tensor]:
    """`prune` on the device: the `width` nodes with the best chances, and the expected tokens by width."""
    classes_BN = tree.classes
    if classes_BN is None:
        classes_BN = torch.arange(tree.width, device=rates_C.device).expand(tree.tokens.shape)
    log_rates_BN = rates_C.log()[classes_BN]
    log_rates_BN[:, 0] = 0.0
    worth_BN = tree.ancestors.float().bmm(log_rates_BN[:, :, None])[:, :, 0].exp()
    # Stable, so that parents come first, and padding last.
    worth_BN, order_BN = worth_BN.masked_fill(tree.parents == PAD, 0.0).sort(dim=1, descending=True, stable=True)
    best = tree.take(order_BN[:, :width]).pad_to(width)
    _ = best.ancestors, best.depths  # verification asks for these, so they are recorded with the tree
    return best, _expected_by_width(worth_BN, state.active)


def _expected_by_width(worth_BN: Tensor, active_B: Tensor) -> Tensor:
    """Entry [w - 1]: expected tokens of the w best nodes, summed over active slots. worth_BN: in descending order."""
    return (worth_BN * active_B[:, None]).sum(0).cumsum(0)


def worth_of(parents: Sequence[int], classes: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Each node's chance of acceptance: the product of the rates along its path. The root's is 1, padding's 0."""
    worth = [1.0]
    for parent, kind in zip(parents[1:], classes[1:], strict=True):
        worth.append(worth[parent] * rates[kind] if parent >= 0 else 0.0)
    return worth


def _judged(proposal: Lists, slot: int, committed: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """The class of each node whose parent the committed tokens reach, and whether it was right."""
    parents, classes, depth_on_path = proposal.parents[slot], proposal.classes_of(slot), {0: 0}
    for node, token in enumerate(proposal.tokens[slot]):
        depth = depth_on_path.get(parents[node]) if node else None
        if depth is not None and depth < len(committed):
            if hit := token == committed[depth]:
                depth_on_path[node] = depth + 1
            yield classes[node], hit
