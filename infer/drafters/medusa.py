"""Medusa-1's drafter (arXiv 2401.10774): independent heads on the target's last hidden state fill a static tree.

The heads read the post-norm state of the position before the root, whose choice the root is, so head i proposes the
token at p + i for a root at p. Not here: the heads (models/drafts/medusa.py).
Shapes: B slots, T rows of a prefill chunk, D hidden, V vocabulary, I heads, N nodes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters.base import DeviceDrafter, Request, SlotState
from longdraft.infer.options import check_heads, heads_shape
from longdraft.infer.shape import TreeShape, TreeTemplate
from longdraft.infer.tree import PAD, TokenTree
from longdraft.kernels.transfer import integers
from longdraft.models.drafts.medusa import Medusa
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.target import Target


class MedusaDrafter(DeviceDrafter):
    """Ranks every head's tokens, with the step's noise at T > 0, and places them in a static tree.

    Args:
        target: the loaded target (models/target.py).
        draft: trained heads, in the target's dtype and on its device.
        shape: which rank combinations are nodes, or the ranks of each level of a full Cartesian tree; None is that of
            3 ranks a head. With a lower `max_nodes`, its first nodes.
    """

    def __init__(self, target: Target, draft: Medusa, shape: TreeShape | Sequence[int] | int | None = None):
        check_heads("medusa", target, draft, Medusa, "Medusa heads")
        self.shape = heads_shape("shape", shape, draft.config.n_heads, target.model.config.vocab_size)
        self.draft, self._lm_head = draft, target.model.lm_head
        self.needs = self.learns_from = draft.needs
        self.max_nodes, self.max_depth = len(self.shape.nodes), self.shape.depth
        self._hidden_BD = torch.empty(0)
        self._templates: dict[int, tuple[TreeShape, TreeTemplate]] = {}

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if len(self._hidden_BD) != cache.batch:
            weight = self._lm_head.weight
            self._hidden_BD = weight.new_zeros(cache.batch, weight.shape[1])
            # Which position's state it is; -1 for none.
            self._at_B = torch.full((cache.batch,), -1, dtype=torch.int64, device=weight.device)
            self._templates.clear()
        self._at_B.index_fill_(0, integers(slots, self._at_B.device), -1)

    def buffers(self) -> tuple[object, ...]:
        return self._hidden_BD, self._at_B

    def on_prefill(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        assert output.post_norm is not None
        where = integers(slots, self._at_B.device)
        self._hidden_BD[where] = output.post_norm[:, -1]
        self._at_B[where] += tokens_BT.shape[1]

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert output.post_norm is not None
        last_B, took_part_B = accepted.last(accepted.nodes), accepted.counts > 0
        last_BD = output.post_norm[torch.arange(len(last_B), device=last_B.device), last_B]
        self._hidden_BD.copy_(torch.where(took_part_B[:, None], last_BD, self._hidden_BD))
        self._at_B.copy_(torch.where(took_part_B, state.positions - 1, self._at_B))

    def rewind(self, lengths_B: Tensor) -> None:
        self._at_B.masked_fill_(self._at_B >= lengths_B, -1)

    def grow(self, state: SlotState, plan: int) -> TokenTree:
        """The tree of the heads' best tokens."""
        shape, template = self._fitting(min(plan, self.max_nodes))
        logits_BIV = self._lm_head(torch.stack(self.draft.states(self._hidden_BD)[: shape.depth], dim=1))
        ranked = [
            state.ranking(logits_BIV[:, i], offset=i + 1).topk(shape.ranks, dim=-1).indices for i in range(shape.depth)
        ]
        tree = template.fill(state.roots, torch.stack(ranked, dim=1))
        # The state before the root is unknown after a prompt of one token, or where an outer engine took tokens back.
        known_B = (self._at_B >= 0) & (self._at_B == state.positions - 1) & state.active
        return tree.with_tokens(tree.tokens, tree.parents.masked_fill(~known_B[:, None] & (tree.parents >= 0), PAD))

    def _fitting(self, nodes: int) -> tuple[TreeShape, TreeTemplate]:
        """The first nodes of the shape, on the device; made once for each number."""
        if nodes not in self._templates:
            shape = TreeShape(self.shape.nodes[:nodes])
            self._templates[nodes] = shape, shape.template(len(self._hidden_BD), self._hidden_BD.device)
        return self._templates[nodes]
