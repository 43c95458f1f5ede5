"""y = x W^T + b in Triton for few rows: a row's bits do not depend on the other rows or on how many there are.

A program multiplies BLOCK_N rows of the weight with up to 128 rows of x, so that the weight is read once. It takes the
rows in tiles of 16, whatever their number: each tile is a product of the same shape, in the same instruction, over the
same blocks of K in the same order. How K is split depends only on the weight's shape and the device; the last program
of a tile to finish adds up the splits in their order.

With experts (`grouped_linear`) a program takes one tile of the rows of one expert, by the same instruction and splits.

Shapes: M rows, K inputs, N outputs, S splits of K, E experts. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer,
b_ block.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_TILES, TILE = 8, 16
BLOCK_N, BLOCK_K = 64, 128


@triton.jit
def _tile_of_expert(p_ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """This program's tile: its expert (EXPERTS if there is no tile), its first row, and where the expert's rows end."""
    i_tile, o_e = tl.program_id(2), tl.arange(0, PADDED)
    ends = tl.load(p_ends + o_e, mask=o_e < EXPERTS, other=0)
    begins = tl.load(p_ends + o_e - 1, mask=(o_e > 0) & (o_e < EXPERTS), other=0)
    tiles = tl.where(o_e < EXPERTS, (ends - begins + TILE - 1) // TILE, 0)
    after = tl.cumsum(tiles, 0)
    i_expert = tl.sum(((after <= i_tile) & (o_e < EXPERTS)).to(tl.int32))
    mine = o_e == i_expert
    first = tl.sum(tl.where(mine, begins + (i_tile - after + tiles) * TILE, 0))
    return i_expert, first, tl.sum(tl.where(mine, ends, 0))


# Do not specialize on what changes from pass to pass: each special value would be another compilation.
@triton.jit(do_not_specialize=["n_rows", "n_splits"])
def _products(
    p_x, p_w, p_bias, p_out, p_sums, p_done, p_ends,
    n_rows, n_outputs, n_inputs, n_splits, x_m, w_n, w_e, inputs_of_split,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write one split's products of BLOCK_N outputs with TILES * TILE rows to fp32 [S, M, N]; the last split to finish
    writes their sum to the result [M, N]. If K is not split (WHOLE), write the products to the result. p_done: how many
    splits of these products have finished, 0 before and after. EXPERTS: the number of weights, whose rows of x end at
    `p_ends`; 0: a single weight."""
    i_n, i_split, first, end = tl.program_id(0), tl.program_id(1), tl.program_id(2) * (TILES * TILE), n_rows
    if EXPERTS:
        tile = _tile_of_expert(p_ends, EXPERTS, PADDED, TILE)
        i_expert, first, end = tile  # pyright: ignore[reportGeneralTypeIssues]
        if i_expert == EXPERTS:
            return
        p_w += i_expert.to(tl.int64) * w_e
    o_n, o_k, o_m = i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), first + tl.arange(0, TILE)
    m_n = o_n < n_outputs
    p_wn = p_w + o_n.to(tl.int64)[:, None] * w_n
    zeros = ()
    for _ in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
        zeros += (tl.zeros([BLOCK_N, TILE], tl.float32),)
    sums = zeros
    start = i_split * inputs_of_split
    for k in range(start, tl.minimum(start + inputs_of_split, n_inputs), BLOCK_K):
        m_k = k + o_k < n_inputs
        b_w = tl.load(p_wn + (k + o_k)[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        added = ()
        for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
            o_row = i * TILE + o_m
            m_x = m_k[:, None] & (o_row < end)[None, :]
            b_x = tl.load(p_x + o_row.to(tl.int64)[None, :] * x_m + (k + o_k)[:, None], mask=m_x, other=0.0)
            added += (tl.dot(b_w, b_x, sums[i]),)
        sums = added
    if not WHOLE:
        for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
            o_row = i * TILE + o_m
            p_sum = p_sums + (i_split * n_rows + o_row).to(tl.int64)[None, :] * n_outputs + o_n[:, None]
            tl.store(p_sum, sums[i], mask=m_n[:, None] & (o_row < end)[None, :])
        p_mine = p_done + tl.program_id(2) * tl.num_programs(0) + i_n
        tl.debug_barrier()  # until all threads of this program have written
        if tl.atomic_add(p_mine, 1, sem="acq_rel") != n_splits - 1:
            return
        tl.debug_barrier()
        tl.store(p_mine, 0)
        sums = zeros
        for i_sum in tl.range(0, n_splits, loop_unroll_factor=4):  # pyright: ignore[reportGeneralTypeIssues]
            added = ()
            for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
                o_row = i * TILE + o_m
                p_sum = p_sums + (i_sum * n_rows + o_row).to(tl.int64)[None, :] * n_outputs + o_n[:, None]
                m_sum = m_n[:, None] & (o_row < end)[None, :]
                added += (sums[i] + tl.load(p_sum, mask=m_sum, other=0.0, cache_modifier=".cg"),)
            sums = added
    for i in tl.static_range(TILES):  # pyright: ignore[reportGeneralTypeIssues]
        o_row = i * TILE + o_m
        b_out = sums[i]
        if BIAS:
            b_out += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_row = p_out + o_row.to(tl.int64)[None, :] * n_outputs + o_n[:, None]
        tl.store(p_row, tl.cast(b_out, p_out.dtype.element_ty), mask=m_n[:, None] & (o_row < end)[None, :])


def linear(x_MI: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[M, N] in x's dtype: sums in fp32, rounded once.

    Args:
        x_MI: bf16 or fp16; each row is contiguous, as is each of the weight's.
        weight_NI, bias_N: in x's dtype.
    """
    return _linear(x_MI, weight_NI[None], bias_N, None)


def grouped_linear(x_MI: Tensor, weight_ENI: Tensor, ends_E: Tensor) -> Tensor:
    """[M, N] in x's dtype: each row times its expert's weight, like `linear`. Nothing is read on the host.

    Args:
        x_MI: bf16 or fp16, the rows of the first expert first.
        weight_ENI: in x's dtype.
        ends_E: int32, where each expert's rows end.
    """
    return _linear(x_MI, weight_ENI, None, ends_E)


def _linear(x_MI: Tensor, weight_ENI: Tensor, bias_N: Tensor | None, ends_E: Tensor | None) -> Tensor:
    (n_rows, n_inputs), n_outputs = x_MI.shape, weight_ENI.shape[1]
    assert x_MI.stride(1) == weight_ENI.stride(2) == 1, "each row must be contiguous"
    out_MN = torch.empty((n_rows, n_outputs), dtype=x_MI.dtype, device=x_MI.device)
    if n_rows == 0:
        return out_MN
    n_processors, n_stages = _device(x_MI.device)
    inputs_of_split = split_inputs(n_outputs, n_inputs, n_processors)
    shape = partial_shape(n_rows, n_outputs, n_inputs, x_MI.device)
    n_splits = shape[0]
    sums_SMN = torch.empty(shape, dtype=torch.float32, device=x_MI.device) if n_splits > 1 else out_MN
    bias, has_bias = (out_MN, False) if bias_N is None else (bias_N, True)
    if ends_E is None:
        ends, n_experts, tiles = out_MN, 0, min(MOST_TILES, triton.next_power_of_2(-(-n_rows // TILE)))
        n_programs = -(-n_rows // (tiles * TILE))
    else:  # each expert has at most one tile that is not full
        ends, n_experts, tiles = ends_E, len(ends_E), 1
        n_programs = min(n_rows, n_experts) + n_rows // TILE
    grid = -(-n_outputs // BLOCK_N), n_splits, n_programs
    done = _none_done(x_MI.device, triton.next_power_of_2(grid[0] * n_programs)) if n_splits > 1 else out_MN
    products: Any = _products[grid]
    products(
        x_MI, weight_ENI, bias, out_MN, sums_SMN, done, ends, n_rows, n_outputs, n_inputs, n_splits,
        x_MI.stride(0), weight_ENI.stride(1), weight_ENI.stride(0), inputs_of_split,
        WHOLE=n_splits == 1, BIAS=has_bias, EXPERTS=n_experts, PADDED=triton.next_power_of_2(max(1, n_experts)),
        TILES=tiles, TILE=TILE, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=n_stages,
    )  # fmt: skip
    return out_MN


def partial_shape(n_rows: int, n_outputs: int, n_inputs: int, device: torch.device) -> tuple[int, int, int]:
    """[S, M, N] of the splits' products, which are kept in fp32 if there are several splits."""
    return -(-n_inputs // split_inputs(n_outputs, n_inputs, _device(device)[0])), n_rows, n_outputs


def split_inputs(n_outputs: int, n_inputs: int, n_processors: int) -> int:
    """How many inputs a split has, a multiple of BLOCK_K: K is halved until there are three programs for two
    processors, but splits keep at least four blocks."""
    n_programs, n_blocks, n_splits = -(-n_outputs // BLOCK_N), -(-n_inputs // BLOCK_K), 1
    while 2 * n_programs * n_splits < 3 * n_processors and n_blocks >= 8 * n_splits:
        n_splits *= 2
    return -(-n_blocks // n_splits) * BLOCK_K


def stages(fast_memory: int) -> int:
    """How many blocks of K a program with the most rows holds at a time. fast_memory: bytes of shared memory."""
    return max(2, min(4, fast_memory // (2 * (BLOCK_N + MOST_TILES * TILE) * BLOCK_K)))


@cache
def _none_done(device: torch.device, count: int) -> Tensor:
    """`p_done` for products on one stream at a time; allocated when a pass runs before it is recorded."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@cache
def _device(device: torch.device) -> tuple[int, int]:
    """How many processors the device has, and `stages`; constants for the interpreter."""
    if device.type != "cuda":
        return 8, 2
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, stages(properties.shared_memory_per_block_optin)
