"""Tree attention in Triton, the same contract as kernels/tree_attention.py and its log-sum-exp.

Flash-decoding: the keys are cut into `n_splits` runs, each read by its own program for all rows of the pass and all
query heads of one key head together (query head g * T + t is row t of head g of the group), so that K and V are read
once, never expanded; a second kernel merges the runs by log-sum-exp. The cut follows the lengths on the device, so the
grid depends on shapes alone and the launch can be captured in a graph. Ancestors are bits: two int64 words a row.

Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, M = H / K * T, P runs, d head
width. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 1 << 30


@triton.jit
def _runs(
    p_q, p_k, p_v, p_bits, p_depth, p_length, p_out, p_lse, scale,
    q_b, q_t, q_h, k_b, k_s, k_h, v_b, v_s, v_h, n_rows, n_own, n_kv, n_splits, window,
    TREE: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One run of keys for one block of the rows x group of one key head."""
    i_m, i_split, i_bk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_k = i_bk // n_kv, i_bk % n_kv
    n_m = n_rows * GROUP
    o_m, o_d = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < n_m, o_d < WIDTH
    o_t, o_h = o_m % n_rows, i_k * GROUP + o_m // n_rows
    m_md = m_m[:, None] & m_d[None, :]
    b_q = tl.load(p_q + i_b * q_b + o_t[:, None] * q_t + o_h[:, None] * q_h + o_d[None, :], mask=m_md, other=0.0)
    length = tl.load(p_length + i_b).to(tl.int32)
    if TREE:
        b_low = tl.load(p_bits + (i_b * n_rows + o_t) * 2, mask=m_m, other=0)
        b_high = tl.load(p_bits + (i_b * n_rows + o_t) * 2 + 1, mask=m_m, other=0)
    if WINDOW:
        b_depth = tl.load(p_depth + i_b * n_rows + o_t, mask=m_m, other=0)

    # No row of the pass reads below `first`: the least deep row of a window is a root, of depth 0.
    first = tl.maximum(length - window + 1, 0) if WINDOW else 0
    stop = length + n_own  # the pass's own rows lie behind the committed ones, or are not read at all
    run = tl.cdiv(tl.cdiv(stop - first, n_splits), BLOCK_N) * BLOCK_N
    begin = first + i_split * run
    end = tl.minimum(begin + run, stop)

    b_most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        m_nd = m_n[:, None] & m_d[None, :]
        o_kn, o_vn = o_n.to(tl.int64)[:, None] * k_s, o_n.to(tl.int64)[:, None] * v_s
        b_k = tl.load(p_k + i_b * k_b + i_k * k_h + o_kn + o_d[None, :], mask=m_nd, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        o_own = o_n - length  # place among the pass's own rows, negative for committed ones
        m_old = o_own < 0
        o_bit = tl.maximum(o_own, 0)
        if TREE:
            b_word = tl.where(o_bit[None, :] < 64, b_low[:, None], b_high[:, None])
            m_own = ((b_word >> (o_bit & 63).to(tl.int64)[None, :]) & 1) == 1
        else:
            m_own = o_bit[None, :] <= o_t[:, None]
        m_open = m_n[None, :] & m_m[:, None] & (m_old[None, :] | m_own)
        if WINDOW:
            b_own = tl.load(p_depth + i_b * n_rows + o_bit, mask=m_n & (o_own >= 0), other=0)
            b_place = tl.where(m_old, o_own, b_own)
            m_open = m_open & (b_place[None, :] > b_depth[:, None] - window)
        b_s = tl.where(m_open, b_s, float("-inf"))
        b_next = tl.maximum(b_most, tl.max(b_s, 1))
        b_base = tl.where(b_next == float("-inf"), 0.0, b_next)  # nothing read yet: no difference of infinities
        b_p = tl.exp2(b_s - b_base[:, None])
        b_keep = tl.exp2(b_most - b_base)
        b_v = tl.load(p_v + i_b * v_b + i_k * v_h + o_vn + o_d[None, :], mask=m_nd, other=0.0)
        b_out = b_out * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_most = b_next

    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_most + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum)))
    o_run = ((i_bk * n_splits + i_split) * n_m + o_m).to(tl.int64)
    tl.store(p_out + o_run[:, None] * WIDTH + o_d[None, :], b_out, mask=m_md)
    tl.store(p_lse + o_run, b_lse, mask=m_m)


@triton.jit
def _merge(
    p_runs, p_lses, p_out, p_lse, n_rows, n_kv, n_splits,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All runs of one row of one head into the output, by their log-sum-exps (base 2)."""
    i_m, i_bk = tl.program_id(0), tl.program_id(1)
    n_m = n_rows * GROUP
    i_b, i_k = i_bk // n_kv, i_bk % n_kv
    i_t, i_h = i_m % n_rows, i_k * GROUP + i_m // n_rows
    o_p, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    m_p, m_d = o_p < n_splits, o_d < WIDTH
    o_run = ((i_bk * n_splits + o_p) * n_m + i_m).to(tl.int64)
    b_lse = tl.load(p_lses + o_run, mask=m_p, other=float("-inf"))
    most = tl.max(b_lse, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    b_share = tl.exp2(b_lse - base)
    total = tl.sum(b_share, 0)
    b_runs = tl.load(p_runs + o_run[:, None] * WIDTH + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_out = tl.sum(b_runs * b_share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    i_row = (i_b * n_rows + i_t) * (n_kv * GROUP) + i_h
    tl.store(p_out + i_row * WIDTH + o_d, b_out, mask=m_d)
    tl.store(
        p_lse + i_row,
        tl.where(total == 0.0, float("-inf"), (base + tl.log2(tl.where(total == 0.0, 1.0, total))) / LOG2E),
    )


def choose_splits(n_programs: int, capacity: int, n_processors: int, block_n: int) -> int:
    """Runs of keys, a power of two: enough programs for every processor twice, none of under four blocks."""
    n_splits = 1
    while n_splits < 64 and n_programs * n_splits < 2 * n_processors and capacity >= 8 * n_splits * block_n:
        n_splits *= 2
    return n_splits


def tree_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    bits_BT2: Tensor,
    depth_BT: Tensor,
    is_tree: bool = True,
    window: int | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.tree_attention.tree_attention`; lengths are read on the device alone.

    Args:
        q_BTHd, keys_BSKd, values_BSKd: of any strides but the last, which is 1.
        bits_BT2, depth_BT: from `pack_tree`. is_tree: False where they are a chain's, whose mask needs no bits.
        n_splits: runs of keys; None: from the shapes and the device.
    Returns: output [B, T, H, d] in q's dtype, log-sum-exp fp32 [B, T, H] (natural; -inf where nothing is read).
    """
    return _attend(q_BTHd, keys_BSKd, values_BSKd, lengths_B, (bits_BT2, depth_BT), is_tree, True, window, n_splits)


def cross_attention(
    q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor, n_splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.cross_attention.cross_attention`: as `tree_attention`, but no row of the pass is read."""
    nothing = lengths_B, lengths_B  # in the place of ancestors and depths, which are not read either
    return _attend(q_BTHd, keys_BSKd, values_BSKd, lengths_B, nothing, False, False, None, n_splits)


def _attend(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree: tuple[Tensor, Tensor],
    is_tree: bool,
    own: bool,
    window: int | None,
    n_splits: int | None,
) -> tuple[Tensor, Tensor]:
    n_slots, n_rows, n_heads, width = q_BTHd.shape
    n_kv = keys_BSKd.shape[2]
    group, capacity = n_heads // n_kv, keys_BSKd.shape[1]
    for name, tensor in (("queries", q_BTHd), ("keys", keys_BSKd), ("values", values_BSKd)):
        assert tensor.stride(-1) == 1, f"{name} must lie together within a head"
    block_d = max(16, triton.next_power_of_2(width))
    rows: int = n_rows * group
    block_m = min(128 if block_d <= 128 else 64, max(16, 1 << (rows - 1).bit_length()))
    block_n = 64 if block_d <= 128 else 32
    n_blocks = -(-rows // block_m)
    if n_splits is None:
        reach = capacity if window is None else min(capacity, window + n_rows)
        n_splits = choose_splits(n_blocks * n_slots * n_kv, reach, _processors(q_BTHd.device), block_n)
    runs = torch.empty((n_slots * n_kv, n_splits, n_rows * group, width), dtype=torch.float32, device=q_BTHd.device)
    lses = torch.empty(runs.shape[:3], dtype=torch.float32, device=q_BTHd.device)
    out_BTHd = torch.empty((n_slots, n_rows, n_heads, width), dtype=q_BTHd.dtype, device=q_BTHd.device)
    lse_BTH = torch.empty((n_slots, n_rows, n_heads), dtype=torch.float32, device=q_BTHd.device)
    runs_kernel: Any = _runs[(n_blocks, n_splits, n_slots * n_kv)]  # its launch options are not in its signature
    runs_kernel(
        q_BTHd, keys_BSKd, values_BSKd, *tree, lengths_B, runs, lses, width**-0.5 * LOG2E.value,
        *q_BTHd.stride()[:3], *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3],
        n_rows, n_rows if own else 0, n_kv, n_splits, NO_WINDOW if window is None else window,
        TREE=is_tree, WINDOW=window is not None, GROUP=group, WIDTH=width,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        PRECISION="ieee" if q_BTHd.dtype == torch.float32 else "tf32",
        num_warps=8 if block_m >= 128 else 4, num_stages=2,
    )  # fmt: skip
    merge_kernel: Any = _merge[(n_rows * group, n_slots * n_kv)]
    merge_kernel(
        runs, lses, out_BTHd, lse_BTH, n_rows, n_kv, n_splits,
        GROUP=group, WIDTH=width, BLOCK_P=triton.next_power_of_2(n_splits), BLOCK_D=block_d, num_warps=1,
    )  # fmt: skip
    return out_BTHd, lse_BTH


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
