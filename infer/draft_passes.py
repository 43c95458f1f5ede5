"""LongSpec's block while it drafts: its own keys and values, and the pass of one level of a tree.

`draft_passes` says which way is taken: one call of C where the C kernels compute the block, PyTorch's operations
elsewhere. On a CPU drafting one level of SmolLM2's block took 2.1 ms in C, 1.7 since, and 3.1 by operations, of steps
of 15.3 and 16.3 (docs/LOG.md). Not here: which tokens a level proposes (infer/drafters/longspec.py), the ring of keys
(infer/window_cache.py). Shapes: B slots, T queries of a level, N rows of the tree so far, E draft vocabulary, C tokens
to catch up with, d head width.
"""

import torch
from torch import Tensor, nn

from longdraft.infer.partial_cache import RingCache
from longdraft.infer.slot_state import SlotState
from longdraft.infer.window_cache import WindowCache, window_of
from longdraft.kernels.cpu_impl import draft_block, rows
from longdraft.kernels.cross_attention import cross_attention
from longdraft.kernels.linear import linear
from longdraft.models.decoder import Decoder, Embedding
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.kv_cache import KVCache


class DraftPasses:
    """What a proposal asks of the block, for the slots of one cache of the target.

    Attributes:
        cache: the target's. most: so many positions before the root are read at most.
    """

    # Whether the keys of a root that was a query are known from then on.
    keeps_roots = False

    def __init__(self, draft: LongSpec, target: Decoder, cache: KVCache, most: int):
        self.draft, self.cache, self.most, self._embed = draft, cache, most, target.embed_tokens
        # No slot lacks the keys of more positions before its root; whether the roots were queries in this step.
        self._unknown, self._asked = 0, False

    def start(self, slot: int, length: int) -> None:
        """This slot's next tokens are of another sequence, whose prompt has so many."""
        self._unknown = min(max(self._unknown, length), self.most)

    def on_step(self, most: int) -> None:
        """At most so many tokens were committed to each slot."""
        self._unknown = min(self._unknown + most - (self._asked and self.keeps_roots), self.most)
        self._asked = False

    def rewind(self) -> None:
        """Tokens were taken back."""
        self._unknown = self.most

    def plan(self, state: SlotState, n_levels: int) -> int:
        """The host's part of a proposal of at most so many levels: how many of the last tokens before the roots are to
        be caught up with."""
        if not n_levels:
            return 0
        count, self._unknown, self._asked = min(state.rounded(self._unknown), self.most), 0, True
        return count

    def begin(self, state: SlotState, count: int) -> None:
        """A proposal begins, with so many tokens to be caught up with."""
        raise NotImplementedError

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        """[B, T, E] of the nodes of `level` - 1, at position p + level - 1 behind a root at p.

        ancestors_BTN: bool, which of the tree's rows so far, these nodes' own the last ones, each of them reads.
        """
        raise NotImplementedError


def draft_passes(draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int) -> DraftPasses:
    """The way for this draft here. tree_rows: the most rows of a tree that are ever queries."""
    # The rows of a part of a cache are not positions, by which C's own keys lie.
    if _can_run(draft, target, head_ED) and not isinstance(cache, RingCache):
        return _InC(draft, target, head_ED, cache, tree_rows)
    return _ByOperations(draft, target, head_ED, cache, tree_rows)


def _can_run(draft: LongSpec, target: Decoder, head_ED: Tensor) -> bool:
    """Whether C computes this block here; its RoPE is a table of positions, not of lengths."""
    known = draft_block.can_run(block_weights(draft, head_ED), draft.config.head_dim)
    embeddings_VD = target.embed_tokens.weight
    alike = (embeddings_VD.dtype, embeddings_VD.device) == (head_ED.dtype, head_ED.device)
    plain = _scale_of(target.embed_tokens) is not None and embeddings_VD.is_contiguous()
    return known and alike and plain and not draft.rope.length_dependent


def _scale_of(embed: nn.Embedding) -> float | None:
    """What rows of the table are multiplied with; None for a class that may do anything with them."""
    if isinstance(embed, Embedding):
        return embed.scale
    return 1.0 if type(embed) is nn.Embedding and embed.max_norm is None else None


def passes_bytes(draft: LongSpec, target: Decoder, head_ED: Tensor, batch: int, capacity: int, tree_rows: int) -> int:
    """What `draft_passes` allocates for a target's cache of so many slots and positions."""
    if not _can_run(draft, target, head_ED):
        return WindowCache.bytes(draft, batch, tree_rows)
    row = draft.config.head_dim * head_ED.element_size()
    sizes = [matrix.numbers_NI.shape for matrix in block_weights(draft, head_ED).matrices]
    copies = sum(n * k + 4 * n for n, k in sizes) if _in_bytes(head_ED.dtype) else 0
    return (capacity + tree_rows) * (2 * batch * draft.config.n_kv_heads * row + 3 * row // 2) + copies


def _in_bytes(dtype: torch.dtype) -> bool:
    """Whether C reads block and LM head in bytes, where it is fast at that: a level is bound by what it reads, and its
    first candidates hardly change (docs/LOG.md). Who asks for fp32 wants the network's own numbers."""
    return dtype == torch.bfloat16 and rows.multiplies_bf16()


def block_weights(draft: LongSpec, head_ED: Tensor) -> draft_block.BlockWeights:
    """What C is given of a draft and its LM head, where they lie."""
    layers = draft.self_qkv, draft.self_o, draft.cross_q, draft.cross_o, draft.gate_up, draft.down
    matrices = (rows.Weight(weight.detach()) for weight in (*(layer.weight for layer in layers), head_ED))
    given = (
        draft.self_qkv.bias,
        draft.cross_q.bias,
        *(norm.weight for norm in (draft.self_norm, draft.cross_norm, draft.mlp_norm)),
        None if draft.final_norm is None else draft.final_norm.weight,
    )
    vectors = draft_block.Vectors._make(None if part is None else part.detach() for part in given)
    return draft_block.BlockWeights(draft_block.Matrices(*matrices), vectors)


class _ByOperations(DraftPasses):
    """By PyTorch's operations, over a ring of the window's keys and values."""

    def __init__(self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int):
        self._window, self._head_ED = WindowCache(draft, cache.batch, tree_rows), head_ED
        # Where positions were taken back, older ones that are in the window again may have been overwritten.
        super().__init__(draft, target, cache, self._window.ring)

    def start(self, slot: int, length: int) -> None:
        super().start(slot, length)
        self._window.start(slot)

    def begin(self, state: SlotState, count: int) -> None:
        if count:
            tokens_BC = state.history.read(state.positions - count, count)
            # Position 0 again where there are fewer.
            last_C = torch.arange(-count, 0, device=state.positions.device)
            places_BC = (state.positions[:, None] + last_C).clamp(min=0)
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


class _InC(DraftPasses):
    """By one call of C a level, over a cache with a row for every position; those before the window are never read."""

    keeps_roots = True

    def __init__(self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int):
        config, dtype, self._head_ED = draft.config, head_ED.dtype, head_ED
        super().__init__(draft, target, cache, window_of(draft))
        shape = cache.batch, cache.capacity + tree_rows, config.n_kv_heads, config.head_dim
        # Zeros: a row that nobody wrote may lie in front of the window, where it is multiplied by 0.
        self._own = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        cos, sin = draft.tables(torch.arange(shape[1])[None])
        self._tables, self._behind, self._known = (cos.flatten(0, -2), sin.flatten(0, 1).flatten(1)), 0, list[int]()
        self._take_weights()

    def start(self, slot: int, length: int) -> None:
        super().start(slot, length)
        self._take_weights()

    def _take_weights(self) -> None:
        """Others than last time, if there are others: what C reads may be a copy in bytes. Seen are new tensors, and
        what is written to them as optimizers and `load_state_dict` do."""
        weights, embed, config = block_weights(self.draft, self._head_ED), self._embed, self.draft.config
        given = embed.weight, *(matrix.numbers_NI for matrix in weights.matrices), *weights.vectors
        known = [
            number
            for part in given
            if part is not None
            for number in (part.data_ptr(), 0 if part.is_inference() else part._version)
        ]
        if known == self._known:
            return
        scale = _scale_of(embed)
        assert scale is not None
        self._known, self._block = known, draft_block.DraftBlock(
            weights.in_bytes() if _in_bytes(weights.dtype) else weights,
            draft_block.Inputs(embed.weight.detach(), scale, *self._tables),
            config.n_heads, config.n_kv_heads, config.rms_norm_eps, self.most + 1,  # with a row's own key
            self._own, (self.cache.keys[-1], self.cache.values[-1]),
        )  # fmt: skip

    def begin(self, state: SlotState, count: int) -> None:
        self._behind = count
        if self.cache.batch * count <= rows.MOST_LINEAR_ROWS:
            return  # they go along with the first level
        self._behind = 0
        # Position 0 again where there are fewer.
        places_BC = (state.positions[:, None] + torch.arange(-count, 0)).clamp_(min=0)
        embeddings_BCD = self._embed(state.history.read(state.positions - count, count))
        own_kv = self.draft.self_kv(embeddings_BCD, self.draft.tables(places_BC))
        for kept, own_BCKd in zip(self._own, own_kv, strict=True):
            for slot, position in enumerate(state.positions.tolist()):
                there = min(count, position)
                kept[slot, position - there : position] = own_BCKd[slot, count - there :]

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        behind, self._behind = self._behind, 0
        lengths_B, tokens_BS = self.cache.lengths, state.history.tokens
        return self._block.run(nodes_BT, state.positions, level - 1, ancestors_BTN, lengths_B, tokens_BS, behind)
