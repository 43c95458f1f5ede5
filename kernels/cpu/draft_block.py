"""A draft's block and the LM head as one C call: self-attention over its own cache, cross-attention over the target's
cache, feed-forward.

With separate calls, a pass of one query token spends half of its time between them (docs/log). The bits are the same.
Shapes: B slots, T query tokens, N rows of the tree so far, after the committed ones, S cache rows, D hidden width,
F feed-forward width, H query heads, K key/value heads, X = (H + 2 K) d, d head width, E draft vocabulary, P positions.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cpu import rows
from longdraft.kernels.cpu.library import fits, make_call, pointers, structure


class BlockWeights(NamedTuple):
    """All weights of a block and of the LM head: matrices in the rows' dtype or as int8 (`rows.in_bytes`), biases and
    RMSNorm weights in the rows' dtype. Biases and the final norm may be None."""

    qkv: rows.Weight
    self_o: rows.Weight
    cross_q: rows.Weight
    cross_o: rows.Weight
    gate_up: rows.Weight
    down: rows.Weight
    head: rows.Weight
    qkv_bias: Tensor | None
    cross_q_bias: Tensor | None
    self_norm: Tensor
    cross_norm: Tensor
    mlp_norm: Tensor
    final_norm: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype; int8 matrices have their own."""
        return self.self_norm.dtype

    @property
    def matrices(self) -> list[rows.Weight]:
        return [one for one in self if isinstance(one, rows.Weight)]

    @property
    def vectors(self) -> list[Tensor | None]:
        return [one for one in self if not isinstance(one, rows.Weight)]

    def in_bytes(self) -> "BlockWeights":
        """The same with all matrices quantised to int8 copies."""
        return self._make([*(rows.in_bytes(matrix.numbers_NI) for matrix in self.matrices), *self.vectors])


# `draft_weights`, in which each matrix is its numbers and its scales, `draft_calls` and `draft_block` of rows.c.
Weights = structure(
    addresses=" ".join(
        f"{name} {name}_scales" if kind is rows.Weight else name for name, kind in BlockWeights.__annotations__.items()
    )
)
Calls = structure(
    (rows.Linear, "missing qkv self_o cross_q cross_o gate_up down head"),
    (rows.Rotation, "missing_turned turned cross_turned"),
    (rows.Attention, "attended crossed"),
)
Block = structure(
    addresses="weights calls tokens embeddings cos sin logits rest keys values lengths ends mask "
    "target_keys target_values target_lengths history missing_starts missing_rest",
    sizes="batch rows before n_missing hidden heads kv_heads width inner vocab window slot row "
    "target_slot target_row history_slot offset",
    floats="eps scale embedding_scale",
)


class Inputs(NamedTuple):
    """Tables that a token and its position are looked up in, contiguous, in the weights' dtype. Here F = d / 2."""

    embeddings_VD: Tensor
    scale: float  # embeddings are multiplied with it
    cos_PF: Tensor  # RoPE tables of every position, as in kernels/rotate.py
    sin_P2F: Tensor


class DraftBlock:
    """The block, ready to run over two caches. Weights, tables and caches must stay in place; nothing is copied.

    Args:
        n_heads, n_kv_heads: H and K, in both caches.
        eps: epsilon of the RMSNorms.
        window: how many keys a row's self-attention reads at most, its own included.
        own_cache: the block's own keys and values [B, S, K, d], both with the same strides and contiguous heads.
        target_cache: the target's keys and values, likewise.
    """

    def __init__(
        self,
        weights: BlockWeights,
        inputs: Inputs,
        n_heads: int,
        n_kv_heads: int,
        eps: float,
        window: int,
        own_cache: tuple[Tensor, Tensor],
        target_cache: tuple[Tensor, Tensor],
    ):
        for numbers_NI, scales_N in weights.matrices:
            assert numbers_NI.dtype == (weights.dtype if scales_N is None else torch.int8)
            assert fits(scales_N, torch.float32, len(numbers_NI))
        keys, width = own_cache[0], own_cache[0].shape[3]
        for k, v in (own_cache, target_cache):
            assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k.dtype == v.dtype == weights.dtype
        for table in (inputs.embeddings_VD, inputs.cos_PF, inputs.sin_P2F):
            assert table.is_contiguous() and table.dtype == weights.dtype
        table = Weights(*pointers(*(tensor for matrix in weights.matrices for tensor in matrix), *weights.vectors))
        calls = Calls()
        self._kept = weights, inputs, own_cache, target_cache, table, calls  # C has only their addresses
        (vocab, hidden), inner = weights.head.numbers_NI.shape, weights.down.numbers_NI.shape[1]
        self._batch, self._rows = len(keys), min(keys.shape[1], len(inputs.cos_PF))
        self._dtype, self._vocab, kv, turning = weights.dtype, vocab, n_kv_heads * width, width // 2 * 3
        # Numbers of scratch for each row of the pass, and for each of the `n_missing` rows before it.
        self._scratch = 6 * n_heads * width + 3 * kv + 4 * hidden + inner + turning
        self._scratch_missing = hidden + 3 * kv + turning
        scale = torch.tensor(inputs.scale, dtype=weights.dtype).item()
        (slot, row), (target_slot, target_row) = keys.stride()[:2], target_cache[0].stride()[:2]
        a = self._arguments = Block(
            hidden=hidden, heads=n_heads, kv_heads=n_kv_heads, width=width, inner=inner, vocab=vocab, window=window,
            slot=slot, row=row, target_slot=target_slot, target_row=target_row,
            eps=eps, scale=width**-0.5, embedding_scale=scale,
        )  # fmt: skip
        a.weights, a.calls = ctypes.addressof(table), ctypes.addressof(calls)
        a.embeddings, a.cos, a.sin = pointers(inputs.embeddings_VD, inputs.cos_PF, inputs.sin_P2F)
        a.keys, a.values, a.target_keys, a.target_values = pointers(*own_cache, *target_cache)

    def run(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        offset: int,
        mask_BTN: Tensor,
        target_lengths_B: Tensor,
        history_BS: Tensor | None = None,
        n_missing: int = 0,
    ) -> Tensor:
        """Run one pass: logits [B, T, E] in the weights' dtype. Raises MemoryError if there is no memory for it.

        Args:
            tokens_BT: int64. Slot b's all have the position lengths_B[b] + offset.
            lengths_B: int64, committed rows of the block's own cache. The N rows after them are the tree's so far; the
                last T of these are this pass's, which are written.
            offset: from the lengths to the tokens' position.
            mask_BTN: bool, which of the N rows each token reads, its own included.
            target_lengths_B: int64, how many rows of the target's cache are read.
            history_BS: int64, the token ids of each slot by position, up to its length; needed if n_missing > 0.
            n_missing: keys and values of this many last committed tokens are computed and written first, or of all if
                there are fewer.
        """
        batch, n_tokens = tokens_BT.shape
        before, a = mask_BTN.shape[2] - n_tokens, self._arguments
        assert before >= 0 and batch <= self._batch
        assert int(lengths_B.max()) + max(before + n_tokens, offset + 1) <= self._rows, "no room after the lengths"
        tokens_BT, mask_BTN = tokens_BT.contiguous(), mask_BTN.contiguous()
        lengths_B, target_lengths_B = lengths_B.contiguous(), target_lengths_B.contiguous()
        assert fits(tokens_BT, torch.int64, batch, n_tokens)
        assert fits(mask_BTN, torch.bool, batch, n_tokens, before + n_tokens)
        assert fits(lengths_B, torch.int64, batch) and fits(target_lengths_B, torch.int64, batch)
        logits = torch.empty(batch, n_tokens, self._vocab, dtype=self._dtype)
        rest = torch.empty(batch * n_tokens * self._scratch, dtype=self._dtype)
        ends_B = lengths_B + before if before else lengths_B
        a.tokens, a.mask, a.logits, a.rest = pointers(tokens_BT, mask_BTN, logits, rest)
        a.lengths, a.ends, a.target_lengths = pointers(lengths_B, ends_B, target_lengths_B)
        if n_missing:
            assert history_BS is not None and len(history_BS) == batch
            assert (history_BS.dtype, history_BS.stride(1)) == (torch.int64, 1)
            starts_B = lengths_B - n_missing
            rest_missing = torch.empty(batch * n_missing * self._scratch_missing, dtype=self._dtype)
            a.history, a.missing_starts, a.missing_rest = pointers(history_BS, starts_B, rest_missing)
            a.history_slot = history_BS.stride(0)
        a.batch, a.rows, a.before, a.n_missing, a.offset = batch, n_tokens, before, n_missing, offset
        make_call("draft_block", self._dtype, a, f"a block of {batch * n_tokens} tokens")
        return logits


def can_run(weights: BlockWeights, head_dim: int) -> bool:
    """Whether the C kernels can compute this block, at any width of pass."""
    numbers = [matrix.numbers_NI for matrix in weights.matrices]
    matrices = [(matrix, matrix is weights.gate_up.numbers_NI) for matrix in numbers]
    return rows.can_run([*numbers, *weights.vectors], matrices, head_dim)
