"""Plain decoding: the drafter that proposes only the root. The baseline runs in the same loop as every method."""

from longdraft.infer.drafters.base import Drafter, SlotState
from longdraft.infer.tree import TokenTree


class Plain(Drafter):
    """Proposes nothing; a step is one target pass of one row and emits one token."""

    max_nodes = 0
    max_depth = 0

    def propose(self, state: SlotState, max_nodes: int) -> TokenTree:
        return TokenTree.roots(state.roots)
