"""Tree attention in Triton in which a row has the bits that plain decoding would give it.

Plain decoding reads a token's predecessors as committed keys; a tree has the last of them among its own rows, in
another order. So everything here depends only on a row's position p: its keys are added in the order of their
positions, and p decides which of them are added by 1 and which by 2.

1. Keys before `_tail(p)` are committed, however deep the row is, because a pass has at most 128 rows. A program takes a
   tile of 64 queries and a run of keys, in blocks of 64. A block that a row does not read leaves its sums unchanged.
   Without a window, later runs are longer: eight runs each time the position doubles, so that short contexts have
   enough programs and long ones not too many parts. With a window all runs have one length.
2. The up to 191 keys from there to p are gathered in their order for each row: committed ones, then its ancestors.
3. The runs of 1 are added to 2 in their order, 16 at a time, by a second kernel.

Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, M = G * T, d head
width. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.triton.tree_attention import LOG2E, NO_WINDOW, _add, _device
from longdraft.kernels.triton.tuning import at_least_16

BLOCK = tl.constexpr(64)  # keys at a time
MOST_ROWS = tl.constexpr(128)  # of a pass
QUERIES, RUN = 64, 256  # queries of a program; keys of the first runs
AT_ONCE = tl.constexpr(16)  # runs that are added at a time


@triton.jit
def _tail(position):
    """Position of the first key that is gathered, a multiple of BLOCK."""
    return tl.maximum(position - MOST_ROWS + 1, 0) // BLOCK * BLOCK


@triton.jit
def _run(i, WINDOW: tl.constexpr, RUN: tl.constexpr):
    """Position of the first key of run i, and of the first one after it."""
    b_doubled = i * 0 + 2 if WINDOW else tl.maximum(i // 8 - 1, 0)
    b_length = RUN << b_doubled
    b_begin = b_length * (i if WINDOW else i - 8 * b_doubled)
    return b_begin, b_begin + b_length


@triton.jit
def _store(p_out, p_lse, b_most, b_sum, b_out, o_run, o_d, m_m, scale, WIDTH: tl.constexpr):
    """Write a run's mean of the values and its log-sum-exp, base 2; -inf where nothing was read."""
    b_some = tl.where(b_sum == 0.0, 1.0, b_sum)
    m_md = m_m[:, None] & (o_d < WIDTH)[None, :]
    tl.store(p_out + o_run[:, None] * WIDTH + o_d[None, :], b_out / b_some[:, None], mask=m_md)
    tl.store(p_lse + o_run, tl.where(b_sum == 0.0, float("-inf"), b_most * scale + tl.log2(b_some)), mask=m_m)


# Do not specialize on numbers that change from pass to pass: each special value would be another compilation.
@triton.jit(do_not_specialize=["n_rows", "group", "n_kv", "n_runs", "window", "tree"])
def _parts(
    p_q, p_k, p_v, p_path, p_depth, p_length, p_out, p_lse, scale,
    q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, group, n_kv, n_runs, window, tree,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, RUN: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Runs, the longest first, and then tails. tree: whether there is a path; not a constant, so that a chain is
    computed by the same instructions."""
    i_run = n_runs - 1 - tl.program_id(1)
    if i_run >= 0:
        _run_of_queries(
            i_run, p_q, p_k, p_v, p_depth, p_length, p_out, p_lse, scale,
            q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, group, n_kv, n_runs, window,
            WINDOW, WIDTH, QUERIES, RUN, BLOCK_D,
        )  # fmt: skip
    else:
        i_t = (-1 - i_run) * tl.num_programs(0) + tl.program_id(0)
        if i_t < n_rows:
            _tail_of_row(
                i_t, p_q, p_k, p_v, p_path, p_depth, p_length, p_out, p_lse, scale,
                q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, group, n_kv, n_runs, window, tree,
                WINDOW, WIDTH, BLOCK_G, BLOCK_D,
            )  # fmt: skip


@triton.jit
def _run_of_queries(
    i_run, p_q, p_k, p_v, p_depth, p_length, p_out, p_lse, scale,
    q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, group, n_kv, n_runs, window,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of QUERIES queries of one key head over one run of keys before their tails."""
    i_m, i_bk = tl.program_id(0), tl.program_id(2)
    i_b, i_k, n_m = (i_bk // n_kv).to(tl.int64), i_bk % n_kv, n_rows * group
    o_m, o_j, o_d = i_m * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < n_m, o_d < WIDTH
    o_t, o_h = o_m % n_rows, i_k * group + o_m // n_rows
    length = tl.load(p_length + i_b).to(tl.int32)
    b_position = length + tl.load(p_depth + i_b * n_rows + o_t, mask=m_m, other=0)
    b_tail = tl.where(m_m, _tail(b_position), 0)
    begin, end = _run(i_run, WINDOW, RUN)
    end = tl.minimum(end, tl.max(b_tail, 0))
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(length - window + 1, 0) // BLOCK * BLOCK)
    if begin < end:  # the merge skips all other runs
        p_row = p_q + i_b * q_b + o_t[:, None] * q_t + o_h[:, None] * q_h
        b_q = tl.load(p_row + o_d[None, :], mask=m_m[:, None] & m_d[None, :], other=0.0)
        p_kj = p_k + i_b * k_b + i_k * k_h + o_j.to(tl.int64)[:, None] * k_s + o_d[None, :]
        p_vj = p_v + i_b * v_b + i_k * v_h + o_j.to(tl.int64)[:, None] * v_s + o_d[None, :]
        b_most = tl.full([QUERIES], float("-inf"), tl.float32)
        b_sum = tl.zeros([QUERIES], tl.float32)
        b_out = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        for start in range(begin, end, BLOCK):
            b_k = tl.load(p_kj + tl.cast(start, tl.int64) * k_s, mask=m_d[None, :], other=0.0)
            b_v = tl.load(p_vj + tl.cast(start, tl.int64) * v_s, mask=m_d[None, :], other=0.0)
            # Selected afterwards: rounding and fused operations would change the row's state.
            m_row = start < b_tail
            m_open = m_row[:, None]
            if WINDOW:
                m_open = m_open & ((start + o_j)[None, :] > (b_position - window)[:, None])
            b_s = tl.where(m_open, tl.dot(b_q, tl.trans(b_k)), float("-inf"))
            b_next, b_more, b_added = _add(b_most, b_sum, b_out, b_s, b_v, scale, True, "tf32")
            b_most, b_sum = tl.where(m_row, b_next, b_most), tl.where(m_row, b_more, b_sum)
            b_out = tl.where(m_row[:, None], b_added, b_out)
        o_run = ((i_bk * (n_runs + 1) + i_run) * n_m + o_m).to(tl.int64)
        _store(p_out, p_lse, b_most, b_sum, b_out, o_run, o_d, m_m, scale, WIDTH)


@triton.jit
def _tail_of_row(
    i_t, p_q, p_k, p_v, p_path, p_depth, p_length, p_out, p_lse, scale,
    q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, group, n_kv, n_runs, window, tree,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attention of one row's queries of one key head over the row's tail, stored as the last run."""
    i_bk = tl.program_id(2)
    i_b, i_k = (i_bk // n_kv).to(tl.int64), i_bk % n_kv
    o_g, o_j, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    m_g, m_d = o_g < group, o_d < WIDTH
    length = tl.load(p_length + i_b).to(tl.int32)
    position = length + tl.load(p_depth + i_b * n_rows + i_t)
    p_row = p_q + i_b * q_b + i_t * q_t + (i_k * group + o_g)[:, None] * q_h
    b_q = tl.load(p_row + o_d[None, :], mask=m_g[:, None] & m_d[None, :], other=0.0)
    b_most = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(_tail(position), position + 1, BLOCK):
        b_row = start + o_j  # a key's position, then its row in the cache
        m_open = b_row <= position
        if WINDOW:
            m_open = m_open & (b_row > position - window)
        b_own = b_row - length
        m_own = m_open & (b_own >= 0) & (tree != 0)
        p_ancestors = p_path + (i_b * n_rows + i_t) * n_rows
        b_row = tl.where(m_own, length + tl.load(p_ancestors + b_own, mask=m_own, other=0), b_row)
        m_jd, b_row = m_open[:, None] & m_d[None, :], b_row.to(tl.int64)[:, None]
        b_k = tl.load(p_k + i_b * k_b + i_k * k_h + b_row * k_s + o_d[None, :], mask=m_jd, other=0.0)
        b_v = tl.load(p_v + i_b * v_b + i_k * v_h + b_row * v_s + o_d[None, :], mask=m_jd, other=0.0)
        b_s = tl.where(m_open[None, :], tl.dot(b_q, tl.trans(b_k)), float("-inf"))
        b_most, b_sum, b_out = _add(b_most, b_sum, b_out, b_s, b_v, scale, True, "tf32")
    o_run = ((i_bk * (n_runs + 1) + n_runs) * (n_rows * group) + o_g * n_rows + i_t).to(tl.int64)
    _store(p_out, p_lse, b_most, b_sum, b_out, o_run, o_d, m_g, scale, WIDTH)


@triton.jit(do_not_specialize=["n_rows", "group", "n_kv", "n_runs", "window"])
def _merge(
    p_runs, p_lses, p_depth, p_length, p_out, p_lse, n_rows, group, n_kv, n_runs, window,
    WINDOW: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the runs of one row of one head to its tail, in their order."""
    i_m, i_bk, n_m = tl.program_id(0), tl.program_id(1), n_rows * group
    i_b, i_k, i_t, i_h = i_bk // n_kv, i_bk % n_kv, i_m % n_rows, i_m // n_rows
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < WIDTH
    length = tl.load(p_length + i_b).to(tl.int32)
    position = length + tl.load(p_depth + i_b * n_rows + i_t)
    i_first = i_bk.to(tl.int64) * (n_runs + 1) * n_m + i_m
    i_run = i_first + n_runs.to(tl.int64) * n_m
    most = tl.load(p_lses + i_run)
    total = tl.where(most == float("-inf"), 0.0, 1.0)
    b_out = tl.load(p_runs + i_run * WIDTH + o_d, mask=m_d, other=0.0) * total
    tail = _tail(position)
    first = tl.maximum(length - window + 1, 0) // BLOCK * BLOCK if WINDOW else 0
    for i in range(0, n_runs, AT_ONCE):
        o_i = i + tl.arange(0, AT_ONCE)
        b_begin, b_end = _run(o_i, WINDOW, RUN)
        m_i = tl.maximum(b_begin, first) < tl.minimum(b_end, tail)  # others may not have been written
        o_run = i_first + o_i.to(tl.int64) * n_m
        b_lse = tl.load(p_lses + o_run, mask=m_i, other=float("-inf"))
        b_run = tl.load(p_runs + o_run[:, None] * WIDTH + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0)
        next_most = tl.maximum(most, tl.max(b_lse, 0))
        base = tl.where(next_most == float("-inf"), 0.0, next_most)
        keep, b_share = tl.exp2(most - base), tl.exp2(b_lse - base)
        total, b_out = total * keep + tl.sum(b_share, 0), b_out * keep + tl.sum(b_run * b_share[:, None], 0)
        most = next_most
    some = tl.where(total == 0.0, 1.0, total)
    i_row = (i_b * n_rows + i_t) * (n_kv * group) + i_k * group + i_h
    tl.store(p_out + i_row.to(tl.int64) * WIDTH + o_d, b_out / some, mask=m_d)
    tl.store(p_lse + i_row, tl.where(total == 0.0, float("-inf"), (most + tl.log2(some)) / LOG2E))


def count_runs(capacity: int, windowed: bool) -> int:
    """How many runs a cache of so many rows has; see `_run`."""
    last = (capacity - 1) // RUN
    doubled = 2 if windowed else max(last.bit_length() - 4, 0)
    return 1 + (last >> doubled) + (0 if windowed else 8 * doubled)


def partial_shapes(
    queries: Sequence[int], n_kv: int, capacity: int, windowed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the partial results, both fp32: for each run and the tail the outputs, and the log-sum-exps.

    queries: B, T, H and d. capacity: rows of the cache in a slot. windowed: whether the layer has a window.
    """
    n_slots, n_rows, n_heads, width = queries
    lses = n_slots * n_kv, count_runs(capacity, windowed) + 1, n_heads // n_kv * n_rows
    return (*lses, width), lses


def stages(block_d: int, fast_memory: int) -> int:
    """How many blocks of keys and values a program holds beside its queries, at most three, in `fast_memory` bytes of
    shared memory. On sm_90 only three let it fetch the next block while it multiplies one."""
    return max(1, min(3, (fast_memory // (2 * block_d) - QUERIES) // (2 * BLOCK.value)))


def tree_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    path_BTT: Tensor | None,
    depth_BT: Tensor,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.tree_attention.tree_attention`. Lengths are read only on the device.

    Args:
        q_BTHd, keys_BSKd, values_BSKd: in half precision, of any strides but the last, which is 1.
        path_BTT: int32, for each row the rows of the pass that it reads, in the order of their depths, itself last;
            None for a chain. A padding row reads row 0.
        depth_BT: int32, how many ancestors each row has in the pass.
    Returns: output [B, T, H, d] in q's dtype, natural log-sum-exps fp32 [B, T, H].
    """
    n_slots, n_rows, n_heads, width = q_BTHd.shape
    n_kv, group = keys_BSKd.shape[2], n_heads // keys_BSKd.shape[2]
    rows, block_d = group * n_rows, at_least_16(width)
    shapes_of_parts = partial_shapes(q_BTHd.shape, n_kv, keys_BSKd.shape[1], window is not None)
    runs, lses = (torch.empty(shape, dtype=torch.float32, device=q_BTHd.device) for shape in shapes_of_parts)
    n_runs = runs.shape[1] - 1
    out_BTHd = torch.empty((n_slots, n_rows, n_heads, width), dtype=q_BTHd.dtype, device=q_BTHd.device)
    lse_BTH = torch.empty((n_slots, n_rows, n_heads), dtype=torch.float32, device=q_BTHd.device)
    strides = *q_BTHd.stride()[:3], *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3]
    numbers = n_rows, group, n_kv, n_runs, NO_WINDOW if window is None else window
    shapes = {"WINDOW": window is not None, "WIDTH": width, "BLOCK_D": block_d}
    scale, fast_memory = width**-0.5 * LOG2E.value, _device(q_BTHd.device)[1]
    n_tiles = -(-rows // QUERIES)
    parts_kernel: Any = _parts[(n_tiles, n_runs + -(-n_rows // n_tiles), n_slots * n_kv)]
    parts_kernel(
        q_BTHd, keys_BSKd, values_BSKd, depth_BT if path_BTT is None else path_BTT, depth_BT, lengths_B, runs, lses,
        scale, *strides, *numbers, int(path_BTT is not None), **shapes, QUERIES=QUERIES, RUN=RUN,
        BLOCK_G=at_least_16(group), num_warps=4 if block_d <= 128 else 8, num_stages=stages(block_d, fast_memory),
    )  # fmt: skip
    merge_kernel: Any = _merge[(rows, n_slots * n_kv)]
    merge_kernel(
        runs, lses, depth_BT, lengths_B, out_BTHd, lse_BTH, *numbers, **shapes, RUN=RUN, num_warps=4
    )  # fmt: skip
    return out_BTHd, lse_BTH
