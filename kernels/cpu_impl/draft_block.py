"""A draft's block with the LM head behind it as one C call: self-attention over a cache of its own, attention over
another model's cache, feed-forward.

As separate calls a pass of one query token spends half of its time between them (docs/LOG.md). Bits are those of the
calls one by one. Shapes: B slots, T query tokens, N rows behind the committed ones that they may see, S cache rows, D
hidden width, F feed-forward width, H query heads, K key/value heads, X = (H + 2 K) d, d head width, E words.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cpu_impl import rows


class BlockWeights(NamedTuple):
    """Tensors of one dtype; biases and the final norm may be None. The head may be in bytes (`rows.in_bytes`)."""

    self_norm_D: Tensor
    qkv_XD: Tensor
    qkv_bias_X: Tensor | None
    self_o_DX: Tensor
    cross_norm_D: Tensor
    cross_q_XD: Tensor
    cross_q_bias_X: Tensor | None
    cross_o_DX: Tensor
    mlp_norm_D: Tensor
    gate_up_XD: Tensor
    down_DF: Tensor
    final_norm_D: Tensor | None
    head_ED: Tensor
    head_scales_E: Tensor | None = None


class _Weights(ctypes.Structure):
    """`draft_weights` of rows.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in BlockWeights._fields]


class _Calls(ctypes.Structure):
    """`draft_calls` of rows.c."""

    _fields_ = [
        *((name, rows.Linear) for name in ("behind", "qkv", "self_o", "cross_q", "cross_o", "gate_up", "down", "head")),
        *((name, rows.Rotation) for name in ("behind_turned", "turned", "asked")),
        *((name, rows.Attention) for name in ("attended", "crossed")),
    ]


class _Block(ctypes.Structure):
    """`draft_block` of rows.c."""

    _fields_ = rows.fields(
        "weights calls x cos sin logits rest keys values lengths ends mask target_keys target_values target_lengths "
        "behind behind_cos behind_sin behind_starts behind_rest",
        "batch rows before n_behind hidden heads kv_heads width inner vocab window slot row target_slot target_row",
        "eps scale",
    )


class Rows(NamedTuple):
    """Rows of a pass: embeddings in the weights' dtype, and RoPE's tables at their positions as in kernels/rotate.py;
    contiguous."""

    x_BTD: Tensor
    cos_BT11F: Tensor
    sin_BT12F: Tensor


class DraftBlock:
    """The block, whose weights somebody else keeps, where they are.

    Args:
        n_heads, n_kv_heads, eps: of the block, the last one of its norms.
        window: keys that a row's self-attention reads at most, its own included.
    """

    def __init__(self, weights: BlockWeights, n_heads: int, n_kv_heads: int, eps: float, window: int):
        head, scales = weights.head_ED, weights.head_scales_E
        assert head.dtype == (weights.down_DF.dtype if scales is None else torch.int8)
        assert scales is None or (scales.dtype, scales.shape) == (torch.float32, head.shape[:1])
        self._weights = weights  # what is made for this table alone lives with it
        self._table = _Weights(*map(rows.pointer, weights))
        self._heads, self._eps, self._window = (n_heads, n_kv_heads), eps, window

    def run(
        self,
        asked: Rows,
        own: tuple[Tensor, Tensor, Tensor],
        mask_BTN: Tensor,
        target: tuple[Tensor, Tensor, Tensor],
        behind: Rows | None = None,
    ) -> Tensor:
        """Logits [B, T, E] of one pass, without a bias.

        Args:
            asked: the T rows.
            own: keys and values [B, S, K, d] of the same strides, heads contiguous, and int64 [B], the committed rows.
                N rows behind them are the tree's so far, the last T of them this pass's, which are written.
            mask_BTN: bool, which of these a row reads, itself included.
            target: the other model's keys and values, likewise, and int64 [B], the rows of them that are read.
            behind: the last committed rows, whose keys and values are written first; those before row 0 are left out.
        """
        weights, (heads, kv_heads), (keys, values, lengths_B) = self._weights, self._heads, own
        target_keys, target_values, target_lengths_B = target
        batch, n_tokens, hidden = asked.x_BTD.shape
        n_behind = 0 if behind is None else behind.x_BTD.shape[1]
        width, inner, vocab, before = keys.shape[3], weights.down_DF.shape[1], len(weights.head_ED), mask_BTN.shape[2]
        before, mask, dtype = before - n_tokens, mask_BTN.contiguous(), weights.down_DF.dtype
        for given, count in ((asked, n_tokens), (behind, n_behind)):
            for part in given or ():
                assert part.is_contiguous() and part.dtype == dtype and part.shape[:2] == (batch, count)
        for k, v, lengths in (own, target):
            assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k.dtype == v.dtype == dtype
            assert lengths.is_contiguous() and (lengths.dtype, len(lengths)) == (torch.int64, batch)
        assert (mask.dtype, mask.shape[:2]) == (torch.bool, (batch, n_tokens)) and before >= 0
        query, ends_B, starts_B = heads * width, lengths_B + before, lengths_B - n_behind
        each = 6 * query + 3 * kv_heads * width + 3 * hidden + inner
        logits = torch.empty(batch, n_tokens, vocab, dtype=dtype)
        rest = torch.empty(batch * n_tokens, each, dtype=dtype)
        rest_behind = torch.empty(batch * n_behind, 3 * kv_heads * width, dtype=dtype)
        calls = _Calls()
        pointers = *asked, logits, rest, keys, values, lengths_B, ends_B, mask, target_keys, target_values
        late = target_lengths_B, *(behind or (None, None, None)), starts_B, rest_behind
        arguments = _Block(
            ctypes.addressof(self._table), ctypes.addressof(calls), *map(rows.pointer, (*pointers, *late)),
            batch, n_tokens, before, n_behind, hidden, heads, kv_heads, width, inner, vocab, self._window,
            *keys.stride()[:2], *target_keys.stride()[:2], self._eps, width**-0.5,
        )  # fmt: skip
        rows.make_call(f"draft_block_{rows.SUFFIXES[dtype]}", arguments, f"a block of {batch * n_tokens} tokens")
        return logits


def can_run(weights: BlockWeights, head_dim: int) -> bool:
    """Whether the C kernels compute this block, at any width of pass."""
    assert weights.head_scales_E is None
    tensors = [part for part in weights if part is not None]
    plain = weights.qkv_XD, weights.self_o_DX, weights.cross_q_XD, weights.cross_o_DX, weights.down_DF, weights.head_ED
    alike = len({part.dtype for part in tensors}) == 1 and all(part.is_contiguous() for part in tensors)
    known = weights.qkv_XD.dtype in rows.SUFFIXES and all(part.device.type == "cpu" for part in tensors)
    return (
        alike
        and known
        and head_dim % 8 == 0
        and head_dim <= rows.MOST_HEAD_WIDTH
        and all(rows.can_multiply(weight, False) for weight in plain)
        and rows.can_multiply(weights.gate_up_XD, True)
    )
