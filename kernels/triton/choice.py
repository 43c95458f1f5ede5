"""kernels/choice.py in Triton. The choice takes two launches.

In the first, each program finds the best score of one row in one block of the vocabulary. It makes the noise in
registers, and only if the row's temperature is above 0. In the second, one program per row takes the best of the
blocks. A score and its token's id form one int64 whose order is that of the choice, so a maximum of integers is the
argmax.

Shapes: B slots, N nodes, J positions, V vocabulary. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
STEP = tl.constexpr(2.0**-32)
BELOW_ONE = tl.constexpr(1 - 2.0**-24)  # the largest fp32 below 1
LARGEST = tl.constexpr(0x7FFFFFFF)
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
def _ordered(b_score, o_v):
    """An int64 that is larger for a larger score and, for equal scores, for the lower id. NaN is the largest score."""
    b_bits = tl.where(b_score == 0.0, 0.0, b_score).to(tl.int32, bitcast=True)  # -0 is 0
    b_key = tl.where(b_bits < 0, b_bits ^ LARGEST, b_bits)
    b_key = tl.where(b_score == b_score, b_key, LARGEST)
    return (b_key.to(tl.int64) << 32) | (o_v ^ LARGEST).to(tl.int64)


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
    """See `longdraft.kernels.choice.choose`; temperatures are read on the device alone."""
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
