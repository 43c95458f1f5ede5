"""LongSpec's drafter (arXiv 2502.17421, section 3): a beam of the draft block over the target's last-layer cache.

Pass l = 1, 2, ... runs the nodes of level l - 1 (the root first, at position p) as queries and proposes level l. Their
self-attention reads the draft's window and their ancestors, their cross-attention the target's committed keys, which
end at p - 1: the training's noise shift l. The draft's own keys and values depend on token and position alone, so
nothing is prefilled, and what was committed is read from the history, whoever proposed it.
Not here: the block (models/drafts/longspec.py), its passes and keys (infer/draft_passes.py).
Shapes: B slots, T queries of a pass, W nodes of a level, N rows of the tree so far, E draft vocabulary, D hidden.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.draft_passes import DraftPasses, draft_passes, passes_bytes
from longdraft.infer.drafters.base import DeviceDrafter, Request, SlotState
from longdraft.infer.options import check_draft, head_memory, level_widths
from longdraft.infer.tree import PAD, TokenTree
from longdraft.models.drafts.longspec import LongSpec, shape_of
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.target import Target

# The paper's first level has 4. More of them take no pass of the draft, and where the target's pass over a few nodes is
# nearly as cheap as over the root alone, they are most of what a draft brings.
WIDTHS = (8, 16, 16, 16, 16)
# Borders between the classes of a level, in nats: how far a node's log-probability lies below its parent's.
SURPRISE = (0.05, 0.2, 0.5, 1.0, 1.7, 2.5, 3.5, 5.0, 7.0)


class LongSpecDrafter(DeviceDrafter):
    """Beam without discarding: nodes that are not extended stay in the tree.

    A node's score is the sum of its path's log-probabilities, at T > 0 the log-softmax of logits / T + noise: the
    target's choice is the argmax of its own such sum with the same noise, and where the draft's differs from it by
    independent Gumbel errors, the softmax is each token's chance of being the choice.

    Args:
        target: the loaded target (models/target.py).
        draft: a trained block, in the target's dtype and on its device.
        widths: nodes of each level; ones alone make a chain. With a lower `max_nodes`, levels shrink alike.
    """

    def __init__(self, target: Target, draft: LongSpec, widths: Sequence[int] | int = WIDTHS):
        self.widths = level_widths("widths", widths)
        _check(target, draft, self.widths)
        self.draft, self._target = draft, target.model
        self._head_ED = draft.head(target.model.lm_head.weight)
        self.max_nodes, self.max_depth = sum(self.widths), len(self.widths)
        self._tree_rows = 1 + sum(self.widths[:-1])  # the last level's nodes are never queries
        self._borders = torch.tensor(SURPRISE, device=self._head_ED.device)
        self._passes: DraftPasses | None = None

    @property
    def n_classes(self) -> int:
        return 1 + self.max_depth * (len(SURPRISE) + 1)

    @property
    def class_stages(self) -> Sequence[int]:
        return [0, *(level for level in range(1, 1 + self.max_depth) for _ in range(len(SURPRISE) + 1))]

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if self._passes is None or self._passes.cache is not cache:
            self._passes = draft_passes(self.draft, self._target, self._head_ED, cache, self._tree_rows)
        self._passes.start(slots, max(len(request.prompt) for request in requests))

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._passes is not None
        self._passes.on_step(accepted.nodes.shape[1])

    def rewind(self, lengths_B: Tensor) -> None:
        assert self._passes is not None
        self._passes.rewind()

    def buffers(self) -> tuple[object, ...]:
        return (self._passes,)

    def release(self) -> None:
        self._passes = None

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        window = passes_bytes(self.draft, self._head_ED, batch, capacity, self._tree_rows)
        return {"draft window": window} | head_memory(self.draft, self._head_ED)

    def plan(self, state: SlotState, max_nodes: int) -> tuple[int, ...]:
        """How many positions before the roots are to be read, at most, and the widths of the levels."""
        assert self._passes is not None
        widths = _fit(self.widths, max_nodes)
        widths = widths[: state.stages(len(widths))]
        self.num_query_tokens = max(widths, default=1)
        return self._passes.plan(state, len(widths)), *widths

    def grow(self, state: SlotState, plan: tuple[int, ...]) -> TokenTree:
        count, *widths = plan
        assert self._passes is not None
        self._passes.begin(state, count, len(widths))
        nodes_BT, n_before, tree = state.roots[:, None], 0, TokenTree.roots(state.roots)
        tree = replace(tree, classes=torch.zeros_like(nodes_BT))
        # What an inactive slot's nodes inherit: they are all padding.
        scores_BT = torch.zeros(nodes_BT.shape, device=nodes_BT.device).masked_fill_(~state.active[:, None], -torch.inf)
        ancestors_BTN = torch.ones_like(nodes_BT, dtype=torch.bool)[:, :, None]  # rows of the tree open to each query
        for level, width in enumerate(widths, start=1):
            logits_BTE = self._passes.logits(state, nodes_BT, level, ancestors_BTN)
            chosen_BW, above_BW, scores_BW, classes_BW = self._extend(state, logits_BTE, scores_BT, level, width)
            parents_BW = (above_BW + n_before).masked_fill_(scores_BW.isneginf(), PAD)
            tree = TokenTree(
                torch.cat((tree.tokens, chosen_BW), 1),
                torch.cat((tree.parents, parents_BW), 1),
                torch.cat((tree.classes, classes_BW), 1),
            )
            if level == len(widths) or not state.goes_on(tree):
                break
            own_WW = torch.eye(chosen_BW.shape[1], dtype=torch.bool, device=chosen_BW.device)
            rows_BWN = ancestors_BTN.gather(1, above_BW[:, :, None].expand(-1, -1, ancestors_BTN.shape[2]))
            ancestors_BTN = torch.cat([rows_BWN, own_WW.expand(len(rows_BWN), -1, -1)], dim=2)
            n_before += nodes_BT.shape[1]
            nodes_BT, scores_BT = chosen_BW, scores_BW
        return tree

    def _extend(
        self, state: SlotState, logits_BTE: Tensor, scores_BT: Tensor, level: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The `width` best children of all nodes: tokens, index of the parent among the nodes, scores (fp32), classes.

        A node's children carry different tokens, for a row's largest scores are of different ones.
        """
        count = min(width, logits_BTE.shape[-1])
        log_probs_BTC, ids_BTC = state.best(logits_BTE, level, count, self.draft.token_ids)
        sums_BW, log_probs_BW, ids_BW = (
            part.flatten(1) for part in (scores_BT[:, :, None] + log_probs_BTC, log_probs_BTC, ids_BTC)
        )
        above_BW = torch.zeros_like(ids_BW)
        if logits_BTE.shape[1] > 1:  # else they are in order already
            sums_BW, places_BW = sums_BW.topk(min(width, sums_BW.shape[1]), dim=-1)
            log_probs_BW, ids_BW, above_BW = log_probs_BW.gather(1, places_BW), ids_BW.gather(1, places_BW), places_BW // count
        classes_BW = torch.bucketize(-log_probs_BW, self._borders) + (1 + (level - 1) * (len(SURPRISE) + 1))
        return self.draft.tokens(ids_BW), above_BW, sums_BW, classes_BW


def _fit(widths: Sequence[int], max_nodes: int) -> list[int]:
    """The widths of at most `max_nodes` nodes: all levels narrower alike, at least one node each, the deepest left out
    last."""
    if sum(widths) <= max_nodes:
        return list(widths)
    widths = list(widths)[:max_nodes]
    if not widths:
        return []
    narrow = [max(1, width * max_nodes // sum(widths)) for width in widths]
    while sum(narrow) > max_nodes:
        narrow[narrow.index(max(narrow))] -= 1
    for level, width in enumerate(widths):  # what rounding left over goes to the first levels
        narrow[level] += max(0, min(width - narrow[level], max_nodes - sum(narrow)))
    return narrow


def _check(target: Target, draft: LongSpec, widths: tuple[int, ...]) -> None:
    """That the draft is this target's and the widths a tree."""
    check_draft("longspec", target, draft, LongSpec, "a LongSpec block")
    config = draft.config
    if len(widths) > config.window:
        raise ValueError(f"widths: {len(widths)} levels, but the draft's window has {config.window} rows; give fewer")
    different = [name for name, own in shape_of(target.model.config).items() if getattr(config, name) != own]
    if different:
        one = different[0]
        raise ValueError(
            f"draft: made for a target with {one} {getattr(config, one)}, and this one has "
            f"{getattr(target.model.config, one)}; load the draft's own target"
        )
    if len(widths) > config.noise:
        warnings.warn(
            f"longspec: a tree of {len(widths)} levels, but the draft was trained with noise shifts up to "
            f"{config.noise}; deeper levels guess worse. Give at most {config.noise} widths.",
            stacklevel=3,
        )
