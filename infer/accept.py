"""Acceptance: which nodes of a tree the target's own choices confirm, and what the choice behind the last one is.

At each node the choice rule (infer/sampling.py) gives the target's token; the path goes down to the child that carries
it and stops where there is none. Nothing is accepted or rejected by chance, so the result is plain decoding's.
Shapes: B sequences, N tree nodes, P places of a path.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from longdraft.infer.tree import TokenTree
from longdraft.kernels.walk import walk, walk_along


@dataclass(frozen=True)
class AcceptResult:
    """What one pass decided.

    Attributes:
        nodes: int64 [B, P]; the nodes of the accepted path, the root first; valid up to counts[b].
        tokens: int64 [B, P]; the choice at each of these nodes; tokens[b, :counts[b]] are the newly committed tokens.
        counts: int64 [B]; nodes on the accepted path = new tokens; 0 for an inactive slot.
    """

    nodes: Tensor
    tokens: Tensor
    counts: Tensor

    def last(self, values_BP: Tensor) -> Tensor:
        """values_BP at the last node of each path: [B]; at the first one for inactive slots."""
        return values_BP.gather(1, (self.counts - 1).clamp(min=0)[:, None])[:, 0]


def accept(tree: TokenTree, choose: Callable[[Tensor, int], Tensor], active_B: Tensor, max_depth: int) -> AcceptResult:
    """Go down from the root along the target's choices, each made when the path gets there.

    Args:
        tree: the verified tree.
        choose: see `kernels.walk.walk_along`.
        active_B: bool [B]; other slots get count 0.
        max_depth: no node lies deeper.
    """
    return AcceptResult(*walk_along(choose, tree.tokens, tree.parents, active_B, max_depth))


def accept_chosen(tree: TokenTree, choices_BN: Tensor, active_B: Tensor, max_depth: int) -> AcceptResult:
    """The same where the choice at every node is known: choices_BN int64 [B, N]. On a GPU one launch."""
    return AcceptResult(*walk(tree.tokens, tree.parents, choices_BN, active_B, max_depth))
