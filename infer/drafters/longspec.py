"""LongSpec's drafter (arXiv 2502.17421, section 3): a beam of the draft block over the target's last-layer cache.

Pass l = 1, 2, ... runs the nodes of level l - 1 (the root first, at position p) as queries and proposes level l. Their
self-attention reads the draft's window and their ancestors, their cross-attention the target's committed keys, which
end at p - 1: the training's noise shift l. The draft's own keys and values depend on token and position alone, so
nothing is prefilled, and what was committed is read from the history, whoever proposed it.
Not here: the block (models/drafts/longspec.py), its cache (infer/window_cache.py).
Shapes: B slots, T queries of a pass, W nodes of a level, N rows of the tree so far, V (draft) vocabulary, D hidden.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters.base import DeviceDrafter, Request, SlotState
from longdraft.infer.options import check_draft, head_memory, level_widths
from longdraft.infer.tree import PAD, ROOT, TokenTree
from longdraft.infer.window_cache import WindowCache
from longdraft.kernels.cross_attention import cross_attention
from longdraft.kernels.linear import linear
from longdraft.models.drafts.longspec import LongSpec, shape_of
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.target import Target

WIDTHS = (4, 16, 16, 16, 16)
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
        self.draft, self._embed = draft, target.model.embed_tokens
        self._head_VD = draft.head(target.model.lm_head.weight)
        self.max_nodes, self.max_depth = sum(self.widths), len(self.widths)
        self._tree_rows = 1 + sum(self.widths[:-1])  # the last level's nodes are never queries
        self._borders = torch.tensor(SURPRISE, device=self._head_VD.device)
        self._window: WindowCache | None = None
        self._cache: KVCache | None = None

    @property
    def n_classes(self) -> int:
        return 1 + self.max_depth * (len(SURPRISE) + 1)

    @property
    def class_stages(self) -> Sequence[int]:
        return [0, *(level for level in range(1, 1 + self.max_depth) for _ in range(len(SURPRISE) + 1))]

    def on_start(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        self._cache = cache
        if self._window is None or self._window.batch != cache.batch:
            self._window = WindowCache(self.draft, cache.batch, self._tree_rows)
            self._unknown = 0  # no slot's ring lacks more of the positions before its root
        self._window.start(slots)
        longest = max(len(request.prompt) for request in requests)
        self._unknown = min(max(self._unknown, longest), self._window.ring)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._window is not None
        self._unknown = min(self._unknown + accepted.nodes.shape[1], self._window.ring)

    def rewind(self, lengths_B: Tensor) -> None:
        assert self._window is not None
        # Beyond the slack, older positions that are in the window again have been overwritten: all of it is read again.
        self._unknown = self._window.ring

    def buffers(self) -> tuple[object, ...]:
        return self._window, self._cache

    def release(self) -> None:
        self._cache = self._window = None

    def memory_bytes(self, batch: int, capacity: int) -> Mapping[str, int]:
        window = {"draft window": WindowCache.bytes(self.draft, batch, self._tree_rows)}
        return window | head_memory(self.draft, self._head_VD)

    def plan(self, state: SlotState, max_nodes: int) -> tuple[int, ...]:
        """How many positions before the roots are to be read, at most, and the widths of the levels."""
        assert self._window is not None
        count, self._unknown = min(state.rounded(self._unknown), self._window.ring), 0
        widths = _fit(self.widths, max_nodes)
        widths = widths[: state.stages(len(widths))]
        self.num_query_tokens = max(widths, default=1)
        return count, *widths

    def grow(self, state: SlotState, plan: tuple[int, ...]) -> TokenTree:
        count, *widths = plan
        self._catch_up(state, count)
        nodes_BT = state.roots[:, None]
        scores_BT = torch.zeros_like(nodes_BT, dtype=torch.float32)
        ancestors_BTN = torch.ones_like(nodes_BT, dtype=torch.bool)[:, :, None]  # rows of the tree open to each query
        tokens, parents = [nodes_BT], [torch.full_like(nodes_BT, ROOT)]
        classes, first, tree = [torch.zeros_like(nodes_BT)], 0, TokenTree.roots(state.roots)
        for level, width in enumerate(widths, start=1):
            logits_BTV = self._pass(state, nodes_BT, level, first, ancestors_BTN)
            chosen_BW, parents_BW, lasting_BW, class_BW = self._extend(state, logits_BTV, scores_BT, level, width)
            dead_BW = lasting_BW.isneginf() | ~state.active[:, None]
            tokens.append(chosen_BW)
            parents.append((parents_BW + first).masked_fill(dead_BW, PAD))
            classes.append(class_BW)
            first += nodes_BT.shape[1]
            above_BWN = ancestors_BTN.gather(1, parents_BW[:, :, None].expand(-1, -1, ancestors_BTN.shape[2]))
            own_WW = torch.eye(chosen_BW.shape[1], dtype=torch.bool, device=chosen_BW.device)
            ancestors_BTN = torch.cat([above_BWN, own_WW.expand(len(above_BWN), -1, -1)], dim=2)
            nodes_BT, scores_BT = chosen_BW, lasting_BW
            tree = TokenTree(*(torch.cat(part, dim=1) for part in (tokens, parents, classes)))
            if level < len(widths) and not state.goes_on(tree):
                break
        return tree

    def _catch_up(self, state: SlotState, count: int) -> None:
        """Keys and values of what was committed since the last time, up to the root, by one projection.

        The root's own come with its query. Slots that have less to write write some positions again, or position 0.
        """
        window, ends_B = self._window, state.positions
        assert window is not None
        if count:
            tokens_BT = state.history.read(ends_B - count, count)
            positions_BT = (ends_B[:, None] + torch.arange(-count, 0, device=ends_B.device)).clamp(min=0)
            tables = self.draft.tables(positions_BT, state.history.prompt_lengths)
            window.write(positions_BT, *self.draft.self_kv(self._embed(tokens_BT), tables))

    def _pass(self, state: SlotState, nodes_BT: Tensor, level: int, first: int, ancestors_BTN: Tensor) -> Tensor:
        """Logits of the nodes of level - 1, which become tree rows from `first` on: [B, T, V]."""
        cache, window = self._cache, self._window
        assert cache is not None and window is not None
        here_B = state.positions + level - 1
        ring_BR = window.open_rows(here_B, state.positions)

        def attend_self(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            window.write_tree(first, k_BTKd, v_BTKd)
            return window.attend(q_BTHd, ring_BR, ancestors_BTN)

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            return cross_attention(q_BTHd, cache.keys[-1], cache.values[-1], cache.lengths)

        tables = self.draft.tables(here_B[:, None].expand_as(nodes_BT), state.history.prompt_lengths)
        hidden_BTD = self.draft.block(self._embed(nodes_BT), tables, attend_self, attend_cross)
        return linear(hidden_BTD, self._head_VD)

    def _extend(
        self, state: SlotState, logits_BTV: Tensor, scores_BT: Tensor, level: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The `width` best children of all nodes: tokens, index of the parent among the nodes, scores (fp32), classes.

        A node's children carry different tokens, for a row's largest scores are of different ones.
        """
        ranked_BTV = state.ranking(logits_BTV, level, self.draft.token_ids).float()
        best_BTC, ids_BTC = ranked_BTV.topk(min(width, ranked_BTV.shape[-1]), dim=-1)
        log_probs_BTC = best_BTC - ranked_BTV.logsumexp(-1, keepdim=True)
        log_probs_BTC.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)  # where everything is banned
        flat_BC = (scores_BT[:, :, None] + log_probs_BTC).flatten(1)
        sums_BW, places_BW = flat_BC.topk(min(width, flat_BC.shape[1]), dim=-1)
        tokens_BW = self.draft.tokens(ids_BTC.flatten(1).gather(1, places_BW))
        surprise_BW = -log_probs_BTC.flatten(1).gather(1, places_BW)
        classes_BW = 1 + (level - 1) * (len(SURPRISE) + 1) + torch.bucketize(surprise_BW, self._borders)
        return tokens_BW, places_BW // best_BTC.shape[2], sums_BW, classes_BW


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
