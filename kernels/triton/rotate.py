"""kernels/rotate.py in Triton: one launch.

A program holds some heads of one row as two tiles, their first and their second halves. Heads of v are only copied.

Shapes: B slots, T rows, N heads of q, k and v together, n of q and k, K of k and of v, d head width, F = d / 2, S cache
capacity. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.rotate import HeadNorms, LayerCache

TILE = 512  # numbers in a tile


@triton.jit
def _rotate(
    p_x, p_cos, p_sin, p_out, p_k, p_v, p_length, p_q_norm, p_k_norm,
    x_b, x_t, x_n, c_b, c_t, s_b, s_t, s_half, k_b, k_s, k_h, v_b, v_s, v_h, length_b,
    n_rows, n_queries, n_rotated, n_heads, capacity, eps,
    NORM: tl.constexpr, APPEND: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    i_b, i_t = (i_row // n_rows).to(tl.int64), (i_row % n_rows).to(tl.int64)
    o_n, o_f = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_F)[None]
    m_f = o_f < HALF
    m_there, m_rotated, is_key = m_f & (o_n < n_heads), m_f & (o_n < n_rotated), o_n >= n_queries
    p_first = p_x + i_b * x_b + i_t * x_t + o_n * x_n + o_f
    b_first = tl.load(p_first, mask=m_there, other=0.0)
    b_second = tl.load(p_first + HALF, mask=m_there, other=0.0)
    dtype = b_first.dtype
    row = i_t
    if APPEND:
        row += tl.load(p_length + i_b * length_b).to(tl.int64)
        p_value = p_v + i_b * v_b + row * v_s + (o_n - n_rotated) * v_h + o_f
        fits = row < capacity  # a row beyond would be another slot's
        m_value = m_there & (o_n >= n_rotated) & fits
        tl.store(p_value, b_first, mask=m_value)
        tl.store(p_value + HALF, b_second, mask=m_value)
    b_first, b_second = b_first.to(tl.float32), b_second.to(tl.float32)
    if NORM:
        b_mean = tl.sum(b_first * b_first + b_second * b_second, 1) / (2 * HALF)
        b_scale = tl.rsqrt(b_mean + eps)[:, None]
        b_q_norm = tl.load(p_q_norm + o_f, mask=m_f, other=0.0), tl.load(p_q_norm + HALF + o_f, mask=m_f, other=0.0)
        b_k_norm = tl.load(p_k_norm + o_f, mask=m_f, other=0.0), tl.load(p_k_norm + HALF + o_f, mask=m_f, other=0.0)
        b_first *= b_scale * tl.where(is_key, b_k_norm[0], b_q_norm[0]).to(tl.float32)
        b_second *= b_scale * tl.where(is_key, b_k_norm[1], b_q_norm[1]).to(tl.float32)
        b_first, b_second = b_first.to(dtype).to(tl.float32), b_second.to(dtype).to(tl.float32)
    p_sines = p_sin + i_b * s_b + i_t * s_t + o_f
    b_cos = tl.load(p_cos + i_b * c_b + i_t * c_t + o_f, mask=m_f, other=0.0).to(tl.float32)
    b_sin_first = tl.load(p_sines, mask=m_f, other=0.0).to(tl.float32)
    b_sin_second = tl.load(p_sines + s_half, mask=m_f, other=0.0).to(tl.float32)
    b_turned_first = ((b_first * b_cos).to(dtype).to(tl.float32) + b_second * b_sin_first).to(dtype)
    b_turned_second = ((b_second * b_cos).to(dtype).to(tl.float32) + b_first * b_sin_second).to(dtype)
    p_turned = p_out + (i_row.to(tl.int64) * n_rotated + o_n) * (2 * HALF) + o_f
    tl.store(p_turned, b_turned_first, mask=m_rotated)
    tl.store(p_turned + HALF, b_turned_second, mask=m_rotated)
    if APPEND:
        p_key = p_k + i_b * k_b + row * k_s + (o_n - n_queries) * k_h + o_f
        m_key = m_rotated & is_key & fits
        tl.store(p_key, b_turned_first, mask=m_key)
        tl.store(p_key + HALF, b_turned_second, mask=m_key)


def rotate(
    x_BTNd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    norms: HeadNorms | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """See `longdraft.kernels.rotate.rotate`."""
    n_slots, n_rows, n_heads, width = x_BTNd.shape
    keys, values, lengths = cache or (x_BTNd, x_BTNd, x_BTNd)  # not used without a cache
    n_kv = 0 if cache is None else keys.shape[2]
    n_rotated = n_heads - n_kv
    n_queries = n_rotated - n_kv if norms is None else norms.n_queries
    q_norm, k_norm, eps = (x_BTNd, x_BTNd, 0.0) if norms is None else (norms.q_d, norms.k_d, norms.eps)
    lie_together = x_BTNd, cos_BT11F, sin_BT12F, keys, values, q_norm, k_norm
    assert all(x.stride(-1) == 1 for x in lie_together), "heads must be contiguous"
    out_BTnd = torch.empty((n_slots, n_rows, n_rotated, width), dtype=x_BTNd.dtype, device=x_BTNd.device)
    if n_slots * n_rows == 0:
        return out_BTnd
    cos, sin = (table.expand(n_slots, n_rows, -1, -1, -1) for table in (cos_BT11F, sin_BT12F))
    block_f = triton.next_power_of_2(width // 2)
    block_n = max(1, min(TILE // block_f, triton.next_power_of_2(n_heads)))
    kernel: Any = _rotate[(n_slots * n_rows, -(-n_heads // block_n))]
    kernel(
        x_BTNd, cos, sin, out_BTnd, keys, values, lengths, q_norm, k_norm,
        *x_BTNd.stride()[:3], *cos.stride()[:2], *sin.stride()[:2], sin.stride(3),
        keys.stride(0), *keys.stride()[1:3], values.stride(0), *values.stride()[1:3], lengths.stride(0),
        n_rows, n_queries, n_rotated, n_heads, keys.shape[1], eps,
        NORM=norms is not None, APPEND=cache is not None, HALF=width // 2, BLOCK_N=block_n, BLOCK_F=block_f,
        num_warps=4,
    )  # fmt: skip
    return out_BTnd
