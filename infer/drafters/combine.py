"""Several drafters fill one tree with the union of their proposals.

Each drafter keeps its own state and sees every verified tree, whoever proposed its nodes. A node's class says which
drafter proposed it first, in which of its classes, and whether another one proposed it too. So the policy learns how
good each drafter is and what their agreement is worth, and prunes by that. The union is made on the host; on a GPU a
step reads everything that its drafters need there at once. Shapes: B slots, N nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Annotated

from pydantic import Field

from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.host import HostDrafter
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, Lists, TokenTree, Trie
from longdraft.kernels.transfer import read_together
from longdraft.models.schema import Instance, validated

# In a larger tree the last nodes cost more than they gain.
MOST_NODES = 127
_EXHAUSTED = object()


class Combined(Drafter):
    """The union of the proposals of `drafters`.

    Drafters take turns, in the order given, to add their next node until the tree has `max_nodes`.
    """

    @validated
    def __init__(self, drafters: Annotated[Sequence[Instance[Drafter]], Field(min_length=2)]):
        # Nested combinations are flattened.
        drafters = [part for one in drafters for part in (one.parts if isinstance(one, Combined) else [one])]
        if len({id(drafter) for drafter in drafters}) < len(drafters):
            raise ValueError("drafters: one object is listed twice; each drafter needs its own state")
        self.parts = list(drafters)
        most = max(MOST_NODES, *(drafter.max_nodes for drafter in drafters))
        self.max_nodes = min(sum(drafter.max_nodes for drafter in drafters), most)
        self.max_depth = max(drafter.max_depth for drafter in drafters)
        # Where each drafter's own classes begin; the last one is their number. Nodes that several propose come after.
        self._first_classes = list(accumulate((len(drafter.class_stages) for drafter in drafters), initial=0))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(drafter.needs for drafter in self.parts))

    @property
    def learns_from(self) -> frozenset[str]:
        return frozenset().union(*(drafter.learns_from for drafter in self.parts))

    @property
    def class_stages(self) -> Sequence[int]:
        stages = [drafter.class_stages for drafter in self.parts]
        if any(max(one) > 1 for one in stages):  # beside a drafter with several, one with a single stage has none
            stages = [one if max(one) > 1 else [0] * len(one) for one in stages]
        return [*chain.from_iterable(stages)] * 2

    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        limits = [min(budget.max_nodes, drafter.max_nodes) for drafter in self.parts]
        trees = {
            i: drafter.propose(state, replace(budget, max_nodes=limits[i], first_class=self._first_classes[i]))
            for i, drafter in enumerate(self.parts)
            if not isinstance(drafter, HostDrafter)
        }
        # One read of everything: the roots, and of each drafter its tree, or the rows that it needs to look up.
        unread = [
            (drafter.device_rows(state),) if isinstance(drafter, HostDrafter) else trees[i].unread
            for i, drafter in enumerate(self.parts)
        ]
        roots, *read = read_together(state.roots, *chain.from_iterable(unread))
        proposals = list[Lists]()
        for i, drafter in enumerate(self.parts):
            found, read = read[: len(unread[i])], read[len(unread[i]) :]
            if isinstance(drafter, HostDrafter):
                proposals.append(_as_lists(drafter.tries(state, found[0], limits[i])))
            else:
                proposals.append(trees[i].take_lists(found).lists)
        return TokenTree.from_tries(self._unite(proposals, roots, budget.max_nodes))

    def _unite(self, proposals: Sequence[Lists], roots: list[int], max_nodes: int) -> list[Trie]:
        """One trie a slot of the proposed nodes, at most `max_nodes`. proposals: one of each drafter."""
        tries = []
        for slot, root in enumerate(roots):
            trie, (*firsts, shared) = Trie(root), self._first_classes
            of_drafters = zip(proposals, firsts, strict=True)
            _take_turns(trie, [_add_nodes(trie, one, slot, first, shared) for one, first in of_drafters], max_nodes)
            tries.append(trie)
        return tries


def _as_lists(tries: Sequence[Trie]) -> Lists:
    return Lists(*map(list, zip(*((one.tokens, one.parents, one.classes) for one in tries), strict=True)))


def _add_nodes(trie: Trie, proposal: Lists, slot: int, first_class: int, shared: int) -> Iterator[None]:
    """Add a drafter's nodes of a slot to `trie`, and yield after each new one. Nodes that it has already cost no turn.

    first_class: of this drafter. shared: what is added to the class of a node that several drafters propose.
    """
    tokens, parents, classes = proposal.tokens[slot], proposal.parents[slot], proposal.classes_of(slot)
    places = {0: 0}
    for node in range(1, len(tokens)):
        if parents[node] == PAD:
            continue
        above, token = places[parents[node]], tokens[node]
        place = trie.child(above, token)
        if place is None:
            places[node] = trie.add(above, token, first_class + classes[node])
            yield
        else:
            places[node] = place
            if trie.classes[place] < shared:
                trie.classes[place] += shared


def _take_turns(trie: Trie, turns: list[Iterator[None]], max_nodes: int) -> None:
    """Advance all in turn until all are exhausted or the trie has `max_nodes`."""
    while turns:
        for turn in list(turns):
            if len(trie) > max_nodes:
                return
            if next(turn, _EXHAUSTED) is _EXHAUSTED:
                turns.remove(turn)
