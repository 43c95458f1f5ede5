"""Plain decoding: a drafter that proposes only the root, so that the baseline runs in the same loop as every method."""

from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree


class Plain(Drafter):
    """Proposes nothing: a step is one pass of the target over one token, and commits one token."""

    max_nodes = 0
    max_depth = 0

    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        return TokenTree.roots(state.roots)
