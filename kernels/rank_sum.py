"""The sum of what the ranks of a tensor-parallel target computed.

A sum over the ranks by NCCL adds in an order that depends on the size of the message, so a token's bits would depend on
how many others its pass has. This one adds in the order of the ranks. Shapes: P ranks, ... any shape.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend


def rank_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension in its order, in fp32 and rounded once to the dtype of the parts.

    On a GPU it is one kernel in Triton, elsewhere PyTorch.

    Args:
        parts: [P, ...], contiguous.
    """
    triton = backend.triton_kernels("rank_sum", parts.device.type)
    return rank_sum_reference(parts) if triton is None else triton.rank_sum(parts)


def rank_sum_reference(parts: Tensor) -> Tensor:
    """`rank_sum` in plain PyTorch."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
