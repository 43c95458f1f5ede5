"""How LongSpec's block runs one level of a tree, in C or in PyTorch, with its own keys and values.

There are two implementations, and `draft_passes` chooses: one C call a level where the C kernels compute the block,
PyTorch's operations elsewhere. infer/drafters/longspec.py says which tokens a level proposes.

The block's own keys of committed tokens are computed late: a proposal first catches up with the last tokens before the
roots, at most a window of them. Shapes: B slots, T queries of a level, N rows of the tree so far, W rows of the window,
E draft vocabulary, C tokens to catch up with, P positions, G = H / K, H query heads, K key/value heads, d head width.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from longdraft.infer.slot_state import SlotState
from longdraft.kernels.cpu import draft_block, rows
from longdraft.kernels.linear import linear
from longdraft.kernels.tree_attention import cross_attention
from longdraft.models.decoder import Decoder, Embedding
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.footprint import Buffer
from longdraft.models.kv_cache import KVCache


class DraftPasses:
    """What a proposal needs of the block, for the slots of one cache of the target.

    Attributes:
        cache: the target's.
        window: how many positions before its own a query reads at most: the configured window, or fewer positions.
        kept: the block's own keys and values [B, P + rows of a tree, K, d]: of the token at position p in row p % P.
        keeps_roots: whether the keys of a root that was a query are kept from then on.
    """

    keeps_roots = False

    def __init__(
        self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, n_positions: int, tree_rows: int
    ):
        self.draft, self.cache, self._embed, self._head_ED = draft, cache, target.embed_tokens, head_ED
        self.window = min(draft.config.window, draft.config.max_positions)
        shape = cache.batch, n_positions + tree_rows, draft.config.n_kv_heads, draft.config.head_dim
        # Zeros, because masked rows are still multiplied by 0, and uninitialised memory may be NaN.
        self.kept = head_ED.new_zeros(shape), head_ED.new_zeros(shape)
        self._n_positions, self._slots_B1 = n_positions, torch.arange(cache.batch, device=head_ED.device)[:, None]
        self._missing = 0  # the most positions before its root whose keys a slot lacks
        self._roots_queried = False  # whether the roots were queries in this step

    def start(self, slot: int, length: int) -> None:
        """Begin another sequence on this slot. length: tokens of its prompt."""
        self._missing = min(max(self._missing, length), self.window)

    def on_step(self, most: int) -> None:
        """Note that a step committed at most `most` tokens to each slot."""
        self._missing = min(self._missing + most - (self._roots_queried and self.keeps_roots), self.window)
        self._roots_queried = False

    def plan(self, state: SlotState, n_levels: int) -> int:
        """The host's part of a proposal of at most `n_levels` levels: how many of the last tokens before the roots to
        catch up with."""
        if not n_levels:
            return 0
        count, self._missing, self._roots_queried = min(state.rounded(self._missing), self.window), 0, True
        return count

    def begin(self, state: SlotState, count: int) -> None:
        """Begin a proposal: catch up with the last `count` tokens before the roots."""
        if count:
            last_C = torch.arange(-count, 0, device=state.positions.device)
            positions_BC = (state.positions[:, None] + last_C).clamp(min=0)  # position 0 again where there are fewer
            embeddings_BCD = self._embed(state.history.read(state.positions - count, count))
            tables = self.draft.tables(positions_BC, state.history.prompt_lengths)
            places = self._slots_B1, positions_BC % self._n_positions
            self.kept[0][places], self.kept[1][places] = self.draft.self_kv(embeddings_BCD, tables)

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        """Logits [B, T, E] after the nodes of `level` - 1, which are at position p + level - 1 for a root at p.

        ancestors_BTN: bool, which of the tree's rows so far each node reads; the nodes' own rows are the last T.
        """
        raise NotImplementedError


def draft_passes(draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int) -> DraftPasses:
    """The faster implementation that can run this draft. tree_rows: the most rows of a tree that are ever queries."""
    passes = _CPasses if _can_run(draft, target, head_ED) else _TorchPasses
    return passes(draft, target, head_ED, cache, tree_rows)


def _can_run(draft: LongSpec, target: Decoder, head_ED: Tensor) -> bool:
    """Whether the C kernels compute this block here. Their RoPE is a table by position, so it must not depend on the
    sequence's length."""
    has_kernel = draft_block.can_run(block_weights(draft, head_ED), draft.config.head_dim)
    embeddings_VD = target.embed_tokens.weight
    same_form = (embeddings_VD.dtype, embeddings_VD.device) == (head_ED.dtype, head_ED.device)
    plain_table = _scale_of(target.embed_tokens) is not None and embeddings_VD.is_contiguous()
    return has_kernel and same_form and plain_table and not draft.rope.length_dependent


def _scale_of(embed: nn.Embedding) -> float | None:
    """The factor of the table's rows; None for a class that may do anything with them."""
    if isinstance(embed, Embedding):
        return embed.scale
    return 1.0 if type(embed) is nn.Embedding and embed.max_norm is None else None


def draft_rows(
    draft: LongSpec, target: Decoder, head_ED: Tensor, batch: int, capacity: int, tree_rows: int
) -> list[Buffer]:
    """Keys and values that `draft_passes` allocates for a target's cache of `batch` slots of `capacity` positions."""
    config = draft.config
    positions = capacity if _can_run(draft, target, head_ED) else min(config.window, config.max_positions)
    return [((2, batch, positions + tree_rows, config.n_kv_heads, config.head_dim), head_ED.dtype)]


def block_weights(draft: LongSpec, head_ED: Tensor) -> draft_block.BlockWeights:
    """The weights of a draft and its LM head for C, without a copy."""
    layers = draft.self_qkv, draft.self_o, draft.cross_q, draft.cross_o, draft.gate_up, draft.down
    matrices = (rows.Weight(weight.detach()) for weight in (*(layer.weight for layer in layers), head_ED))
    vectors = (
        draft.self_qkv.bias,
        draft.cross_q.bias,
        *(norm.weight for norm in (draft.self_norm, draft.cross_norm, draft.mlp_norm)),
        None if draft.final_norm is None else draft.final_norm.weight,
    )
    detached = draft_block.Vectors._make(None if vector is None else vector.detach() for vector in vectors)
    return draft_block.BlockWeights(draft_block.Matrices(*matrices), detached)


class _TorchPasses(DraftPasses):
    """Passes by PyTorch's operations. Keys and values are kept of the last W positions before the root, and a proposal
    catches up with these. The tree's rows follow, so that a pass attends to one piece of memory under one mask."""

    def __init__(self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int):
        window = min(draft.config.window, draft.config.max_positions)
        super().__init__(draft, target, head_ED, cache, window, tree_rows)
        self._rows_W = torch.arange(self.window, device=head_ED.device)

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        cache, n_rows, n_nodes = self.cache, *ancestors_BTN.shape[1:]
        at_B, last_B1 = state.positions + level - 1, state.positions[:, None] - 1
        positions_BW = last_B1 - (last_B1 - self._rows_W) % self.window
        open_BW = positions_BW >= (at_B[:, None] - self.window).clamp(min=0)
        open_BTS = torch.cat([open_BW[:, None].expand(-1, n_rows, -1), ancestors_BTN], dim=2)
        end = self.window + n_nodes

        def attend_self(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            keys, values = self.kept
            keys[:, end - n_rows : end], values[:, end - n_rows : end] = k_BTKd, v_BTKd
            return _attend(q_BTHd, keys[:, :end], values[:, :end], open_BTS)

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            return cross_attention(q_BTHd, cache.keys[-1], cache.values[-1], cache.lengths)

        tables = self.draft.tables(at_B[:, None].expand_as(nodes_BT), state.history.prompt_lengths)
        hidden_BTD = self.draft.block(self._embed(nodes_BT), tables, attend_self, attend_cross)
        return linear(hidden_BTD, self._head_ED)


def _attend(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, mask_BTS: Tensor) -> Tensor:
    """Attention [B, T, H, d] over the rows in each query's mask. Query groups are folded into the query length, so that
    keys and values are read once and never repeated."""
    batch, n_rows, n_heads, head_dim = q_BTHd.shape
    n_kv_heads = k_BSKd.shape[2]
    groups = n_heads // n_kv_heads
    q_BKGTd = q_BTHd.view(batch, n_rows, n_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
    out_BKQd = scaled_dot_product_attention(
        q_BKGTd.reshape(batch, n_kv_heads, groups * n_rows, head_dim),
        k_BSKd.transpose(1, 2),
        v_BSKd.transpose(1, 2),
        attn_mask=mask_BTS.repeat(1, groups, 1)[:, None],
    )
    out_BKGTd = out_BKQd.view(batch, n_kv_heads, groups, n_rows, head_dim)
    return out_BKGTd.permute(0, 3, 1, 2, 4).reshape(batch, n_rows, n_heads, head_dim)


class _CPasses(DraftPasses):
    """Passes by one C call a level, over keys and values of all positions; none before the window is read."""

    keeps_roots = True

    def __init__(self, draft: LongSpec, target: Decoder, head_ED: Tensor, cache: KVCache, tree_rows: int):
        super().__init__(draft, target, head_ED, cache, cache.capacity, tree_rows)
        config = draft.config
        cos, sin = draft.tables(torch.arange(cache.capacity + tree_rows)[None])
        self._tables = cos.flatten(0, -2), sin.flatten(0, 1).flatten(1)
        self._n_behind = 0  # tokens before the roots that the next level's call catches up with
        scale, weights = _scale_of(target.embed_tokens), block_weights(draft, head_ED)
        assert scale is not None
        # A level is bound by the bytes that it reads, and its first candidates hardly change.
        in_int8 = weights.dtype == torch.bfloat16 and rows.multiplies_bf16()
        self._block = draft_block.DraftBlock(
            weights.in_bytes() if in_int8 else weights,
            draft_block.Inputs(target.embed_tokens.weight.detach(), scale, *self._tables),
            config.n_heads, config.n_kv_heads, config.rms_norm_eps, self.window + 1,  # with a row's own key
            self.kept, (cache.keys[-1], cache.values[-1]),
        )  # fmt: skip

    def begin(self, state: SlotState, count: int) -> None:
        if self.cache.batch * count <= rows.MOST_LINEAR_ROWS:
            self._n_behind = count  # they go along with the first level
        else:
            super().begin(state, count)

    def logits(self, state: SlotState, nodes_BT: Tensor, level: int, ancestors_BTN: Tensor) -> Tensor:
        n_behind, self._n_behind = self._n_behind, 0
        lengths_B, tokens_BS = self.cache.lengths, state.history.tokens
        return self._block.run(nodes_BT, state.positions, level - 1, ancestors_BTN, lengths_B, tokens_BS, n_behind)
