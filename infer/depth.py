"""How many stages a proposal has: no stage is run that does not pay.

A stage is a pass of the draft that adds one level to the tree (one of LongSpec's levels, one token of a small model's
chain). Its chance is how often the level holds the right token where the level above did, and its price is the draft's
own seconds. Whether the price pays is computed with the same costs that pick nodes (`Policy.speed`).

Who asks when (through infer/slot_state.py, in the order of a proposal):

1. The runner calls `begin`. Where the depth is fixed beforehand, because a step is recorded or the host may not wait
   for the device, it is chosen here by the chances alone, and the drafter asks `limit` for it.
2. Elsewhere a combination of drafters (infer/drafters/combine.py) asks `begins`, knowing the nodes that its look-ups
   have found, whether the drafter with stages is to run at all.
3. The drafter asks `goes_on` between two stages, knowing the nodes so far.

Shapes: B slots, N nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from torch import Tensor

from longdraft.infer.measured import EARLIER_FADING, Costs, Rates, bounded
from longdraft.infer.tree import Lists, TokenTree

# The first stage before it was ever tried: right as often as FIRST_RATE, which counts as FIRST_WEIGHT trials. A deeper
# one begins with the chance of the stage above it.
FIRST_RATE, FIRST_WEIGHT = 0.3, 1.0
# Before the first stage was tried this often, nothing is decided by it.
LEAST_TRIALS = 8
# The first FIRST_WHOLE proposals run all stages, and later one in DEEPER_EVERY runs a stage more than pays, so that its
# cost and chance stay known.
FIRST_WHOLE, DEEPER_EVERY = 3, 32
# The stage of nodes that come from a drafter without stages.
NO_STAGE = -1
# Behind several nodes a further stage must promise this much more speed: its chance, which is that of all its nodes
# together, is counted as if one node behind each had it.
SHARED_HURDLE = 1.05
# Seconds of a proposal are a table by 1 + its stages, in proportion to the stages where nothing is measured.
PROPORTIONAL = 1e6

# Tokens a second: (for each slot, the chances of its nodes to be reached; seconds of drafting) -> expected.
Speed = Callable[[Sequence[Sequence[float]], float], float]


class _Chances(NamedTuple):
    """What is learned from all requests so far, or from one.

    Attributes:
        stages: by stage, how often it holds the right token where the one above does.
        others: by class, how often nodes of drafters without stages are right.
        elsewhere: how often the first stage holds the right token where none of those nodes does.
    """

    stages: Rates
    others: Rates
    elsewhere: Rates

    def passed_on(self) -> "_Chances":
        """What a new request starts with."""
        return _Chances(*(rates.passed_on() for rates in self))


class Depth:
    """Learns what stages bring and take, and says where to stop.

    Args:
        stages: for each class of nodes, the stage that proposes it; 1 for all where there is nothing to stop between,
            NO_STAGE for other drafters' nodes in the same tree.
        fixed: whether the depth is fixed before a proposal begins.
        speed: what a proposal is worth (`Policy.speed`).

    Attributes:
        n_stages: stages of a whole proposal.
        run: how many stages the current proposal, or the last one, has run; where the depth is fixed, will run.
    """

    def __init__(self, stages: Sequence[int], fixed: bool, speed: Speed):
        self._stage_of_class, self.n_stages, self._fixed, self._speed = tuple(stages), max((1, *stages)), fixed, speed
        n_classes, zeros = len(self._stage_of_class), [0.0] * (1 + self.n_stages)
        self._earlier = _Chances(  # of all requests so far
            Rates(zeros.copy(), zeros.copy(), EARLIER_FADING),
            Rates([FIRST_RATE * FIRST_WEIGHT] * n_classes, [FIRST_WEIGHT] * n_classes, EARLIER_FADING),
            Rates([0.0], [0.0], EARLIER_FADING),
        )
        self._others: Lists | None = None  # other drafters' nodes in the current proposal, or in the last one
        self._costs: dict[int, Costs] = {}  # by the number of slots
        # Whether the current proposal runs all stages, and whether it is still to run one more than pays.
        self._proposals, self._runs_all, self._one_more = 0, True, False
        self.start_step(1)
        self.start(1)

    def start_step(self, n_slots: int) -> None:
        """Begin a step in which `n_slots` slots take part."""
        self.costs = self._costs.setdefault(n_slots, Costs(range(1, 2 + self.n_stages), PROPORTIONAL))

    def start(self, batch: int) -> None:
        """Begin a call on `batch` slots."""
        self._of_slots = [self._earlier.passed_on() for _ in range(batch)]
        self.run, self._others = self.n_stages, None

    def start_request(self, slot: int) -> None:
        """Begin a request on this slot, with the chances of all earlier ones."""
        self._of_slots[slot] = self._earlier.passed_on()

    def seconds(self, stages: int) -> float:
        """Seconds that drafting with this many stages takes; 0 before any is measured."""
        return self.costs.of(1 + min(stages, self.n_stages)) if self.costs.measured() else 0.0

    def record(self, stages: int, seconds: float) -> None:
        """Note that a proposal with this many stages took this long."""
        self.costs.record(1 + stages, seconds)

    def learn(self, slot: int, proposal: Lists, committed: Sequence[int]) -> None:
        """Learn which stages held the right token. committed: the new tokens behind the root."""
        if self.n_stages == 1:
            return
        tokens, parents = proposal.tokens[slot], proposal.parents[slot]
        classes = range(len(tokens)) if proposal.classes is None else proposal.classes[slot]
        proposed, depth_on_path, right = set[int](), {0: 0}, {0}
        for node in range(1, len(tokens)):
            if parents[node] < 0:
                continue
            proposed.add(stage := self._stage_of_class[classes[node]])
            depth = depth_on_path.get(parents[node])
            if depth is not None and depth < len(committed) and tokens[node] == committed[depth]:
                depth_on_path[node] = depth + 1
                right.add(stage)
        both = self._earlier, self._of_slots[slot]
        for stage in proposed - {0, NO_STAGE}:
            if stage - 1 in right and stage <= len(committed):
                for learned in both:
                    learned.stages.add(stage, stage in right)
        if self._others is not None and not self._learn_others(slot, self._others, committed) and 1 in proposed:
            for learned in both:
                learned.elsewhere.add(0, 1 in right)

    def _learn_others(self, slot: int, others: Lists, committed: Sequence[int]) -> bool:
        """Learn how often other drafters' nodes are right, also those that the stages proposed too. Returns whether one
        was right now."""
        assert others.classes is not None
        depth_on_path = {0: 0}
        for node, (token, parent) in enumerate(zip(others.tokens[slot], others.parents[slot], strict=True)):
            depth = depth_on_path.get(parent)
            if node and depth is not None and depth < len(committed):
                hit = token == committed[depth]
                for learned in (self._earlier, self._of_slots[slot]):
                    learned.others.add(others.classes[slot][node], hit)
                if hit:
                    depth_on_path[node] = depth + 1
        return len(depth_on_path) > 1

    def chance(self, slot: int, stage: int) -> float:
        """How often this stage holds the right token where the one above does."""
        rates, chance = self._of_slots[slot].stages, FIRST_RATE
        for above in range(1, stage + 1):
            chance = (rates.hits[above] + FIRST_WEIGHT * chance) / (rates.trials[above] + FIRST_WEIGHT)
        return bounded(chance)

    def _speeds(self, slots: Sequence[int], errors: float = 0.0) -> Iterator[float]:
        """Tokens a second without a stage, with one, two, ..., by their chances plus `errors` standard errors."""
        worths = [[1.0] for _ in slots]
        yield self._speed(worths, 0.0)
        for stage in range(1, 1 + self.n_stages):
            for slot, worth in zip(slots, worths, strict=True):
                chance = self.chance(slot, stage)
                error = (chance * (1 - chance) / (FIRST_WEIGHT + self._of_slots[slot].stages.trials[stage])) ** 0.5
                worth.append(worth[-1] * bounded(chance + errors * error))
            yield self._speed(worths, self.seconds(stage))

    def idle(self) -> bool:
        """Whether a proposal of any depth is a loss, as far as is known; never beside drafters without stages, which
        would be left out too."""
        if (
            NO_STAGE in self._stage_of_class
            or self.n_stages == 1
            or self._earlier.stages.trials[1] < LEAST_TRIALS
            or not self.costs.measured()
        ):
            return False
        speeds = self._speeds(range(len(self._of_slots)), errors=1.0)
        plain = next(speeds)
        return all(reached <= plain for reached in speeds)

    def begin(self) -> None:
        """Begin a proposal. A fixed depth is the one with the most tokens a second by the chances of its stages."""
        self._proposals += 1
        self._runs_all, self._one_more = self._proposals <= FIRST_WHOLE, self._proposals % DEEPER_EVERY == 0
        self.run = 1
        if self._fixed:
            speeds = list(self._speeds(range(len(self._of_slots))))
            paying = max(range(len(speeds)), key=speeds.__getitem__)
            self.run = self.n_stages if self._runs_all else min(max(1, paying) + self._one_more, self.n_stages)

    @property
    def asks_first(self) -> bool:
        """Whether a proposal's first stage is run only where it pays beside other drafters' nodes (`begins`)."""
        return self.n_stages > 1 and not self._fixed

    def begins(self, others: Lists, active_B: Tensor) -> bool:
        """Whether the first stage pays, alone or with some behind it, beside other drafters' nodes.

        A stage adds something where those nodes are wrong: the first one as often as it was right there before, later
        ones as often as by themselves.

        Args:
            others: the nodes, with classes. active_B: slots that take part.
        """
        self._others = others
        slots = [slot for slot, active in enumerate(active_B.tolist()) if active]
        if not (pays := self._runs_all or not slots):
            worths, found = zip(*(self._worth_of_others(slot, others) for slot in slots), strict=True)
            # By depth, the chance that the stages hold the right token down to there, and that they alone do.
            reached = [accumulate(self._chances_elsewhere(slot), mul) for slot in slots]
            added = [
                [chance * max(0.0, 1.0 - other) for chance, other in zip(*of_slot, strict=True)]
                for of_slot in zip(reached, found, strict=True)
            ]

            def speed(stages: int) -> float:
                nodes = (worth + chances[:stages] for worth, chances in zip(worths, added, strict=True))
                return self._speed([sorted(of_slot, reverse=True) for of_slot in nodes], self.seconds(stages))

            without = speed(0)
            pays = any(speed(1 + stage) > without for stage in range(self.n_stages)) or self._takes_one_more()
        self.run = int(pays)
        return pays

    def _chances_elsewhere(self, slot: int) -> Iterator[float]:
        """`chance` of each stage where other drafters' nodes are wrong: where they are, the text is hard for all."""
        rates = self._of_slots[slot].elsewhere
        yield bounded((rates.hits[0] + FIRST_WEIGHT * self.chance(slot, 1)) / (rates.trials[0] + FIRST_WEIGHT))
        yield from (self.chance(slot, stage) for stage in range(2, 1 + self.n_stages))

    def _takes_one_more(self) -> bool:
        """Whether this proposal is still to run a stage more than pays; it is run once."""
        one_more, self._one_more = self._one_more, False
        return one_more

    def _worth_of_others(self, slot: int, others: Lists) -> tuple[list[float], list[float]]:
        """The chance of each of their nodes, and the chance of having the right token at each depth of the stages."""
        assert others.classes is not None
        learned, parents = self._of_slots[slot].others, others.parents[slot]
        rates = [bounded(hits / trials) for hits, trials in zip(learned.hits, learned.trials, strict=True)]
        worth, depths, found = worth_of(parents, others.classes[slot], rates), [0], [0.0] * self.n_stages
        for chance, parent in zip(worth[1:], parents[1:], strict=True):
            depths.append(1 + depths[max(parent, 0)])
            if depths[-1] <= self.n_stages:
                found[depths[-1] - 1] += chance
        return worth, found

    def limit(self, most: int) -> int:
        """How many of `most` stages may be run; all where `goes_on` is asked between them."""
        return min(most, self.run) if self._fixed else most

    def goes_on(
        self, tree: TokenTree, rates: Sequence[Sequence[float]], active_B: Tensor, first_class: int = 0
    ) -> bool:
        """Whether one more stage pays. It is taken to add a child to every node of the last stage, right as often as
        the new stage is, whether it extends all of them or the best alone.

        Args:
            tree: the nodes so far.
            rates: of all classes, for each slot.
            first_class: the first of the drafter's own classes.
        """
        if self._fixed:
            return True
        if not (pays := self._runs_all):
            proposal = tree.lists
            now, then, shared = list[list[float]](), list[list[float]](), False
            for slot in (slot for slot, active in enumerate(active_B.tolist()) if active):
                parents = proposal.parents[slot]
                classes = range(len(parents)) if proposal.classes is None else proposal.classes[slot]
                classes = [0, *(first_class + kind for kind in classes[1:])]
                worth = worth_of(parents, classes, rates[slot])
                stages = [self._stage_of_class[kind] for kind in classes]
                last, chance = max(stages), self.chance(slot, 1 + max(stages))
                children = [chance * worth[node] for node, stage in enumerate(stages) if stage == last]
                shared = shared or len(children) > 1
                now.append(sorted(worth, reverse=True))
                then.append(sorted(worth + children, reverse=True))
            if now:
                least = (SHARED_HURDLE if shared else 1.0) * self._speed(now, self.seconds(self.run))
                pays = self._speed(then, self.seconds(self.run + 1)) > least or self._takes_one_more()
        if pays:
            self.run = min(self.run + 1, self.n_stages)
        return pays


def worth_of(parents: Sequence[int], classes: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Each node's chance to be reached: the product of the rates along its path. The root's is 1, padding's 0."""
    worth = [1.0]
    for parent, kind in zip(parents[1:], classes[1:], strict=True):
        worth.append(worth[parent] * rates[kind] if parent >= 0 else 0.0)
    return worth
