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
    """Matrices [N, I], biases [N] and norms [D] of one dtype; biases and the final norm may be None."""

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
    def matrices(self) -> tuple[rows.Weight, ...]:
        return self[:7]

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        return self[7:]

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self.self_norm.dtype

    def in_bytes(self) -> "BlockWeights":
        """With copies of all matrices in bytes."""
        return BlockWeights(*(rows.in_bytes(matrix.numbers_NI) for matrix in self.matrices), *self.vectors)


class _Weights(ctypes.Structure):
    """`draft_weights` of rows.c: of each matrix its numbers and its scales."""

    _fields_ = rows.fields(
        " ".join(f"{name} {name}_scales" for name in BlockWeights._fields[:7]) + " " + " ".join(BlockWeights._fields[7:]),
        "",
    )


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

    def fit(self, batch: int, count: int, dtype: torch.dtype) -> bool:
        """Whether they are so many of a dtype."""
        return all(part.is_contiguous() and part.dtype == dtype and part.shape[:2] == (batch, count) for part in self)


class DraftBlock:
    """The block, whose weights somebody else keeps, where they are, over caches that stay where they are.

    Args:
        n_heads, n_kv_heads, eps: of the block, the last one of its norms.
        window: keys that a row's self-attention reads at most, its own included.
        own: its keys and values [B, S, K, d], of the same strides, heads contiguous.
        target: the other model's, likewise.
    """

    def __init__(
        self,
        weights: BlockWeights,
        n_heads: int,
        n_kv_heads: int,
        eps: float,
        window: int,
        own: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
    ):
        for numbers_NI, scales_N in weights.matrices:
            assert numbers_NI.dtype == (weights.dtype if scales_N is None else torch.int8)
            assert scales_N is None or (scales_N.dtype, scales_N.shape) == (torch.float32, numbers_NI.shape[:1])
        keys, values = own
        width = keys.shape[3]
        for k, v in (own, target):
            assert k.stride() == v.stride() and k.stride()[2:] == (width, 1) and k.dtype == v.dtype == weights.dtype
        self._kept = weights, own, target  # what is made for these tables alone lives with them
        every = *(part for matrix in weights.matrices for part in matrix), *weights.vectors
        self._table, self._calls = _Weights(*map(rows.pointer, every)), _Calls()
        hidden, inner, vocab = len(weights.self_norm), weights.down.numbers_NI.shape[1], len(weights.head.numbers_NI)
        self._dtype, self._hidden, self._vocab, self._kv = weights.dtype, hidden, vocab, n_kv_heads * width
        self._each = 6 * n_heads * width + 3 * self._kv + 3 * hidden + inner  # scratch of a row
        self._name = f"draft_block_{rows.SUFFIXES[weights.dtype]}"
        self._arguments = _Block(
            weights=ctypes.addressof(self._table), calls=ctypes.addressof(self._calls), keys=keys.data_ptr(),
            values=values.data_ptr(), target_keys=target[0].data_ptr(), target_values=target[1].data_ptr(), hidden=hidden,
            heads=n_heads, kv_heads=n_kv_heads, width=width, inner=inner, vocab=vocab, window=window, slot=keys.stride(0),
            row=keys.stride(1), target_slot=target[0].stride(0), target_row=target[0].stride(1), eps=eps, scale=width**-0.5,
        )  # fmt: skip

    def run(
        self,
        asked: Rows,
        lengths_B: Tensor,
        mask_BTN: Tensor,
        target_lengths_B: Tensor,
        behind: Rows | None = None,
    ) -> Tensor:
        """Logits [B, T, E] of one pass, without a bias.

        Args:
            asked: the T rows.
            lengths_B: int64, the committed rows of its own cache. N rows behind them are the tree's so far, the last T
                of them this pass's, which are written.
            mask_BTN: bool, contiguous, which of these a row reads, itself included.
            target_lengths_B: int64, the rows of the other model's that are read.
            behind: the last committed rows, whose keys and values are written first; those before row 0 are left out.
        """
        batch, n_tokens, _ = asked.x_BTD.shape
        before, n_behind = mask_BTN.shape[2] - n_tokens, 0
        assert asked.fit(batch, n_tokens, self._dtype) and before >= 0
        assert mask_BTN.is_contiguous() and (mask_BTN.dtype, mask_BTN.shape[:2]) == (torch.bool, (batch, n_tokens))
        for lengths in (lengths_B, target_lengths_B):
            assert lengths.is_contiguous() and (lengths.dtype, len(lengths)) == (torch.int64, batch)
        logits = torch.empty(batch, n_tokens, self._vocab, dtype=self._dtype)
        rest = torch.empty(batch * n_tokens * self._each, dtype=self._dtype)
        ends_B, a = lengths_B + before if before else lengths_B, self._arguments
        a.x, a.cos, a.sin = (part.data_ptr() for part in asked)
        a.logits, a.rest, a.mask = logits.data_ptr(), rest.data_ptr(), mask_BTN.data_ptr()
        a.lengths, a.ends, a.target_lengths = lengths_B.data_ptr(), ends_B.data_ptr(), target_lengths_B.data_ptr()
        if behind is not None:
            n_behind = behind.x_BTD.shape[1]
            assert behind.fit(batch, n_behind, self._dtype)
            starts_B, rest_behind = lengths_B - n_behind, torch.empty(batch * n_behind * 3 * self._kv, dtype=self._dtype)
            a.behind, a.behind_cos, a.behind_sin = (part.data_ptr() for part in behind)
            a.behind_starts, a.behind_rest = starts_B.data_ptr(), rest_behind.data_ptr()
        a.batch, a.rows, a.before, a.n_behind = batch, n_tokens, before, n_behind
        rows.make_call(self._name, a, f"a block of {batch * n_tokens} tokens")
        return logits


def can_run(weights: BlockWeights, head_dim: int) -> bool:
    """Whether the C kernels compute this block, at any width of pass."""
    assert all(matrix.scales_N is None for matrix in weights.matrices)
    tensors = [part for part in (*(matrix.numbers_NI for matrix in weights.matrices), *weights.vectors) if part is not None]
    alike = len({part.dtype for part in tensors}) == 1 and all(part.is_contiguous() for part in tensors)
    known = weights.dtype in rows.SUFFIXES and all(part.device.type == "cpu" for part in tensors)
    return (
        alike
        and known
        and head_dim % 8 == 0
        and head_dim <= rows.MOST_HEAD_WIDTH
        and all(rows.can_multiply(matrix.numbers_NI, matrix is weights.gate_up) for matrix in weights.matrices)
    )
