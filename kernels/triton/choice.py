"""kernels/choice.py in Triton. The choice takes two launches.

In the first, each program finds the best score of one row in one block of the vocabulary. It makes the noise in
registers, and only if the row's temperature is above 0. In the second, one program per row takes the best of the
blocks. A score and its token's id form one int64 whose order is that of the choice, so a maximum of integers is the
argmax.

Top-p's border is the largest number such that the scores from it on have enough of the probability. Its bits are found
one hexadecimal digit per launch: programs add up chunks of a row. Sorting the rows would move far more data.

Shapes: B slots, N nodes, J positions, V vocabulary. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, CHUNK = 1024, 8192  # tokens at a time, and of a program that looks for top-p's border
STEP = tl.constexpr(2.0**-32)
BELOW_ONE = tl.constexpr(1 - 2.0**-24)  # the largest fp32 below 1
LARGEST = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(0x80000000)
LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-(2**63))


@triton.jit
def gumbel(seed, position, o_4):
    """g(seed, position, v) of kernels/choice.py for tokens 4 * o_4 .. 4 * o_4 + 3, in order: fp32, 4 per entry of o_4.

    seed, position: int64. o_4: int32, consecutive blocks of four tokens.
    """
    o_counter = o_4.to(tl.uint32)
    b_zero = tl.zeros_like(o_counter)
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_counter, b_zero + position.to(tl.uint32), b_zero, b_zero)
    b_word = tl.interleave(tl.interleave(b_0, b_2), tl.interleave(b_1, b_3))
    b_w = tl.minimum((b_word.to(tl.float32) + 0.5) * STEP, BELOW_ONE)
    # log1p(-w) from u = 1 - w, whose rounding the quotient corrects (Kahan). w is above 2**-34, and where u is 1 the
    # logarithm is -w itself.
    b_u = 1.0 - b_w
    b_lost = tl.where(b_u == 1.0, 1.0, 1.0 - b_u)
    b_log = tl.where(b_u == 1.0, -b_w, tl.log(b_u) * tl.div_rn(b_w, b_lost))
    return -tl.log(-b_log)


@triton.jit
def _order(b_score):
    """An int32 that is larger for a larger number; the largest one for NaN, and the same one for -0 and 0."""
    b_bits = tl.where(b_score == 0.0, 0.0, b_score).to(tl.int32, bitcast=True)  # -0 is 0
    b_key = tl.where(b_bits < 0, b_bits ^ LARGEST, b_bits)
    return tl.where(b_score == b_score, b_key, LARGEST)


@triton.jit
def _ordered(b_score, o_v):
    """An int64 that is larger for a larger score and, for equal scores, for the lower id. NaN is the largest score."""
    return (_order(b_score).to(tl.int64) << 32) | (o_v ^ LARGEST).to(tl.int64)


@triton.jit
def _best_of_block(
    p_logits, p_seed, p_position, p_temperature, p_best,
    l_b, l_n, s_b, t_b, t_n, d_b, n_nodes, vocab, n_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    i_row, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_n = (i_row // n_nodes).to(tl.int64), (i_row % n_nodes).to(tl.int64)
    o_v = i_v * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab
    b_score = tl.load(p_logits + i_b * l_b + i_n * l_n + o_v, mask=m_v, other=0.0).to(tl.float32)
    temperature = tl.load(p_temperature + i_b * d_b)
    if temperature > 0.0:
        seed, position = tl.load(p_seed + i_b * s_b), tl.load(p_position + i_b * t_b + i_n * t_n)
        b_noise = gumbel(seed, position, i_v * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
        b_score = tl.div_rn(b_score, temperature) + b_noise
    b_ordered = tl.where(m_v, _ordered(b_score, o_v), NOTHING)
    tl.store(p_best + i_row.to(tl.int64) * n_blocks + i_v, tl.max(b_ordered, 0))


@triton.jit
def _best_of_row(p_best, p_chosen, n_blocks, BLOCK: tl.constexpr):
    i_row, o_p = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    best = tl.max(tl.load(p_best + i_row * n_blocks + o_p, mask=o_p < n_blocks, other=NOTHING), 0)
    tl.store(p_chosen + i_row, (best & LARGEST) ^ LARGEST)  # pyright: ignore[reportOperatorIssue]


def choose(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """See `longdraft.kernels.choice.choose`; temperatures are read only on the device."""
    n_slots, n_nodes, vocab = logits_BNV.shape
    assert logits_BNV.stride(-1) == 1 and temperatures_B.dtype == torch.float32
    n_rows, n_blocks = n_slots * n_nodes, -(-vocab // BLOCK)
    best = torch.empty((n_rows, n_blocks), dtype=torch.int64, device=logits_BNV.device)
    chosen_BN = torch.empty((n_slots, n_nodes), dtype=torch.int64, device=logits_BNV.device)
    blocks_kernel: Any = _best_of_block[(n_rows, n_blocks)]
    blocks_kernel(
        logits_BNV, seeds_B, positions_BN, temperatures_B, best,
        *logits_BNV.stride()[:2], *seeds_B.stride(), *positions_BN.stride(), *temperatures_B.stride(),
        n_nodes, vocab, n_blocks, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    rows_kernel: Any = _best_of_row[(n_rows,)]
    rows_kernel(best, chosen_BN, n_blocks, BLOCK=triton.next_power_of_2(n_blocks), num_warps=1)
    return chosen_BN


@triton.jit
def _noise(p_seed, p_position, p_noise, s_b, t_b, t_j, n_positions, vocab, BLOCK: tl.constexpr):
    i_row, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_j = (i_row // n_positions).to(tl.int64), (i_row % n_positions).to(tl.int64)
    o_v = i_v * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(p_seed + i_b * s_b), tl.load(p_position + i_b * t_b + i_j * t_j)
    b_noise = gumbel(seed, position, i_v * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    tl.store(p_noise + i_row.to(tl.int64) * vocab + o_v, b_noise, mask=o_v < vocab)


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """See `longdraft.kernels.choice.gumbel_noise`."""
    n_rows = positions_BJ.numel()
    noise_BJV = torch.empty((*positions_BJ.shape, vocab_size), dtype=torch.float32, device=seeds_B.device)
    kernel: Any = _noise[(n_rows, triton.cdiv(vocab_size, BLOCK))]
    kernel(
        seeds_B, positions_BJ, noise_BJV, *seeds_B.stride(), *positions_BJ.stride(), positions_BJ.shape[1], vocab_size,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return noise_BJV


@triton.jit
def _narrowed(p_shares, p_borders, top_p, i_row, n_rows, n_chunks, digit, CHUNKS: tl.constexpr):
    """The first `digit` digits of a row's top-p border; the last is the largest of 16 that enough of the probability
    reaches. The chunks' shares are summed in a fixed order, whatever the other rows."""
    border = tl.zeros([], tl.uint32)
    if digit > 0:
        o_way = tl.arange(0, 16)
        o_cw = tl.arange(0, CHUNKS)[:, None] * 16 + o_way[None, :]
        p_row, m_cw = p_shares + i_row * n_chunks * 16 + o_cw, (tl.arange(0, CHUNKS) < n_chunks)[:, None]
        whole = tl.max(tl.sum(tl.load(p_row, mask=m_cw, other=0.0), 0), 0)  # every score reaches 0, in the first digit
        b_share = tl.sum(tl.load(p_row + (digit - 1) * n_rows * n_chunks * 16, mask=m_cw, other=0.0), 0)
        before = tl.load(p_borders + (digit - 1) * n_rows + i_row).to(tl.uint32, bitcast=True)
        b_way = before + (o_way.to(tl.uint32) << (32 - 4 * digit).to(tl.uint32))
        border = tl.max(tl.where(b_share >= top_p * whole, b_way, before), 0)
    return border


@triton.jit(do_not_specialize=["n_rows", "n_nodes", "n_chunks", "digit"])
def _reach(
    p_scores, p_most, p_top_p, p_shares, p_borders, p_b, n_rows, n_nodes, vocab, n_chunks, digit,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """How much of a chunk of a row's unnormalised probabilities reaches each of the 16 borders of this digit."""
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_p = tl.load(p_top_p + i_row // n_nodes * p_b)
    if top_p < 1.0:
        border = _narrowed(p_shares, p_borders, top_p, i_row, n_rows, n_chunks, digit, CHUNKS)
        most, o_way = tl.load(p_most + i_row), tl.arange(0, 16)
        b_way = border + (o_way.to(tl.uint32) << (28 - 4 * digit).to(tl.uint32))
        b_share = tl.zeros([BLOCK, 16], tl.float32)
        for start in range(0, tl.minimum(CHUNK, vocab - i_chunk * CHUNK), BLOCK):
            o_v = i_chunk * CHUNK + start + tl.arange(0, BLOCK)
            b_score = tl.load(p_scores + i_row * vocab + o_v, mask=o_v < vocab, other=float("-inf"))
            b_key = _order(b_score).to(tl.uint32, bitcast=True) ^ SIGN
            b_prob = tl.exp2((b_score - most) * LOG2E)
            b_share += tl.where(b_key[:, None] >= b_way[None, :], b_prob[:, None], 0.0)
        o_row = (digit * n_rows + i_row) * n_chunks + i_chunk
        tl.store(p_shares + o_row * 16 + o_way, tl.sum(b_share, 0))
        if i_chunk == 0:
            tl.store(p_borders + digit * n_rows + i_row, border.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["n_rows", "n_nodes", "n_chunks", "digit"])
def _border(
    p_top_p, p_shares, p_borders, p_border, p_b, n_rows, n_nodes, n_chunks, digit, CHUNKS: tl.constexpr
):  # fmt: skip
    """A row's border of this many digits, as the fp32 number with these bits."""
    i_row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(p_top_p + i_row // n_nodes * p_b)
    border = float("-inf")
    if top_p < 1.0:
        key = _narrowed(p_shares, p_borders, top_p, i_row, n_rows, n_chunks, digit, CHUNKS) ^ SIGN
        bits = key.to(tl.int32, bitcast=True)
        border = tl.where(bits < 0, bits ^ LARGEST, bits).to(tl.float32, bitcast=True)
    tl.store(p_border + i_row, border)


def top_p_border(scores_BNV: Tensor, top_p_B11: Tensor) -> Tensor:
    """See `longdraft.kernels.choice.top_p_border`."""
    n_slots, n_nodes, vocab = scores_BNV.shape
    assert scores_BNV.is_contiguous() and scores_BNV.dtype == top_p_B11.dtype == torch.float32
    n_rows, n_chunks, device = n_slots * n_nodes, -(-vocab // CHUNK), scores_BNV.device
    shares = torch.empty((8, n_rows, n_chunks, 16), dtype=torch.float32, device=device)
    borders = torch.empty((8, n_rows), dtype=torch.int32, device=device)
    border_BN1 = torch.empty((n_slots, n_nodes, 1), dtype=torch.float32, device=device)
    most_BN, chunks = scores_BNV.amax(-1), triton.next_power_of_2(n_chunks)
    reach_kernel: Any = _reach[(n_rows, n_chunks)]
    sizes = top_p_B11.stride(0), n_rows, n_nodes
    for digit in range(8):
        reach_kernel(
            scores_BNV, most_BN, top_p_B11, shares, borders, *sizes, vocab, n_chunks, digit,
            CHUNK=CHUNK, BLOCK=BLOCK // 2, CHUNKS=chunks, num_warps=8,
        )  # fmt: skip
    border_kernel: Any = _border[(n_rows,)]
    border_kernel(top_p_B11, shares, borders, border_BN1, *sizes, n_chunks, 8, CHUNKS=chunks, num_warps=1)
    return border_BN1
