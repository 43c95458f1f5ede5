"""Several drafters fill one tree: what each proposes, every candidate once.

Each drafter keeps its own state and sees every verified tree, whoever's nodes it holds. A node's class says which
drafter proposed it first, of which of its classes, and whether another one proposed it too, so the engine learns how
good each of them is and what their agreement is worth, and prunes by that. The union is made on the host, so on a GPU a
step reads all that its drafters need there once. Where a step waits for the host anyway the look-ups come first, and a
draft that proposes in stages is run only where it pays beside them (infer/depth.py). Shapes: B slots, N nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.depth import NO_STAGE
from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.drafters.host import HostDrafter
from longdraft.infer.tree import PAD, Lists, TokenTree
from longdraft.infer.trie import Trie, as_tree
from longdraft.kernels.transfer import read_together
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput

# A tree of more rows costs more than any of its nodes brings.
MOST_NODES = 127
_NO_MORE = object()


class Combined(Drafter):
    """The union of the proposals of `drafters`.

    Where it exceeds `max_nodes`, the drafters give one node each in turn, in their given order and each in its own.
    """

    def __init__(self, drafters: Sequence[Drafter]):
        drafters = [part for one in drafters for part in (one.drafters if isinstance(one, Combined) else [one])]
        if len(drafters) < 2:
            raise ValueError(f"drafters: {len(drafters)} given; a combination needs at least 2")
        for one in drafters:
            if not isinstance(one, Drafter):
                raise ValueError(f"drafters: {one!r} is none; give Drafter objects, or names as a+b to build_drafter")
        if len({id(drafter) for drafter in drafters}) < len(drafters):
            raise ValueError("drafters: one object stands there twice; each needs a state of its own")
        self.drafters = list(drafters)
        most = max(MOST_NODES, *(drafter.max_nodes for drafter in drafters))
        self.max_nodes = min(sum(drafter.max_nodes for drafter in drafters), most)
        self.max_depth = max(drafter.max_depth for drafter in drafters)

    @property
    def parts(self) -> Sequence[Drafter]:
        return self.drafters

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(drafter.needs for drafter in self.drafters))

    @property
    def learns_from(self) -> frozenset[str]:
        return frozenset().union(*(drafter.learns_from for drafter in self.drafters))

    @property
    def n_classes(self) -> int:
        return 2 * sum(drafter.n_classes for drafter in self.drafters)

    @property
    def class_stages(self) -> Sequence[int]:
        drafters = self.drafters
        if not any(map(_staged, drafters)):
            return [stage for drafter in drafters for stage in drafter.class_stages] * 2
        own = [drafter.class_stages if _staged(drafter) else [NO_STAGE] * drafter.n_classes for drafter in drafters]
        return [stage for stages in own for stage in stages] * 2

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        for drafter in self.drafters:
            drafter.on_start(slot, request, cache)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        for drafter in self.drafters:
            drafter.on_prefill(slot, prompt, start, end, output)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        for drafter in self.drafters:
            drafter.on_step(state, tree, accepted, output)

    def rewind(self, lengths_B: Tensor) -> None:
        for drafter in self.drafters:
            drafter.rewind(lengths_B)

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()

    def memory_bytes(self, batch: int, capacity: int) -> dict[str, int]:
        named: dict[str, int] = {}
        for drafter in self.drafters:
            for name, size in drafter.memory_bytes(batch, capacity).items():
                named[name] = named.get(name, 0) + size
        return named

    def decisions(self) -> Mapping[str, str]:
        return {name: words for drafter in self.drafters for name, words in drafter.decisions().items()}

    def advance(self, most: int) -> None:
        for drafter in self.drafters:
            drafter.advance(most)

    @property
    def draft_pass_budget(self) -> int | None:
        return next((one.draft_pass_budget for one in self.drafters if one.draft_pass_budget is not None), None)

    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        limits = [min(max_nodes, drafter.max_nodes) for drafter in self.drafters]
        found = self._look_up(state, limits)
        staged = not found or state.begins(_as_lists(self._unite(found, state.roots.tolist(), max_nodes)))
        trees, first_class = dict[int, TokenTree](), state.first_class
        for i, drafter in enumerate(self.drafters):
            if not isinstance(drafter, HostDrafter) and (staged or not _staged(drafter)):
                trees[i] = drafter.propose(replace(state, first_class=first_class), limits[i])
            first_class += drafter.n_classes
        looking = {i: one for i, one in enumerate(self.drafters) if isinstance(one, HostDrafter) and i not in found}
        # In one read: the roots, what the look-ups ask for, and the trees.
        asked = [one.asked(state) for one in looking.values()]
        unread = [x for tree in trees.values() for x in tree.unread]
        roots, *read = read_together(state.roots, *asked, *unread)
        rows, read, trunks = read[: len(asked)], read[len(asked) :], list[list[int]]()
        for i, tree in trees.items():
            count, trunk = len(tree.unread), self.drafters[i].trunk
            found[i] = tree.take_lists(read[:count]).lists
            read = read[count:]
            if trunk:
                trunks = [tokens[1 : 1 + trunk] for tokens in found[i].tokens]
        for (i, one), own in zip(looking.items(), rows, strict=True):
            found[i] = _as_lists(one.tries(state, own, limits[i], trunks if one.behind_trunk else ()))
        return as_tree(self._unite(found, roots, max_nodes), state.roots.device)

    def _look_up(self, state: SlotState, limits: Sequence[int]) -> dict[int, Lists]:
        """What the look-ups propose, by their places, before anything else does; empty where that decides nothing."""
        if not (state.asks_first and any(map(_staged, self.drafters))):
            return {}
        return {
            i: _as_lists(drafter.tries(state, drafter.asked(state).tolist(), limits[i]))
            for i, drafter in enumerate(self.drafters)
            if isinstance(drafter, HostDrafter) and not drafter.behind_trunk
        }

    def _unite(self, proposals: Mapping[int, Lists], roots: list[int], max_nodes: int) -> list[Trie]:
        """The tries of all nodes that were proposed, by their drafters' places, or their first `max_nodes`."""
        tries = []
        for slot, root in enumerate(roots):
            trie, first = Trie(root), 0
            turns = []
            for i, drafter in enumerate(self.drafters):
                if i in proposals:
                    tokens, parents, classes = proposals[i]
                    kinds = range(len(tokens[slot])) if classes is None else classes[slot]
                    turns.append(_give(trie, tokens[slot], parents[slot], kinds, first, self.n_classes // 2))
                first += drafter.n_classes
            _take_turns(trie, turns, max_nodes)
            tries.append(trie)
        return tries


def _staged(drafter: Drafter) -> bool:
    return max(drafter.class_stages) > 1


def _as_lists(tries: Sequence[Trie]) -> Lists:
    return Lists(*map(list, zip(*((one.tokens, one.parents, one.classes) for one in tries), strict=True)))


def _give(
    trie: Trie, tokens: Sequence[int], parents: Sequence[int], kinds: Sequence[int], first: int, both: int
) -> Iterator[object]:
    """Put a drafter's nodes into `trie`, one each time this is advanced; those that are there already come along.

    first: the first class of this drafter. both: what is added to a class where several drafters agree.
    """
    places = {0: 0}
    for node in range(1, len(tokens)):
        if parents[node] == PAD:
            continue
        above, token = places[parents[node]], tokens[node]
        place = trie.child(above, token)
        if place is None:
            places[node] = trie.add(above, token, first + kinds[node])
            yield
        else:
            places[node] = place
            # A class of 0 is another drafter's trunk, which this one has not proposed.
            if kinds[node] and trie.classes[place] < both:
                trie.classes[place] += both


def _take_turns(trie: Trie, turns: list[Iterator[None]], max_nodes: int) -> None:
    """Advance all in turn until nobody has more, or the trie has `max_nodes`."""
    while turns:
        for turn in list(turns):
            if len(trie) > max_nodes:
                return
            if next(turn, _NO_MORE) is _NO_MORE:
                turns.remove(turn)
