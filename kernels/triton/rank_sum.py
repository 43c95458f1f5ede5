"""kernels/rank_sum.py in Triton: one launch. Prefixes: o_ offsets, m_ mask, p_ pointer, b_ block."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program


@triton.jit
def _rank_sum(p_parts, p_total, count, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    b_total = tl.load(p_parts + o, mask=m, other=0.0).to(tl.float32)
    for rank in range(1, RANKS):
        b_total += tl.load(p_parts + rank * count + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_total + o, b_total, mask=m)


def rank_sum(parts: Tensor) -> Tensor:
    """See `longdraft.kernels.rank_sum.rank_sum`."""
    total = torch.empty_like(parts[0])
    kernel: Any = _rank_sum[(triton.cdiv(total.numel(), BLOCK),)]
    kernel(parts, total, total.numel(), RANKS=len(parts), BLOCK=BLOCK)
    return total
