"""TokenSwift's drafter without a draft pass: chained heads on the target's own hidden state fill a static tree.

The heads read the state that the last verification computed at the node whose choice the root is (position p - 1 for a
root at p), so head i proposes the token at p + i: levels [3, 3, 3] under the root (TokenSwift, section 3; the base
row's own proposal is already decided). Not here: the heads (models/drafts/tokenswift.py).
Shapes: B slots, D hidden, V vocabulary, K top ranks, I heads, N nodes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.drafters.base import SlotState
from longdraft.infer.shape import TreeShape
from longdraft.infer.tree import PAD, TokenTree
from longdraft.models.drafts.tokenswift import TokenSwift


class TokenSwiftDrafter:
    """Ranks every head's tokens (with the step's noise at T > 0) and fills a static tree with them.

    Args:
        target: the loaded target (models/hf.py).
        draft: trained heads.
        shape: which rank combinations are nodes; None is the full Cartesian tree of 3 ranks a head.
    """

    def __init__(self, target, draft: TokenSwift, shape: TreeShape | None = None):
        self.shape = shape or TreeShape.cartesian((3,) * draft.config.n_heads)
        if not self.shape.nodes:
            raise ValueError("tree: it needs at least one node below the root; for none, use the plain drafter")
        if self.shape.depth > draft.config.n_heads:
            raise ValueError(
                f"tree: {self.shape.depth} levels, but this draft has {draft.config.n_heads} heads, one a level"
            )
        weight, own = target.model.lm_head.weight, next(draft.parameters())
        if (own.dtype, own.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"draft: {own.dtype} on {own.device}, but the target is {weight.dtype} on {weight.device}; "
                f"load it with load_draft(folder, target)"
            )
        if draft.config.hidden_size != weight.shape[1]:
            raise ValueError(
                f"draft: made for a hidden size of {draft.config.hidden_size}, and this target's is {weight.shape[1]}"
            )
        self.draft, self.lm_head = draft, target.model.lm_head
        self.needs = draft.needs
        (self._state_field,) = draft.needs
        self.max_nodes, self.max_depth = len(self.shape.nodes), self.shape.depth
        self._known = self._hidden = torch.empty(0)

    def begin(self, slots: Sequence[int], requests, cache) -> None:
        batch = cache.batch
        if self._hidden.shape[0] != batch:
            weight = next(self.draft.parameters())
            self._hidden = torch.zeros(batch, self.draft.config.hidden_size, dtype=weight.dtype, device=weight.device)
            self._known = torch.zeros(batch, dtype=torch.bool, device=weight.device)
            self._template = self.shape.template(batch, weight.device)
        # A prompt of one token has no position before the root: nothing is proposed in its first step.
        self._known[list(slots)] = False

    def read(self, slots: Sequence[int], tokens_BT: Tensor, output) -> None:
        self._hidden[list(slots)] = getattr(output, self._state_field)[:, -1].to(self._hidden.dtype)
        self._known[list(slots)] = True

    @torch.no_grad()
    def propose(self, state: SlotState, room: int) -> TokenTree:
        if room < self.max_nodes:
            raise ValueError(f"tree: its {self.max_nodes} nodes exceed the step's room of {room}")
        states = self.draft.states(self._hidden)[: self.max_depth]
        logits_BIV = self.lm_head(torch.stack(states, dim=1))
        ranked = [
            state.ranking(logits_BIV[:, i], offset=i + 1).topk(self.shape.ranks, dim=-1).indices
            for i in range(self.max_depth)
        ]
        tokens = self._template.fill(state.roots, torch.stack(ranked, dim=1))
        if self._known.device.type == "cpu" and self._known.all():
            return tokens
        parents = tokens.parents.masked_fill(~self._known[:, None] & (tokens.parents >= 0), PAD)
        return tokens.with_tokens(tokens.tokens, parents)

    def observe(self, tree: TokenTree, verdict, output) -> None:
        hidden_BND = getattr(output, self._state_field)
        rows_B = verdict.last(verdict.rows)
        last_BD = hidden_BND[torch.arange(len(rows_B), device=rows_B.device), rows_B]
        self._hidden = last_BD.to(self._hidden.dtype)
        self._known = self._known | (verdict.counts > 0)
