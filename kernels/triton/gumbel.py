"""kernels/gumbel.py in Triton, with the bits of the noise that triton/choice.py adds.

Shapes: B sequences, J positions, V vocabulary. Prefixes: i_ index, o_ offsets, p_ pointer.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.triton.choice import gumbel

BLOCK = 1024


@triton.jit
def _noise(p_seed, p_position, p_noise, s_b, t_b, t_j, n_positions, vocab, BLOCK: tl.constexpr):
    i_row, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_j = (i_row // n_positions).to(tl.int64), (i_row % n_positions).to(tl.int64)
    o_v = i_v * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(p_seed + i_b * s_b), tl.load(p_position + i_b * t_b + i_j * t_j)
    b_noise = gumbel(seed, position, i_v * (BLOCK // 4) + tl.arange(0, BLOCK // 4))
    tl.store(p_noise + i_row.to(tl.int64) * vocab + o_v, b_noise, mask=o_v < vocab)


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """See `longdraft.kernels.gumbel.gumbel_noise`."""
    n_rows = positions_BJ.numel()
    noise_BJV = torch.empty((*positions_BJ.shape, vocab_size), dtype=torch.float32, device=seeds_B.device)
    kernel: Any = _noise[(n_rows, triton.cdiv(vocab_size, BLOCK))]
    kernel(
        seeds_B, positions_BJ, noise_BJV, *seeds_B.stride(), *positions_BJ.stride(), positions_BJ.shape[1], vocab_size,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return noise_BJV
