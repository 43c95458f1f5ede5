"""The choice rule where no processor changes the logits: temperature, noise and argmax of all nodes at once.

choice(t) = argmax_v( logits_v / T + g(seed, t, v) ); at T = 0 the argmax of the logits.
Shapes: B slots, N nodes, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.gumbel import gumbel_noise_reference


def choose(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """Choose the target's token behind each node: int64 [B, N].

    Arithmetic is fp32. Of equal scores the lowest id is chosen. NaN counts as the largest score, as in `torch.argmax`,
    so a broken row is not hidden. A row's choice does not depend on the other rows.

    On a GPU Triton makes the noise where it takes the argmax and stores none of it; elsewhere PyTorch goes node by
    node.

    Args:
        logits_BNV: fp32, bf16 or fp16, of any strides but the last, which is 1.
        seeds_B: int64, any 64-bit pattern.
        positions_BN: int64 in [0, 2**32), the absolute position of the token to be chosen: the node's plus 1.
        temperatures_B: fp32; 0 is greedy, without noise.

    Source: Gumbel-max. The noise is that of kernels/gumbel.py, from the same Philox words; on a GPU its logarithms may
    differ from PyTorch's in their last bits.
    """
    if (triton := backend.triton_kernels("choice", logits_BNV.device.type)) is not None:
        return triton.choose(logits_BNV, seeds_B, positions_BN, temperatures_B)
    # Node by node: the noise of all nodes at once would take far more memory than the logits.
    nodes = zip(logits_BNV.split(1, dim=1), positions_BN.split(1, dim=1), strict=True)
    return torch.cat([choose_reference(logits, seeds_B, here, temperatures_B) for logits, here in nodes], dim=1)


def choose_reference(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """`choose` by the formula, with all noise at once: several tensors of B x N x V."""
    sampled_B11 = (temperatures_B > 0)[:, None, None]
    scaled_BNV = logits_BNV.float() / torch.where(sampled_B11, temperatures_B[:, None, None], 1.0)
    noisy_BNV = scaled_BNV + gumbel_noise_reference(seeds_B, positions_BN, logits_BNV.shape[-1])
    return torch.where(sampled_B11, noisy_BNV, scaled_BNV).argmax(-1)
