"""The gradient of segment attention's queries in Triton, for frozen keys and values, which need none.

A block takes three products instead of the five of a whole backward, and nothing of the size of K and V is written. A
program owns a block of one segment's queries of one head and sums over the keys that they read. No two programs write
the same memory, so the bits are always the same. It reads q, K and V in place, not the copies that lay segments end to
end for the forward pass.

Shapes: N query rows, M key rows, S segments, P queries in segments, H query heads, K key/value heads, d head width.
Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block; q_, k_, v_, x_, g_, w_ are strides of queries, keys,
values, the output, its gradient and the result.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add(
    b_dq, b_q, b_g, b_lse, b_delta, o_last, p_k, p_v, k_m, v_m, begin, end, stop, scale2, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """b_dq plus the contribution of the segment's keys [begin, end), not yet scaled. No key from `stop` on is read.

    MASKED: False if every query of the block reads all of these keys.
    """
    o_d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_nd = (o_d < WIDTH)[None, :]
        if MASKED:
            m_nd = m_nd & (o_n < stop)[:, None]
        o_row = o_n.to(tl.int64)[:, None]
        b_k = tl.load(p_k + o_row * k_m + o_d[None, :], mask=m_nd, other=0.0)
        b_v = tl.load(p_v + o_row * v_m + o_d[None, :], mask=m_nd, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale2
        b_p = tl.exp2(b_s - b_lse[:, None])
        if MASKED:
            m_open = o_n[None, :] <= o_last[:, None]
            if WINDOW:
                m_open = m_open & (o_n[None, :] > o_last[:, None] - window)
            b_p = tl.where(m_open, b_p, 0.0)
        b_dp = tl.dot(b_g, tl.trans(b_v), input_precision="ieee")
        b_ds = b_p * (b_dp - b_delta[:, None])
        b_dq += tl.dot(b_ds.to(b_k.dtype), b_k, input_precision="ieee")
    return b_dq


@triton.jit
def _query_gradient(
    p_q, p_k, p_v, p_out, p_lse, p_grad, p_dq, p_spans, p_borders,
    q_n, q_h, k_m, k_h, v_m, v_h, x_n, x_h, g_n, g_h, w_n, w_h, lse_h, n_blocks, window, scale,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_s = i // n_blocks
    i_m = n_blocks - 1 - i % n_blocks  # a segment's last queries read the most keys, so they start first
    q_start, q_stop = tl.load(p_spans + i_s * 4), tl.load(p_spans + i_s * 4 + 1)
    k_start, k_stop = tl.load(p_spans + i_s * 4 + 2), tl.load(p_spans + i_s * 4 + 3)
    n_queries = q_stop - q_start
    low = i_m * BLOCK_M
    if low >= n_queries:
        return
    ahead = k_stop - k_start - n_queries  # keys before the first query's own
    o_m, o_d = low + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_last = ahead + o_m
    m_m = o_m < n_queries
    m_md = m_m[:, None] & (o_d < WIDTH)[None, :]
    o_row = (q_start + o_m).to(tl.int64)[:, None]
    b_q = tl.load(p_q + i_h * q_h + o_row * q_n + o_d[None, :], mask=m_md, other=0.0)
    b_g = tl.load(p_grad + i_h * g_h + o_row * g_n + o_d[None, :], mask=m_md, other=0.0)
    b_out = tl.load(p_out + i_h * x_h + o_row * x_n + o_d[None, :], mask=m_md, other=0.0)
    b_delta = tl.sum(b_out.to(tl.float32) * b_g.to(tl.float32), 1)
    # An infinite log-sum-exp gives rows behind the segment's last weights of zero, without a mask for them.
    p_lses = p_lse + i_h * lse_h + tl.load(p_borders + i_s) + o_m
    b_lse = tl.load(p_lses, mask=m_m, other=float("inf")) * LOG2E

    # Keys [begin, stop) are read by some of the queries, keys [full, behind) by all. Both `full` and `behind` are whole
    # blocks from `begin`.
    high = tl.minimum(low + BLOCK_M, n_queries) - 1
    stop = ahead + high + 1
    begin = tl.maximum(ahead + low - window + 1, 0) if WINDOW else 0
    closed = tl.maximum(ahead + high - window + 1 - begin, 0) if WINDOW else 0
    full = begin + tl.cdiv(closed, BLOCK_N) * BLOCK_N
    behind = tl.maximum(begin + (ahead + low + 1 - begin) // BLOCK_N * BLOCK_N, full)
    p_k0 = p_k + k_start.to(tl.int64) * k_m + i_h // GROUP * k_h
    p_v0 = p_v + k_start.to(tl.int64) * v_m + i_h // GROUP * v_h
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW:
        b_dq = _add(
            b_dq, b_q, b_g, b_lse, b_delta, o_last, p_k0, p_v0, k_m, v_m, begin, tl.minimum(full, stop), stop,
            scale * LOG2E, window,
            MASKED=tl.constexpr(True), WINDOW=WINDOW, WIDTH=WIDTH, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
        )  # fmt: skip
    b_dq = _add(
        b_dq, b_q, b_g, b_lse, b_delta, o_last, p_k0, p_v0, k_m, v_m, full, behind, stop,
        scale * LOG2E, window, MASKED=tl.constexpr(False), WINDOW=WINDOW, WIDTH=WIDTH, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    b_dq = _add(
        b_dq, b_q, b_g, b_lse, b_delta, o_last, p_k0, p_v0, k_m, v_m, behind, stop, stop,
        scale * LOG2E, window, MASKED=tl.constexpr(True), WINDOW=WINDOW, WIDTH=WIDTH, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    p_rows = p_dq + i_h * w_h + o_row * w_n + o_d[None, :]
    tl.store(p_rows, (b_dq * scale).to(p_dq.dtype.element_ty), mask=m_md)


def blocks(width: int) -> tuple[int, int]:
    """Queries and keys per block for this head width: as many as fit 99 KiB of a processor's shared memory, with keys
    and values twice, since the next ones are fetched meanwhile."""
    return (128, 64) if width <= 128 else (64, 16)


def query_gradient(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    out_NHd: Tensor,
    lse_HP: Tensor,
    grad_NHd: Tensor,
    spans_S4: Tensor,
    borders: Tensor,
    most_queries: int,
    window: int | None,
) -> Tensor:
    """scale * sum over the keys of P * (dP - delta) * K: flash-attention 2 (arXiv 2307.08691), algorithm 2, line 15.

    See `longdraft.kernels.segment_attention.query_gradient_reference`. Segments are read on the device alone.

    Args:
        q_NHd, k_MKd, v_MKd, out_NHd, grad_NHd: the inputs of the forward pass, its output and the output's gradient, of
            any strides.
        lse_HP: fp32, natural log-sum-exps of the scaled scores, with segments end to end.
        spans_S4, borders, most_queries: `spans`, `q_borders`, `most_queries` of the segments' `Layout`.
        window: as for `segment_attention`.
    Returns: [N, H, d] in q's dtype; zeros for rows in no segment.
    """
    # The last stride may be 0: the gradient of a sum is one number, expanded.
    inputs = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_NHd, k_MKd, v_MKd, out_NHd, lse_HP, grad_NHd)]
    q_NHd, k_MKd, v_MKd, out_NHd, lse_HP, grad_NHd = inputs
    n_heads, width = q_NHd.shape[1:]
    # Every row of a segment is written; the others stay zero.
    make = torch.empty if lse_HP.shape[1] == len(q_NHd) else torch.zeros
    dq_NHd = make(q_NHd.shape, dtype=q_NHd.dtype, device=q_NHd.device)
    block_m, block_n = blocks(width)
    n_blocks = triton.cdiv(most_queries, block_m)
    kernel: Any = _query_gradient[(n_blocks * len(spans_S4), n_heads)]  # its launch options are not in its signature
    kernel(
        q_NHd, k_MKd, v_MKd, out_NHd, lse_HP, grad_NHd, dq_NHd, spans_S4, borders,
        *q_NHd.stride()[:2], *k_MKd.stride()[:2], *v_MKd.stride()[:2], *out_NHd.stride()[:2], *grad_NHd.stride()[:2],
        *dq_NHd.stride()[:2], lse_HP.stride(0), n_blocks, 0 if window is None else window, width**-0.5,
        WINDOW=window is not None, GROUP=n_heads // k_MKd.shape[1], WIDTH=width,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=max(16, triton.next_power_of_2(width)),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return dq_NHd
