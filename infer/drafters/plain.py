"""Plain decoding: the drafter that proposes only the root. The baseline runs in the same loop as every method."""

from longdraft.infer.drafters.base import SlotState
from longdraft.infer.tree import TokenTree


class Plain:
    """Proposes nothing; a step is one target pass of one row and emits one token."""

    needs = frozenset()
    max_nodes = 0
    max_depth = 0

    def begin(self, slots, requests, cache):
        pass

    def read(self, slots, tokens_BT, output):
        pass

    def propose(self, state: SlotState, room: int) -> TokenTree:
        return TokenTree.roots(state.roots)

    def observe(self, tree, verdict, output):
        pass
