"""kernels/tree_attention.py in Triton, with log-sum-exps: flash-decoding.

The keys are cut into `n_splits` runs. One program reads a run for all rows of the pass and all query heads of a key
head together (its query g * T + t is row t of head g of the group), so K and V are read once and never expanded. A
second kernel merges the runs by log-sum-exp. The cut depends on lengths on the device and the grid only on shapes, so
the launch can be captured in a CUDA graph. A row's ancestors are bits of two int64 words.

Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, M = H / K * T, P runs, d head
width. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.tree import PassPlan
from longdraft.kernels.triton import tuning
from longdraft.kernels.triton.tuning import Choice

LOG2E = tl.constexpr(1.4426950408889634)
ALL_BITS = tl.constexpr(0xFFFFFFFFFFFFFFFF)
MOST_ROWS = tl.constexpr(128)  # of a pass, because ancestors are two words; a row's depth is smaller
NO_WINDOW = 1 << 30
LEAST_KEYS = 8192  # over all slots; below this the choice is not worth measuring


@triton.jit
def _readable(b_low, b_high, ahead, count):
    """A uint64 for each row: bit j is whether the row may read key j of a block of `count` keys, up to 64.

    b_low, b_high: the rows' two words. ahead: how many of the pass's own rows lie before the block. If it is negative,
    the block begins with -ahead committed keys, which are open to all.
    """
    b_all = tl.full(b_low.shape, ALL_BITS, tl.uint64)
    behind, over = tl.minimum(tl.maximum(ahead, 0), 127), tl.minimum(tl.maximum(-ahead, 0), 63).to(tl.uint64)
    rest = (behind & 63).to(tl.uint64)
    b_word = tl.where(behind < 64, (b_low >> rest) | ((b_high << 1) << (63 - rest)), b_high >> rest)
    b_word = (b_word << over) | ((b_all << over) ^ b_all)
    b_there = b_all >> (64 - tl.minimum(tl.maximum(count, 1), 64)).to(tl.uint64)
    return tl.where(ahead <= -64, b_all, b_word) & tl.where(count > 0, b_there, 0)


@triton.jit
def _load(
    p_rows, stride, start, end,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of keys or values from `start` on. MASKED: those from `end` on are zero."""
    o_j, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    p_nd = p_rows + tl.cast(start, tl.int64) * stride + (o_j[:, None] * stride + o_d[None, :])
    if MASKED:
        b_nd = tl.load(p_nd, mask=(start + o_j < end)[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    elif WIDTH < BLOCK_D:
        b_nd = tl.load(p_nd, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        b_nd = tl.load(p_nd)
    return b_nd


@triton.jit
def _masked(
    b_s, b_low, b_high, b_depth, o_t, p_depth, start, end, length, window,
    TREE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Products with BLOCK_N keys from `start` on, -inf where a row does not read them."""
    o_j = tl.arange(0, BLOCK_N)
    o_n = start + o_j
    o_own = o_n - length  # place among the pass's own rows, negative for committed ones
    b_place = o_own
    if TREE:
        tl.static_assert(BLOCK_N <= 64, "the bits of a word")
        b_word = _readable(b_low, b_high, start - length, end - start)
        b_half = tl.where((o_j < 32)[None, :], b_word.to(tl.int32)[:, None], (b_word >> 32).to(tl.int32)[:, None])
        m_open = (b_half & (1 << (o_j & 31))[None, :]) != 0
        if WINDOW:
            b_own = tl.load(p_depth + o_own, mask=(o_own >= 0) & (o_n < end), other=0)
            b_place = tl.where(o_own < 0, o_own, b_own)
    else:
        m_open = o_own[None, :] <= tl.minimum(o_t, end - 1 - length)[:, None]
    if WINDOW:
        m_open = m_open & (b_place[None, :] > b_depth[:, None] - window)
    return tl.where(m_open, b_s, float("-inf"))


@triton.jit
def _add(b_most, b_sum, b_out, b_s, b_v, scale, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Update the maximum of the products (unscaled), the sum and the output with a block of products and values."""
    b_next = tl.maximum(b_most, tl.max(b_s, 1))
    b_base = b_next * scale
    if MASKED:
        b_base = tl.where(b_next == float("-inf"), 0.0, b_base)  # nothing read yet: avoid inf - inf
    b_p = tl.exp2(b_s * scale - b_base[:, None])
    b_keep = tl.exp2(b_most * scale - b_base)
    b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out * b_keep[:, None], input_precision=PRECISION)
    return b_next, b_sum * b_keep + tl.sum(b_p, 1), b_out


# Do not specialize on numbers that change from pass to pass: each special value would be another compilation.
@triton.jit(do_not_specialize=["n_rows", "n_own", "group", "n_kv", "n_splits", "window"])
def _runs(
    p_q, p_k, p_v, p_bits, p_depth, p_length, p_out, p_lse, scale,
    q_b, q_t, q_h, k_b, k_s: tl.constexpr, k_h, v_b, v_s, v_h,
    n_rows, n_own, group, n_kv, n_splits, window,
    TREE: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Attention of a block of one key head's queries (rows x group) over one run of keys.

    AHEAD: whether the products with a block's keys begin before the sum over the block before it.
    """
    i_m, i_split, i_bk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_k = (i_bk // n_kv).to(tl.int64), i_bk % n_kv
    n_m = n_rows * group
    o_m, o_d = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < n_m, o_d < WIDTH
    o_t, o_h = o_m % n_rows, i_k * group + o_m // n_rows
    m_md = m_m[:, None] & m_d[None, :]
    b_q = tl.load(p_q + i_b * q_b + o_t[:, None] * q_t + o_h[:, None] * q_h + o_d[None, :], mask=m_md, other=0.0)
    length = tl.load(p_length + i_b).to(tl.int32)
    b_low, b_high, b_depth = o_t, o_t, o_t  # placeholders that are not read
    if TREE:
        p_words = p_bits + (i_b * n_rows + o_t) * 2
        b_low = tl.load(p_words, mask=m_m, other=0).to(tl.uint64, bitcast=True)
        b_high = tl.load(p_words + 1, mask=m_m, other=0).to(tl.uint64, bitcast=True)
    if WINDOW:
        b_depth = tl.load(p_depth + i_b * n_rows + o_t, mask=m_m, other=0)

    # From 64 queries on, tensor cores of sm_90 multiply asynchronously, unless ptxas sees something other than products
    # write to their accumulator, such as the initial zeros of a loop that may be skipped. Then each product waits for
    # the previous one. So the masked keys come first there, and their loop runs at least once.
    LEAST: tl.constexpr = tl.constexpr(1 if BLOCK_M >= 64 else 0)
    # No row of the pass reads below `first`, which is where the window of a root, of depth 0, begins.
    first = tl.maximum(length - window + 1, 0) if WINDOW else 0
    stop = length + n_own  # the pass's own rows are behind the committed ones; n_own is 0 if they are not read
    run = tl.cdiv(tl.cdiv(stop - first, n_splits), BLOCK_N) * BLOCK_N
    begin = first + i_split * run
    end = tl.minimum(begin + run, stop)
    # Every row reads the keys [full, tail), which are whole blocks of committed keys. `full` is the deepest possible
    # row's, so that a row's order of keys does not depend on the other rows of the pass.
    full = begin
    if WINDOW:
        full += tl.cdiv(tl.maximum(length + MOST_ROWS - window - begin, 0), BLOCK_N) * BLOCK_N
    tail = full + tl.maximum(tl.minimum(end - LEAST, length) - full, 0) // BLOCK_N * BLOCK_N

    # At most the bits of a word, and fewer where an accumulator leaves few registers.
    MASKED_N: tl.constexpr = tl.constexpr(min(BLOCK_N, 64) if max(BLOCK_M, BLOCK_D) <= 128 else max(BLOCK_N // 2, 16))
    p_k0, p_v0, p_depths = p_k + i_b * k_b + i_k * k_h, p_v + i_b * v_b + i_k * v_h, p_depth + i_b * n_rows
    b_most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(2):  # the one numbered LEAST has no masks
        if part != LEAST:
            for i in range(0, tl.maximum(end - begin - (tail - full), LEAST), MASKED_N):
                start = begin + i + tl.where(begin + i < full, 0, tail - full)
                b_k = _load(p_k0, k_s, start, end, True, WIDTH, MASKED_N, BLOCK_D)
                b_v = _load(p_v0, v_s, start, end, True, WIDTH, MASKED_N, BLOCK_D)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                b_s = _masked(
                    b_s, b_low, b_high, b_depth, o_t, p_depths, start, end, length, window, TREE, WINDOW, MASKED_N
                )
                b_most, b_sum, b_out = _add(b_most, b_sum, b_out, b_s, b_v, scale, True, PRECISION)
        elif AHEAD:
            b_k = _load(p_k0, k_s, full, tail, True, WIDTH, BLOCK_N, BLOCK_D)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            for start in range(full, tail, BLOCK_N):
                b_v = _load(p_v0, v_s, start, tail, False, WIDTH, BLOCK_N, BLOCK_D)
                after = tl.minimum(start, tail - 2 * BLOCK_N) + BLOCK_N  # the last block again, unused
                b_k = _load(p_k0, k_s, after, tail, False, WIDTH, BLOCK_N, BLOCK_D)
                b_after = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                b_most, b_sum, b_out = _add(b_most, b_sum, b_out, b_s, b_v, scale, False, PRECISION)
                b_s = b_after
        else:
            for start in range(full, tail, BLOCK_N):
                b_k = _load(p_k0, k_s, start, tail, False, WIDTH, BLOCK_N, BLOCK_D)
                b_v = _load(p_v0, v_s, start, tail, False, WIDTH, BLOCK_N, BLOCK_D)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
                b_most, b_sum, b_out = _add(b_most, b_sum, b_out, b_s, b_v, scale, False, PRECISION)

    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    b_lse = tl.where(b_sum == 0.0, float("-inf"), b_most * scale + tl.log2(tl.where(b_sum == 0.0, 1.0, b_sum)))
    o_run = ((i_bk * n_splits + i_split) * n_m + o_m).to(tl.int64)
    tl.store(p_out + o_run[:, None] * WIDTH + o_d[None, :], b_out, mask=m_md)
    tl.store(p_lse + o_run, b_lse, mask=m_m)


@triton.jit(do_not_specialize=["n_rows", "group", "n_kv", "n_splits"])
def _merge(
    p_runs, p_lses, p_out, p_lse, n_rows, group, n_kv, n_splits,
    WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge all runs of one row of one head into the output, by their log-sum-exps (base 2)."""
    i_m, i_bk = tl.program_id(0), tl.program_id(1)
    n_m = n_rows * group
    i_b, i_k = i_bk // n_kv, i_bk % n_kv
    i_t, i_h = i_m % n_rows, i_k * group + i_m // n_rows
    o_p, o_d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    m_p, m_d = o_p < n_splits, o_d < WIDTH
    i_run = i_bk.to(tl.int64) * n_splits * n_m + i_m  # this row's in the first run
    b_lse = tl.load(p_lses + i_run + o_p * n_m, mask=m_p, other=float("-inf"))
    most = tl.max(b_lse, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    b_share = tl.exp2(b_lse - base)
    total = tl.sum(b_share, 0)
    p_rows = p_runs + i_run * WIDTH + (o_p[:, None] * (n_m * WIDTH) + o_d[None, :])
    b_runs = tl.load(p_rows, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_out = tl.sum(b_runs * b_share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    i_row = (i_b * n_rows + i_t) * (n_kv * group) + i_h
    tl.store(p_out + i_row * WIDTH + o_d, b_out, mask=m_d)
    tl.store(
        p_lse + i_row,
        tl.where(total == 0.0, float("-inf"), (base + tl.log2(tl.where(total == 0.0, 1.0, total))) / LOG2E),
    )


def tree_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    bits_BT2: Tensor | None,
    depth_BT: Tensor,
    window: int | None = None,
    n_splits: int | None = None,
    choice: Choice | None = None,
    own: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.tree_attention.tree_attention`. Lengths are read only on the device.

    Args:
        q_BTHd, keys_BSKd, values_BSKd: of any strides but the last, which is 1.
        bits_BT2, depth_BT: as in PassPlan; bits of None are a chain.
        n_splits, choice: runs of keys, and the other numbers of the launch; None chooses by shapes and device.
        own: whether the pass's own rows are read.
    Returns: output [B, T, H, d] in q's dtype, natural log-sum-exps fp32 [B, T, H] (-inf where nothing is read).
    """
    n_slots, n_rows, n_heads, width = q_BTHd.shape
    n_kv = keys_BSKd.shape[2]
    group, capacity = n_heads // n_kv, keys_BSKd.shape[1]
    for name, tensor in (("queries", q_BTHd), ("keys", keys_BSKd), ("values", values_BSKd)):
        assert tensor.stride(-1) == 1, f"{name} must be contiguous within a head"
    n_processors, fast_memory = _device(q_BTHd.device)
    rows: int = n_rows * group
    shape = tuning.shape_of(q_BTHd.dtype, n_slots, n_rows, n_heads, n_kv, width, capacity, window)
    choice = choice or tuning.chosen(q_BTHd.device, shape) or tuning.table(shape, n_rows, fast_memory)
    block_m, block_n, n_stages, n_warps, per_processor, ahead = tuning.fitted(choice, rows)
    block_d = tuning.at_least_16(width)
    n_blocks = -(-rows // block_m)
    if n_splits is None:
        reach = capacity if window is None else min(capacity, window + n_rows)
        n_splits = tuning.choose_splits(n_blocks * n_slots * n_kv, reach, n_processors, block_n, per_processor)
    runs = torch.empty((n_slots * n_kv, n_splits, rows, width), dtype=torch.float32, device=q_BTHd.device)
    lses = torch.empty(runs.shape[:3], dtype=torch.float32, device=q_BTHd.device)
    out_BTHd = torch.empty((n_slots, n_rows, n_heads, width), dtype=q_BTHd.dtype, device=q_BTHd.device)
    lse_BTH = torch.empty((n_slots, n_rows, n_heads), dtype=torch.float32, device=q_BTHd.device)
    runs_kernel: Any = _runs[(n_blocks, n_splits, n_slots * n_kv)]  # its launch options are not in its signature
    runs_kernel(
        q_BTHd, keys_BSKd, values_BSKd, depth_BT if bits_BT2 is None else bits_BT2, depth_BT, lengths_B, runs, lses,
        width**-0.5 * LOG2E.value,
        *q_BTHd.stride()[:3], *keys_BSKd.stride()[:3], *values_BSKd.stride()[:3],
        n_rows, n_rows if own else 0, group, n_kv, n_splits, NO_WINDOW if window is None else window,
        TREE=bits_BT2 is not None, WINDOW=window is not None, WIDTH=width,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        PRECISION="ieee" if q_BTHd.dtype == torch.float32 else "tf32", AHEAD=ahead == 1,
        num_warps=n_warps, num_stages=n_stages,
    )  # fmt: skip
    block_p = 1 << (n_splits - 1).bit_length()
    merge_kernel: Any = _merge[(rows, n_slots * n_kv)]
    merge_kernel(
        runs, lses, out_BTHd, lse_BTH, n_rows, group, n_kv, n_splits,
        WIDTH=width, BLOCK_P=block_p, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return out_BTHd, lse_BTH


def cross_attention(
    q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor, n_splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.tree_attention.cross_attention`. Like `tree_attention`, but no row of the pass is read."""
    unread = lengths_B  # instead of depths
    return tree_attention(q_BTHd, keys_BSKd, values_BSKd, lengths_B, None, unread, n_splits=n_splits, own=False)


def tune(
    n_heads: int,
    n_kv_heads: int,
    width: int,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    device: torch.device,
    capacity: int,
    n_slots: int,
    widths: Iterable[int],
    log: Callable[[str], object],
    seconds: Callable[[Callable[[], object]], float] | None = None,
) -> None:
    """See `longdraft.kernels.tree_attention.tune`. Measures with a full cache.

    seconds: times a call; None is the device's clock.
    """
    if dtype.itemsize > 2 or width > 128:  # the table's blocks are small, because registers run out
        return
    passes, sizes = {}, (n_heads, n_kv_heads, width, capacity)
    for window in windows:
        if n_slots * min(capacity, window or capacity) >= LEAST_KEYS:
            # The widest pass of a kind comes last, and is kept.
            for n_rows in sorted(count for count in widths if count <= min(capacity, MOST_ROWS.value)):
                passes[tuning.shape_of(dtype, n_slots, n_rows, *sizes, window)] = n_rows
    memory = _device(device)[1]

    @cache
    def draw(n_rows: int, n_heads: int, seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn((n_slots, n_rows, n_heads, width), dtype=dtype, device=device, generator=generator)

    def call_of(shape: tuning.Shape, n_rows: int) -> Callable[[Choice | None], Tensor]:
        given = draw(n_rows, n_heads, 0), draw(capacity, n_kv_heads, 1), draw(capacity, n_kv_heads, 2)
        # A chain as a tree, as most passes are.
        chain = torch.ones(n_slots, n_rows, n_rows, dtype=torch.bool, device=device).tril() if n_rows > 1 else None
        plan = PassPlan(torch.full((n_slots,), capacity - n_rows, device=device), n_rows, chain)
        inputs = *given, plan.lengths_B, plan.bits_BT2, plan.depth_BT, shape.window, None
        usual = tuning.table(shape, n_rows, memory)
        return lambda choice: tree_attention(*inputs, choice or usual)[0]

    with suppress(torch.OutOfMemoryError):  # the table is used
        tuning.tune(device, passes, memory, call_of, log, seconds or partial(tuning.seconds_on, device))


def _device(device: torch.device) -> tuple[int, int]:
    """How many processors the device has, and bytes of shared memory for a program; constants for the interpreter."""
    if device.type != "cuda":
        return 8, 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
