"""Passes of few rows on a CPU: the C kernels for linear layers, rotation and attention.

Why C of our own: on CPUs without bf16 instructions PyTorch's bf16 products of a few rows cost several times one row's;
and no library promises that a row's result is the same in a pass of 1 and of 40 rows. Here an output row does not
depend on the other rows of its pass, bit for bit (see rows.c). So decoding is exact in bf16 too where these kernels
serve all layers: trees of up to 128 nodes, widths that are multiples of 8, sliding windows. On a processor with
AVX-512's bf16 instructions, bf16 products use these (pairs.inc) and give other bits than with AVX2 alone.

Shapes: M rows, N outputs, I inputs; B slots, T rows of the pass, S cache rows, H query heads, K key/value heads,
d head width.
"""

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.attention import with_sinks
from longdraft.kernels.cpu.library import SUFFIXES, fits, is_decoding, library, make_call, pointers, structure

# Above these, a matrix product of the BLAS library and PyTorch's flash attention are faster: prefill, not decoding.
MOST_LINEAR_ROWS = 256
MOST_ATTENTION_ROWS = 128
HEAD_WIDTHS = range(8, 1025, 8)  # of attention, up to attention_common.inc's WIDEST

# `linear` and `rotation` of rows.c, `attention` of attention_common.inc.
Linear = structure(addresses="x norm w bias residual scales y", sizes="m n k gated", floats="eps")
Rotation = structure(
    addresses="x cos sin q_norm k_norm y keys values lengths",
    sizes="m heads d stride period queries rows k_slot k_row v_slot v_row",
    floats="eps",
)
Attention = structure(
    addresses="q k v out lse lengths mask",
    sizes="batch rows heads kv_heads width window before blind q_row k_slot k_row k_head v_slot v_row v_head",
    floats="scale",
)


def serves(dtype: torch.dtype) -> bool:
    """Whether the C kernels compute passes of few rows in this dtype: bf16 always, fp32 while decoding."""
    return dtype == torch.bfloat16 or (dtype == torch.float32 and is_decoding.get())


def can_multiply(weight_NI: Tensor, gated: bool) -> bool:
    """Whether the C kernels are available and `linear_rows` takes this weight."""
    n, k = weight_NI.shape
    return k % 8 == 0 and not (gated and n % 16) and weight_NI.is_contiguous() and library() is not None


def can_run(tensors: Iterable[Tensor | None], matrices: Iterable[tuple[Tensor, bool]], head_dim: int) -> bool:
    """Whether layers with heads of this width can run as one call of C, at any width of pass.

    Args:
        tensors: all weights that the call reads; None for what a layer does not have.
        matrices: the ones that rows are multiplied with, and whether the product is gated.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    one_dtype = len({tensor.dtype for tensor in present}) == 1 and present[0].dtype in SUFFIXES
    in_place = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in present)
    return one_dtype and in_place and head_dim in HEAD_WIDTHS and all(can_multiply(*matrix) for matrix in matrices)


class Weight(NamedTuple):
    """A weight [N, I] in the rows' dtype, or as int8 with `scales_N` (fp32): see `in_bytes`."""

    numbers_NI: Tensor
    scales_N: Tensor | None = None


def in_bytes(weight_NI: Tensor) -> Weight:
    """Quantise a weight to int8 with one fp32 scale per output, which halves the bytes to read compared with bf16.

    A number is off by at most 1/254 of the largest in its output. Not for a target, whose results must not change.
    """
    in_bytes_NI = torch.empty_like(weight_NI, dtype=torch.int8)
    scales_N = torch.empty(len(weight_NI), dtype=torch.float32)
    for first in range(0, len(weight_NI), 4096):  # bounds the fp32 copy
        block = slice(first, first + 4096)
        wide_PI = weight_NI[block].float()
        scales_N[block] = (wide_PI.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        in_bytes_NI[block] = (wide_PI / scales_N[block, None]).round_()
    return Weight(in_bytes_NI, scales_N)


def linear_rows(
    x: Tensor,
    weight_NI: Tensor,
    bias_N: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See `longdraft.kernels.linear.linear`. All in bf16 or all in fp32; I is a multiple of 8, N of 16 if gated."""
    assert weight_NI.is_contiguous() and weight_NI.dtype == x.dtype
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    n, k = weight_NI.shape
    y = x.new_empty(*x.shape[:-1], n // 2 if gated else n)
    weight_I, eps = norm or (None, 0.0)
    assert all(tensor is None or tensor.dtype == x.dtype for tensor in (bias_N, weight_I, residual))
    m = x.numel() // k
    arguments = Linear(*pointers(x, weight_I, weight_NI, bias_N, residual, None, y), m, n, k, gated, eps)
    make_call("linear", x.dtype, arguments, f"{m} rows of {k} numbers in fp32")
    return y


def rotate_rows(
    x_BTNd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    norms: tuple[Tensor, Tensor, int, float] | None = None,
    cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """See `longdraft.kernels.rotate.rotate`. All in bf16 or all in fp32. x is contiguous except for the stride of its
    rows; with norms d is a multiple of 8."""
    batch, rows, heads, width = x_BTNd.shape
    # The stride of rows; if slots have one row each, the stride of slots (that of a dimension of size 1 is arbitrary).
    stride = x_BTNd.stride(1) if rows > 1 else x_BTNd.stride(0)
    assert x_BTNd.stride()[2:] == (width, 1) and (batch == 1 or x_BTNd.stride(0) == rows * stride)
    assert cos_BT11F.is_contiguous() and sin_BT12F.is_contiguous() and cos_BT11F.shape[1] == rows
    q_norm, k_norm, queries, eps = norms or (None, None, heads, 0.0)
    keys, values, lengths = cache or (None, None, None)
    strides = (0, 0, 0, 0)
    if keys is not None and values is not None and lengths is not None:
        assert keys.dtype == values.dtype == x_BTNd.dtype and keys.shape[2:] == values.shape[2:]
        assert lengths.dtype == torch.int64 and lengths.is_contiguous() and keys.shape[3] == width
        heads, queries = heads - keys.shape[2], heads - 2 * keys.shape[2]
        assert norms is None or norms[2] == queries
        strides = *keys.stride()[:2], *values.stride()[:2]
    y = x_BTNd.new_empty(batch, rows, heads, width)
    arguments = Rotation(
        *pointers(x_BTNd, cos_BT11F, sin_BT12F, q_norm, k_norm, y, keys, values, lengths),
        batch * rows, heads, width, stride, cos_BT11F.shape[0] * rows, queries, rows, *strides, eps,
    )  # fmt: skip
    make_call("rotation", x_BTNd.dtype, arguments, "heads")
    return y


def can_attend(q_BTHd: Tensor) -> bool:
    """Whether the C kernels are available and `attention_rows` takes queries of this dtype and head width."""
    on_cpu = q_BTHd.device.type == "cpu" and q_BTHd.dtype in SUFFIXES
    return on_cpu and q_BTHd.shape[3] in HEAD_WIDTHS and library() is not None


def attends_chains(q_BTHd: Tensor) -> bool:
    """Whether the C kernels are faster for a chain than PyTorch's: if they can use bf16 instructions (pairs.inc)."""
    takes_pairs = q_BTHd.dtype == torch.bfloat16 and q_BTHd.shape[3] % 16 == 0 and can_attend(q_BTHd)
    return takes_pairs and multiplies_bf16()


def multiplies_bf16() -> bool:
    """Whether the C kernels use bf16 instructions of the processor."""
    lib = library()
    return lib is not None and bool(ctypes.c_int.in_dll(lib, "has_pairs").value)


def rows_with_sinks(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """`attention_rows` with attention sinks, if there are any (kernels/attention.py). A chain may have any number of
    rows; MOST_ATTENTION_ROWS are computed at a time."""
    outputs = []
    for i, q in enumerate(q_BTHd.split(MOST_ATTENTION_ROWS, 1)):
        lse_BTH = None if sinks_H is None else torch.empty(q.shape[:3])
        before_B = lengths_B + i * MOST_ATTENTION_ROWS if i else lengths_B
        out_BTHd = attention_rows(q, keys_BSKd, values_BSKd, before_B, tree_mask_BTT, window, lse_BTH)
        outputs.append(with_sinks(out_BTHd, lse_BTH, sinks_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def attention_rows(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None,
    window: int | None = None,
    lse_BTH: Tensor | None = None,
    blind: bool = False,
) -> Tensor:
    """See `longdraft.kernels.tree_attention.tree_attention`. bf16 or fp32, d a multiple of 8 up to 1024, at most
    MOST_ATTENTION_ROWS rows.

    Args:
        lse_BTH: fp32, contiguous; the log-sum-exps are written there. None: they are not needed.
        blind: rows read only committed rows, neither themselves nor each other.
    """
    assert keys_BSKd.stride(3) == values_BSKd.stride(3) == 1
    batch, rows, heads, width = q_BTHd.shape
    assert 0 < rows <= MOST_ATTENTION_ROWS and (window is None or window >= 1), (rows, window)
    assert can_attend(q_BTHd), (q_BTHd.dtype, width)
    q_row = q_BTHd.stride(1)
    if q_BTHd.stride()[2:] != (width, 1) or (batch > 1 and q_BTHd.stride(0) != rows * q_row):
        q_BTHd, q_row = q_BTHd.contiguous(), heads * width
    assert q_BTHd.dtype == keys_BSKd.dtype == values_BSKd.dtype, (q_BTHd.dtype, keys_BSKd.dtype, values_BSKd.dtype)
    mask, out = None if tree_mask_BTT is None else tree_mask_BTT.contiguous(), q_BTHd.new_empty(q_BTHd.shape)
    assert fits(lengths_B, torch.int64, batch) and fits(mask, torch.bool, batch, rows, rows)
    assert fits(lse_BTH, torch.float32, batch, rows, heads)
    arguments = Attention(
        *pointers(q_BTHd, keys_BSKd, values_BSKd, out, lse_BTH, lengths_B, mask),
        batch, rows, heads, keys_BSKd.shape[2], width, window or 0, 0, blind, q_row,
        *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3], width**-0.5,
    )  # fmt: skip
    make_call("attention", q_BTHd.dtype, arguments, f"the partial results of {rows} rows of {heads} heads")
    return out
