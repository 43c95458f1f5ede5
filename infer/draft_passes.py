"""LongSpec's block while it drafts: its own keys and values, and the pass of one level of a tree.

`draft_passes` says which way is taken: one call of C where the C kernels compute the block, PyTorch's operations
elsewhere. On a CPU drafting one level of SmolLM2's block takes 2.1 ms in C and 3.1 by operations, of steps of 15.3 and
16.3 (docs/LOG.md). Not here: which tokens a level proposes (infer/drafters/longspec.py), the ring of keys
(infer/window_cache.py). Shapes: B slots, T queries of a level, N rows of the tree so far, E draft vocabulary, C tokens
to catch up with, d head width.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longdraft.infer.slot_state import SlotState
from longdraft.infer.window_cache import WindowCache, window_of
from longdraft.kernels.cpu_impl import draft_block
from longdraft.kernels.cross_attention import cross_attention
from longdraft.kernels.linear import linear
from longdraft.models.decoder import Decoder
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.kv_cache import KVCache


class DraftPasses(Protocol):
    """What a proposal asks of the block, for the slots of one cache of the target.

    Attributes:
        cache: the target's. most: so many positions before the root are read at most.
        keeps_roots: whether the keys of a root that was a query are known from then on.
    """

    cache: KVCache
    most: int
    keeps_roots: bool

    def start(self, slots: Sequence[int]) -> None:
        """These slots' next tokens are of other sequences."""

    def begin(self, state: SlotState, count: int, n_levels: int) -> None:
        """A proposal of at most so many levels begins; the last `count` tokens before the roots are not known yet."""

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        """[B, T, E] of the nodes of `level` - 1, at position p + level - 1 behind a root at p.

        ancestors_BTN: bool, which of the tree's rows so far, these nodes' own the last ones, each of them reads.
        """
        ...


def draft_passes(draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int) -> DraftPasses:
    """The way for this draft here. tree_rows: the most rows of a tree that are ever queries."""
    weights = _weights(draft, head_ED)
    if draft_block.can_run(weights, draft.config.head_dim):
        return _InC(draft, target, weights, cache, tree_rows)
    return _ByOperations(draft, target, head_ED, cache, tree_rows)


def passes_bytes(draft: LongSpec, head_ED: Tensor, batch: int, capacity: int, tree_rows: int) -> int:
    """What `draft_passes` allocates for a target's cache of so many slots and positions."""
    if draft_block.can_run(_weights(draft, head_ED), draft.config.head_dim):
        row = 2 * draft.config.n_kv_heads * draft.config.head_dim * head_ED.element_size()
        return batch * (capacity + tree_rows) * row
    return WindowCache.bytes(draft, batch, tree_rows)


def _weights(draft: LongSpec, head_ED: Tensor) -> draft_block.BlockWeights:
    return draft_block.BlockWeights(
        draft.self_norm.weight, draft.self_qkv.weight, draft.self_qkv.bias, draft.self_o.weight,
        draft.cross_norm.weight, draft.cross_q.weight, draft.cross_q.bias, draft.cross_o.weight,
        draft.mlp_norm.weight, draft.gate_up.weight, draft.down.weight,
        None if draft.final_norm is None else draft.final_norm.weight, head_ED,
    )  # fmt: skip


def _before(state: SlotState, count: int) -> Tensor:
    """The last `count` positions before each root, int64 [B, count]; position 0 again where there are fewer."""
    return (state.positions[:, None] + torch.arange(-count, 0, device=state.positions.device)).clamp(min=0)


class _ByOperations:
    """By PyTorch's operations, over a ring of the window's keys and values."""

    keeps_roots = False  # a tree's rows lie apart from the ring

    def __init__(self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int):
        self.draft, self.cache, self._embed, self._head_ED = draft, cache, target.embed_tokens, head_ED
        self._window = WindowCache(draft, cache.batch, tree_rows)
        # Where positions were taken back, older ones that are in the window again may have been overwritten.
        self.most = self._window.ring

    def start(self, slots: Sequence[int]) -> None:
        self._window.start(slots)

    def begin(self, state: SlotState, count: int, n_levels: int) -> None:
        if count:
            tokens_BC, places_BC = state.history.read(state.positions - count, count), _before(state, count)
            tables = self.draft.tables(places_BC, state.history.prompt_lengths)
            self._window.write(places_BC, *self.draft.self_kv(self._embed(tokens_BC), tables))

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        window, cache, first = self._window, self.cache, ancestors_BTN.shape[2] - nodes_BT.shape[1]
        here_B = state.positions + level - 1
        ring_BR = window.open_rows(here_B, state.positions)

        def attend_self(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            window.write_tree(first, k_BTKd, v_BTKd)
            return window.attend(q_BTHd, ring_BR, ancestors_BTN)

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            return cross_attention(q_BTHd, cache.keys[-1], cache.values[-1], cache.lengths)

        tables = self.draft.tables(here_B[:, None].expand_as(nodes_BT), state.history.prompt_lengths)
        hidden_BTD = self.draft.block(self._embed(nodes_BT), tables, attend_self, attend_cross)
        return linear(hidden_BTD, self._head_ED)


class _InC:
    """By one call of C a level, over a cache with a row for every position; those before the window are never read."""

    keeps_roots = True

    def __init__(
        self, draft: LongSpec, target: Decoder, weights: draft_block.BlockWeights, cache: KVCache, tree_rows: int
    ):
        config, self.most = draft.config, window_of(draft)
        self.draft, self.cache, self._embed = draft, cache, target.embed_tokens
        eps, window = config.rms_norm_eps, self.most + 1  # with a row's own key
        self._block = draft_block.DraftBlock(weights, config.n_heads, config.n_kv_heads, eps, window)
        shape = cache.batch, cache.capacity + tree_rows, config.n_kv_heads, config.head_dim
        # Zeros: a row that nobody wrote may lie in front of the window, where it is multiplied by 0.
        self._keys, self._values = (torch.zeros(shape, dtype=weights.head_ED.dtype) for _ in range(2))
        self._slots_B1 = torch.arange(cache.batch)[:, None]

    def start(self, slots: Sequence[int]) -> None:
        pass  # a row is written before it is read

    def begin(self, state: SlotState, count: int, n_levels: int) -> None:
        places_BC = _before(state, count)
        levels_BL = state.positions[:, None] + torch.arange(n_levels)
        cos, sin = self.draft.tables(torch.cat([places_BC, levels_BL], 1), state.history.prompt_lengths)
        self._tables = cos[:, count:], sin[:, count:]
        if count:
            tokens_BC = state.history.read(state.positions - count, count)
            tables = cos[:, :count].contiguous(), sin[:, :count].contiguous()
            own_kv = self.draft.self_kv(self._embed(tokens_BC), tables)
            for rows, fresh_BCKd in zip((self._keys, self._values), own_kv, strict=True):
                rows[self._slots_B1, places_BC] = fresh_BCKd

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        here, width = slice(level - 1, level), nodes_BT.shape[1]
        cos, sin = (table[:, here].expand(-1, width, -1, -1, -1) for table in self._tables)
        own = self._keys, self._values, state.positions
        target = self.cache.keys[-1], self.cache.values[-1], self.cache.lengths
        return self._block.run(self._embed(nodes_BT), cos, sin, own, ancestors_BTN, target)
