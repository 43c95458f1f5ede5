"""Reference of kernels/choice.py: the formula, with all noise at once. It holds several tensors of B x N x V."""

import torch
from torch import Tensor

from longdraft.kernels.reference.gumbel import gumbel_noise


def choose(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """See `longdraft.kernels.choice.choose`."""
    sampled_B11 = (temperatures_B > 0)[:, None, None]
    scaled_BNV = logits_BNV.float() / torch.where(sampled_B11, temperatures_B[:, None, None], 1.0)
    noisy_BNV = scaled_BNV + gumbel_noise(seeds_B, positions_BN, logits_BNV.shape[-1])
    return torch.where(sampled_B11, noisy_BNV, scaled_BNV).argmax(-1)
