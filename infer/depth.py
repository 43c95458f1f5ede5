"""How deep a drafter that proposes in stages goes: no stage is run that does not pay.

A stage is a pass of the draft that adds one level to the tree (LongSpec's levels, the tokens of a small model's chain).
Its chance is how often the level held the right token where the level above did, its price the draft's own seconds, and
whether the price pays is for the policy to say, by the costs that pick nodes (`Policy.speed`). On a host that is asked
between two stages, knowing the nodes so far; elsewhere, where a step is recorded and may not wait, before the first
stage, by the chances alone. Beside other drafters, whose nodes are there before its first stage, that one is asked too.
Shapes: B slots, N nodes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from torch import Tensor

from longdraft.infer.measured import EARLIER_FADING, Costs, Rates, bounded
from longdraft.infer.tree import Lists, TokenTree

# The first stage before it was ever tried: right as often as FIRST_RATE, which counts as so many trials. A deeper one
# begins with the chance of the stage above it.
FIRST_RATE, FIRST_WEIGHT = 0.3, 1.0
# Before the first stage was tried so often, nothing is decided by it.
LEAST_TRIALS = 8
# So many first proposals are made whole, and later one in so many has a stage more than pays, so that its cost and
# chance stay known.
FIRST_WHOLE, DEEPER_EVERY = 3, 32
# The stage of nodes that a staged drafter has not proposed.
NO_STAGE = -1
# Behind several nodes a stage more must promise so much more speed: its chance, of all its nodes together, is counted
# as if one node behind each had it.
SHARED_HURDLE = 1.05
# Seconds of a proposal are a table by 1 + its stages, in proportion to the stages where nothing is measured.
PROPORTIONAL = 1e6

# Tokens a second: (worth of the nodes of each slot, seconds of drafting) -> expected.
Speed = Callable[[Sequence[Sequence[float]], float], float]


class _Chances(NamedTuple):
    """What is learned of the requests so far, or of one.

    Attributes:
        stages: by stage, how often it holds the right token where the one above does.
        beside: by class, how often other drafters' nodes are right.
        elsewhere: how often the first stage holds the right token where no node of theirs does.
    """

    stages: Rates
    beside: Rates
    elsewhere: Rates

    def passed_on(self) -> "_Chances":
        """What a new request starts with."""
        return _Chances(*(rates.passed_on() for rates in self))


class Depth:
    """Learns what stages bring and take, and says where to stop.

    Args:
        stages: of each class of nodes, the stage that proposes it; 1 for all where there is nothing to stop between,
            NO_STAGE of other drafters on the same tree.
        beforehand: whether the depth is fixed before a proposal begins.
        speed: what a proposal is worth (`Policy.speed`).

    Attributes:
        count: stages of a whole proposal.
        run: stages of the proposal that is being made, or was made last.
    """

    def __init__(self, stages: Sequence[int], beforehand: bool, speed: Speed):
        self.stages, self.count, self._beforehand, self._speed = tuple(stages), max((1, *stages)), beforehand, speed
        first = [FIRST_RATE * FIRST_WEIGHT] * len(self.stages), [FIRST_WEIGHT] * len(self.stages)
        self._all = _Chances(
            Rates([0.0] * (1 + self.count), [0.0] * (1 + self.count), EARLIER_FADING),
            Rates(*first, EARLIER_FADING),
            Rates([0.0], [0.0], EARLIER_FADING),
        )
        self._others: Lists | None = None  # of the proposal that is being made, or was made last
        self._costs: dict[int, Costs] = {}  # by the number of slots
        self._proposals, self._whole, self._deeper = 0, True, False
        self.start_step(1)
        self.start(1)

    def start_step(self, n_slots: int) -> None:
        """So many slots take part in the next step."""
        self.costs = self._costs.setdefault(n_slots, Costs(range(1, 2 + self.count), PROPORTIONAL))

    def start(self, batch: int) -> None:
        """A call with this many slots begins."""
        self._slots = [self._all.passed_on() for _ in range(batch)]
        self.run, self._others = self.count, None

    def start_request(self, slot: int) -> None:
        """This slot's next request starts with the chances of all earlier ones."""
        self._slots[slot] = self._all.passed_on()

    def seconds(self, stages: int) -> float:
        """What drafting so many stages takes; 0 before any is measured."""
        return self.costs.of(1 + min(stages, self.count)) if self.costs.measured() else 0.0

    def record(self, stages: int, seconds: float) -> None:
        """A proposal of so many stages took this long."""
        self.costs.record(1 + stages, seconds)

    def learn(self, slot: int, proposal: Lists, committed: Sequence[int]) -> None:
        """Which stages held the right token. `committed`: the new tokens behind the root."""
        if self.count == 1:
            return
        tokens, parents = proposal.tokens[slot], proposal.parents[slot]
        classes = range(len(tokens)) if proposal.classes is None else proposal.classes[slot]
        proposed, depth_on_path, right = set[int](), {0: 0}, {0}
        for node in range(1, len(tokens)):
            if parents[node] < 0:
                continue
            proposed.add(stage := self.stages[classes[node]])
            depth = depth_on_path.get(parents[node])
            if depth is not None and depth < len(committed) and tokens[node] == committed[depth]:
                depth_on_path[node] = depth + 1
                right.add(stage)
        both = self._all, self._slots[slot]
        for stage in proposed - {0, NO_STAGE}:
            if stage - 1 in right and stage <= len(committed):
                for learned in both:
                    learned.stages.add(stage, stage in right)
        if self._others is not None and not self._learn_beside(slot, self._others, committed) and 1 in proposed:
            for learned in both:
                learned.elsewhere.add(0, 1 in right)

    def _learn_beside(self, slot: int, others: Lists, committed: Sequence[int]) -> bool:
        """How often other drafters' nodes are right, whoever else proposed them; whether one was now."""
        assert others.classes is not None
        depth_on_path = {0: 0}
        for node, (token, parent) in enumerate(zip(others.tokens[slot], others.parents[slot], strict=True)):
            depth = depth_on_path.get(parent)
            if node and depth is not None and depth < len(committed):
                hit = token == committed[depth]
                for learned in (self._all, self._slots[slot]):
                    learned.beside.add(others.classes[slot][node], hit)
                if hit:
                    depth_on_path[node] = depth + 1
        return len(depth_on_path) > 1

    def chance(self, slot: int, stage: int) -> float:
        """How often this stage holds the right token where the one above does."""
        own, chance = self._slots[slot].stages, FIRST_RATE
        for above in range(1, stage + 1):
            chance = (own.hits[above] + FIRST_WEIGHT * chance) / (own.trials[above] + FIRST_WEIGHT)
        return bounded(chance)

    def _speeds(self, slots: Sequence[int], errors: float = 0.0) -> Iterator[float]:
        """Tokens a second without a stage, with one, ..., by their chances or by so many standard errors more."""
        worths = [[1.0] for _ in slots]
        yield self._speed(worths, 0.0)
        for stage in range(1, 1 + self.count):
            for slot, worth in zip(slots, worths, strict=True):
                chance = self.chance(slot, stage)
                error = (chance * (1 - chance) / (FIRST_WEIGHT + self._slots[slot].stages.trials[stage])) ** 0.5
                worth.append(worth[-1] * bounded(chance + errors * error))
            yield self._speed(worths, self.seconds(stage))

    def idle(self) -> bool:
        """Whether a proposal of any depth is a loss, as far as is known; never beside drafters that have no stages."""
        if (
            NO_STAGE in self.stages
            or self.count == 1
            or self._all.stages.trials[1] < LEAST_TRIALS
            or not self.costs.measured()
        ):
            return False
        speeds = self._speeds(range(len(self._slots)), errors=1.0)
        plain = next(speeds)
        return all(reached <= plain for reached in speeds)

    def begin(self) -> None:
        """A proposal begins; beforehand, it has as many stages as have the most tokens a second by their chances."""
        self._proposals += 1
        self._whole, self._deeper = self._proposals <= FIRST_WHOLE, self._proposals % DEEPER_EVERY == 0
        self.run = 1
        if self._beforehand:
            speeds = list(self._speeds(range(len(self._slots))))
            paying = max(range(len(speeds)), key=speeds.__getitem__)
            self.run = self.count if self._whole else min(max(1, paying) + self._deeper, self.count)

    @property
    def asks_first(self) -> bool:
        """Whether a proposal's first stage is run only where it pays beside other drafters' nodes (`begins`)."""
        return self.count > 1 and not self._beforehand

    def begins(self, others: Lists, active_B: Tensor) -> bool:
        """Whether the first stage pays, alone or with some behind it, beside other drafters' nodes.

        Each stage adds where those are wrong, the first as often as it was right there, later ones as by themselves.

        Args:
            others: the nodes, with classes. active_B: slots that take part.
        """
        self._others = others
        slots = [slot for slot, here in enumerate(active_B.tolist()) if here]
        if not (pays := self._whole or not slots):
            worths, found = zip(*(self._of_others(slot, others) for slot in slots), strict=True)
            right = [accumulate(self._chances_beside(slot), mul) for slot in slots]
            chains = [
                [here * max(0.0, 1.0 - there) for here, there in zip(*each, strict=True)]
                for each in zip(right, found, strict=True)
            ]

            def reached(stages: int) -> float:
                added = (worth + chain[:stages] for worth, chain in zip(worths, chains, strict=True))
                return self._speed([sorted(each, reverse=True) for each in added], self.seconds(stages))

            plain = reached(0)
            pays = any(reached(1 + stage) > plain for stage in range(self.count)) or self._one_deeper()
        self.run = int(pays)
        return pays

    def _chances_beside(self, slot: int) -> Iterator[float]:
        """`chance` of each stage where other drafters' nodes are wrong. Where those are, the text is hard for all."""
        own = self._slots[slot].elsewhere
        yield bounded((own.hits[0] + FIRST_WEIGHT * self.chance(slot, 1)) / (own.trials[0] + FIRST_WEIGHT))
        yield from (self.chance(slot, stage) for stage in range(2, 1 + self.count))

    def _one_deeper(self) -> bool:
        """Whether this proposal is to have a stage more than pays and has not had it yet."""
        deeper, self._deeper = self._deeper, False
        return deeper

    def _of_others(self, slot: int, others: Lists) -> tuple[list[float], list[float]]:
        """The chance of each of their nodes, and of one of them at each depth that stages reach."""
        assert others.classes is not None
        own, parents = self._slots[slot].beside, others.parents[slot]
        rates = [bounded(hits / trials) for hits, trials in zip(own.hits, own.trials, strict=True)]
        worth, depths, found = worth_of(parents, others.classes[slot], rates), [0], [0.0] * self.count
        for chance, parent in zip(worth[1:], parents[1:], strict=True):
            depths.append(1 + depths[max(parent, 0)])
            if depths[-1] <= self.count:
                found[depths[-1] - 1] += chance
        return worth, found

    def limit(self, most: int) -> int:
        """Of `most` stages, so many may be run; where `goes_on` is asked between them, all."""
        return min(most, self.run) if self._beforehand else most

    def goes_on(
        self, tree: TokenTree, rates: Sequence[Sequence[float]], active_B: Tensor, first_class: int = 0
    ) -> bool:
        """Whether one more stage pays: with a child of every node of the last one, as often right as stages are there,
        whether all of its nodes are extended or the best alone.

        Args:
            tree: the nodes so far. rates: of all classes, for each slot. first_class: of the drafter's own.
        """
        if self._beforehand:
            return True
        if not (pays := self._whole):
            proposal = tree.lists
            now, then, shared = list[list[float]](), list[list[float]](), False
            for slot in (slot for slot, here in enumerate(active_B.tolist()) if here):
                parents = proposal.parents[slot]
                classes = range(len(parents)) if proposal.classes is None else proposal.classes[slot]
                kinds = [0, *(first_class + kind for kind in classes[1:])]
                worth = worth_of(parents, kinds, rates[slot])
                stages = [self.stages[kind] for kind in kinds]
                last, chance = max(stages), self.chance(slot, 1 + max(stages))
                children = [chance * worth[node] for node, stage in enumerate(stages) if stage == last]
                shared = shared or len(children) > 1
                now.append(sorted(worth, reverse=True))
                then.append(sorted(worth + children, reverse=True))
            if now:
                least = (SHARED_HURDLE if shared else 1.0) * self._speed(now, self.seconds(self.run))
                pays = self._speed(then, self.seconds(self.run + 1)) > least or self._one_deeper()
        if pays:
            self.run = min(self.run + 1, self.count)
        return pays


def worth_of(parents: Sequence[int], classes: Sequence[int], rates: Sequence[float]) -> list[float]:
    """Each node's chance to be reached: the product of the rates along its path. The root's is 1, padding's 0."""
    worth = [1.0]
    for parent, kind in zip(parents[1:], classes[1:], strict=True):
        worth.append(worth[parent] * rates[kind] if parent >= 0 else 0.0)
    return worth
