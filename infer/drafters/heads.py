"""Heads on the target's hidden state fill a static tree: Medusa-1's drafter (arXiv 2401.10774), and the base of
TokenSwift's.

The heads read the state that the target's last pass computed just before the root: at position p - 1 for a root at p.
So head i proposes the token at p + i. The heads themselves are in models/drafts/.
Shapes: B slots, T tokens of a chunk, N tree nodes, D hidden, E draft vocabulary, I levels, K ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import DeviceDrafter, Levels, Request, check_draft
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree, TreeShape
from longdraft.models.drafts.heads import Heads
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# The ranks on each level of a full tree, or the tree itself.
Shape = Instance[TreeShape] | Levels


class HeadsDrafter(DeviceDrafter):
    """Ranks every head's tokens, with the step's noise at T > 0, and places them in a static tree.

    Args:
        target: the loaded target (models/target.py).
        draft: trained heads, in the target's dtype and on its device.
        shape: which rank combinations are nodes, or the number of ranks in each level of a full Cartesian tree; None
            means 3 ranks for each head. A lower `max_nodes` keeps only its first nodes.

    Attributes:
        hidden_BD: each slot's state at the last committed position before its root; zeros if there is none.
    """

    hidden_BD: Tensor

    @validated
    def __init__(self, target: Instance[Target], draft: Instance[Heads], shape: Shape | None = None):
        check_draft(target, draft, {"hidden_size": target.model.config.hidden_size})
        self.draft, self._head = draft, draft.lm_head(target.model)
        n_heads = draft.config.n_heads
        shape = shape if isinstance(shape, TreeShape) else TreeShape.cartesian(shape or (3,) * n_heads)
        # Drop ranks that a small draft vocabulary does not have.
        self.shape = TreeShape(tuple(node for node in shape.nodes if max(node) < self._head.n_tokens))
        self.max_nodes, self.max_depth = len(self.shape.nodes), self.shape.depth
        if self.max_depth > n_heads:
            raise ValueError(f"shape: {self.max_depth} levels, more than the draft has heads; give at most {n_heads}")
        self.learns_from = frozenset({draft.reads})
        self.hidden_BD = torch.empty(0)

    @property
    def needs(self) -> frozenset[str]:
        return self.learns_from

    def state_of(self, output: TargetOutput) -> Tensor | None:
        """The target's state that the heads read, [B, T, D]; None if the output does not have it."""
        return getattr(output, self.draft.reads)

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if len(self.hidden_BD) != cache.batch:
            self.hidden_BD = self._head.weight.new_zeros(cache.batch, self._head.in_features)
        self.hidden_BD[slot].zero_()

    def buffers(self) -> tuple[object, ...]:
        return (self.hidden_BD,)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        hidden_1TD = self.state_of(output)
        if hidden_1TD is not None:
            self.hidden_BD[slot].copy_(hidden_1TD[0, -1])

    def grow(self, state: SlotState, budget: Budget, plan: int) -> TokenTree:
        """The tree of the heads' best tokens."""
        some, shape = state.leading(), self.shape.first(plan)
        ranked_BIK = self.ranked(some, self.hidden_BD[: len(some.roots)], shape)
        return shape.fill(some.roots, ranked_BIK).with_roots(state.roots)

    def ranked(self, state: SlotState, hidden_BD: Tensor, shape: TreeShape, first: int = 1) -> Tensor:
        """int64 [B, I, K]: the best tokens of levels `first`, first + 1, ..., which heads 1, 2, ... propose."""
        states_BID = torch.stack(self.draft.states(hidden_BD)[: shape.depth + 1 - first], dim=1)
        logits_of_heads = self._head(states_BID).split(1, dim=1)
        places_BIK = [
            state.best(logits_B1E, level, shape.ranks, self.draft.token_ids)[1]
            for level, logits_B1E in enumerate(logits_of_heads, first)
        ]
        return self.draft.tokens(torch.cat(places_BIK, dim=1))

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        """Keep the state at the last accepted node, in place."""
        hidden_BND = self.state_of(output)
        assert hidden_BND is not None
        nodes_B, took_part_B = accepted.last(accepted.nodes), accepted.counts > 0
        last_BD = hidden_BND[torch.arange(len(nodes_B), device=nodes_B.device), nodes_B].to(self.hidden_BD.dtype)
        self.hidden_BD.copy_(torch.where(took_part_B[:, None], last_BD, self.hidden_BD))
