"""Medusa-1's drafter (arXiv 2401.10774): independent heads on the target's last hidden state fill a static tree.

The heads read the post-norm state of the position before the root, whose choice the root is, so head i proposes the
token at p + i for a root at p. Not here: the heads (models/drafts/medusa.py).
Shapes: B slots, T rows of a prefill chunk, D hidden, V vocabulary, E draft vocabulary, I heads, N
nodes.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters.base import DeviceDrafter, Request, SlotState
from longdraft.infer.last_state import LastState
from longdraft.infer.options import check_heads, head_memory, heads_shape
from longdraft.infer.shape import TreeShape, TreeTemplate
from longdraft.infer.tree import TokenTree
from longdraft.kernels.linear import linear
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
        self._head_ED = draft.head(target.model.lm_head.weight)
        self.shape, self.draft = heads_shape("shape", shape, draft.config.n_heads, len(self._head_ED)), draft
        self.needs = self.learns_from = draft.needs
        self.max_nodes, self.max_depth = len(self.shape.nodes), self.shape.depth
        self._last: LastState | None = None
        self._templates: dict[int, tuple[TreeShape, TreeTemplate]] = {}

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if self._last is None or self._last.batch != cache.batch:
            weight = self._head_ED
            self._last = LastState(cache.batch, weight.shape[1], weight.dtype, weight.device)
            self._templates.clear()
        self._last.on_start(slots)

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        return head_memory(self.draft, self._head_ED)

    def buffers(self) -> tuple[object, ...]:
        return (self._last,)

    def on_prefill(self, slots: Sequence[int], tokens_BT: Tensor, output: TargetOutput) -> None:
        assert self._last is not None and output.post_norm is not None
        self._last.on_prefill(slots, output.post_norm)

    def on_taken_over(self, slots: Sequence[int], tokens_BT: Tensor) -> None:
        assert self._last is not None
        self._last.on_taken_over(slots, tokens_BT.shape[1])

    def update(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._last is not None and output.post_norm is not None
        self._last.update(state, accepted, output.post_norm)

    def rewind(self, lengths_B: Tensor) -> None:
        assert self._last is not None
        self._last.rewind(lengths_B)

    def grow(self, state: SlotState, plan: int) -> TokenTree:
        """The tree of the heads' best tokens."""
        assert self._last is not None
        shape, template = self._fitting(min(plan, self.max_nodes), self._last.at_B)
        states_BID = torch.stack(self.draft.states(self._last.hidden_BD)[: shape.depth], dim=1)
        logits, ids_E = linear(states_BID, self._head_ED).split(1, dim=1), self.draft.token_ids
        ranked = [state.best(logits_B1E, i + 1, shape.ranks, ids_E)[1] for i, logits_B1E in enumerate(logits)]
        tokens_BIK = self.draft.tokens(torch.cat(ranked, dim=1))
        return self._last.known_only(template.fill(state.roots, tokens_BIK), state)

    def _fitting(self, nodes: int, like_B: Tensor) -> tuple[TreeShape, TreeTemplate]:
        """The first nodes of the shape, on the device; made once for each number."""
        if nodes not in self._templates:
            shape = TreeShape(self.shape.nodes[:nodes])
            self._templates[nodes] = shape, TreeTemplate(shape, len(like_B), like_B.device)
        return self._templates[nodes]
