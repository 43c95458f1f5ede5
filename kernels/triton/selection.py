"""kernels/selection.py in Triton: one launch for all layers and key heads.

All three kernels are bound by memory reads. A program takes some rows of one key head of one layer, each of which is
contiguous. Shapes: L layers, S rows of the slot, H query heads, K key/value heads, d head width, R rows picked,
C chunks. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block; k_, v_, x_, w_ (kw_, vw_) are strides of keys,
values, the index and the results.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scores(
    p_q, p_k, p_out, k_l, k_s, k_h, n_kv, n_keys, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    i_s, i_h, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_s, o_d = i_s.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m_s, m_d = o_s < n_keys, o_d < WIDTH
    i_lh = i_l * n_kv + i_h
    b_q = tl.load(p_q + i_lh * WIDTH + o_d, mask=m_d, other=0.0)
    p_rows = p_k + i_l * k_l + i_h * k_h + o_s[:, None] * k_s + o_d[None, :]
    b_k = tl.load(p_rows, mask=m_s[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    tl.store(p_out + i_lh * n_keys + o_s, tl.sum(b_k * b_q[None, :], 1), mask=m_s)


def key_scores(queries_LHd: Tensor, keys_LSKd: Tensor) -> Tensor:
    """See `longdraft.kernels.selection.key_scores`."""
    n_layers, n_keys, n_kv, width = keys_LSKd.shape
    assert keys_LSKd.stride(-1) == 1, "keys must lie together within a head"
    query_LKd = queries_LHd.float().unflatten(1, (n_kv, -1)).sum(2)
    scores_LKS = torch.empty((n_layers, n_kv, n_keys), dtype=torch.float32, device=keys_LSKd.device)
    block_d = triton.next_power_of_2(width)
    block = max(16, 8192 // block_d)
    kernel: Any = _scores[(triton.cdiv(n_keys, block), n_kv, n_layers)]
    kernel(
        query_LKd, keys_LSKd, scores_LKS, *keys_LSKd.stride()[:3], n_kv, n_keys,
        WIDTH=width, BLOCK=block, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return scores_LKS


@triton.jit
def _means(
    p_k, p_out, k_l, k_s, k_h, w_l, w_c, w_h, n_chunks, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_c, i_h, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_chunk, o_d = i_c.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m_cd = (o_chunk < n_chunks)[:, None] & (o_d < WIDTH)[None, :]
    p_rows = p_k + i_l * k_l + i_h * k_h + o_chunk[:, None] * chunk * k_s + o_d[None, :]
    b_sum = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for _ in range(0, chunk):
        b_sum += tl.load(p_rows, mask=m_cd, other=0.0).to(tl.float32)
        p_rows += k_s
    p_means = p_out + i_l * w_l + i_h * w_h + o_chunk[:, None] * w_c + o_d[None, :]
    tl.store(p_means, (b_sum / chunk).to(p_out.dtype.element_ty), mask=m_cd)


def chunk_means(keys_LSKd: Tensor, chunk: int, out_LCKd: Tensor) -> None:
    """See `longdraft.kernels.selection.chunk_means`."""
    n_layers, n_keys, n_kv, width = keys_LSKd.shape
    assert n_keys == out_LCKd.shape[1] * chunk and keys_LSKd.stride(-1) == out_LCKd.stride(-1) == 1
    block_d = triton.next_power_of_2(width)
    block = max(1, 2048 // block_d)
    kernel: Any = _means[(triton.cdiv(out_LCKd.shape[1], block), n_kv, n_layers)]
    kernel(
        keys_LSKd, out_LCKd, *keys_LSKd.stride()[:3], *out_LCKd.stride()[:3], out_LCKd.shape[1], chunk,
        WIDTH=width, BLOCK=block, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather(
    p_k, p_v, p_index, p_k_out, p_v_out,
    k_l, k_s, k_h, v_l, v_s, v_h, x_l, x_r, x_h, kw_l, kw_r, kw_h, vw_l, vw_r, vw_h, n_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_r, i_h, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_r, o_d = i_r.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m_r = o_r < n_rows
    m_rd = m_r[:, None] & (o_d < WIDTH)[None, :]
    b_index = tl.load(p_index + i_l * x_l + o_r * x_r + i_h * x_h, mask=m_r, other=0)[:, None]
    b_k = tl.load(p_k + i_l * k_l + i_h * k_h + b_index * k_s + o_d[None, :], mask=m_rd, other=0.0)
    b_v = tl.load(p_v + i_l * v_l + i_h * v_h + b_index * v_s + o_d[None, :], mask=m_rd, other=0.0)
    tl.store(p_k_out + i_l * kw_l + i_h * kw_h + o_r[:, None] * kw_r + o_d[None, :], b_k, mask=m_rd)
    tl.store(p_v_out + i_l * vw_l + i_h * vw_h + o_r[:, None] * vw_r + o_d[None, :], b_v, mask=m_rd)


def gather_rows(
    keys_LSKd: Tensor, values_LSKd: Tensor, index_LRK: Tensor, keys_out_LRKd: Tensor, values_out_LRKd: Tensor
) -> None:
    """See `longdraft.kernels.selection.gather_rows`."""
    n_layers, n_rows, n_kv = index_LRK.shape
    width = keys_LSKd.shape[-1]
    tensors = keys_LSKd, values_LSKd, keys_out_LRKd, values_out_LRKd
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "rows must lie together within a head"
    block_d = triton.next_power_of_2(width)
    block = max(1, 2048 // block_d)
    kernel: Any = _gather[(triton.cdiv(n_rows, block), n_kv, n_layers)]
    kernel(
        keys_LSKd, values_LSKd, index_LRK, keys_out_LRKd, values_out_LRKd,
        *keys_LSKd.stride()[:3], *values_LSKd.stride()[:3], *index_LRK.stride(),
        *keys_out_LRKd.stride()[:3], *values_out_LRKd.stride()[:3], n_rows,
        WIDTH=width, BLOCK=block, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
