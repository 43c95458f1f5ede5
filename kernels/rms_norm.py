"""RMSNorm of the residual stream, alone or fused with the addition before it.

All norms of a stream go through these two functions, so that a row has the same bits in a pass of any width, with or
without an addition.
Shapes: ... any leading shape, D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once to x's dtype.

    On a GPU Liger's kernel runs. PyTorch runs elsewhere, and also if a gradient is needed: it too has one kernel for
    each direction.

    Args:
        x: [..., D]. weight_D: in x's dtype. eps: added to the mean of the squares.
    """
    liger = _liger(x, weight_D)
    if liger is None or (torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad)):
        return rms_norm_reference(x, weight_D, eps)
    return liger.rms_norm(x, weight_D, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of x + added, x + added), with gradients. The sum is rounded before its norm is taken.

    On a GPU this is one kernel, Liger's; elsewhere PyTorch adds and then takes the norm.

    Args:
        x, added: [..., D] of one dtype. weight_D: in the same dtype. eps: as for `rms_norm`.
    """
    liger = _liger(x, weight_D)
    fused = add_rms_norm_reference if liger is None else liger.add_rms_norm
    return fused(x, added, weight_D, eps)


def adds_with_norm(x: Tensor) -> bool:
    """Whether `add_rms_norm` fuses the addition for a stream like x, so that it is best left to the next norm."""
    return _liger(x, x) is not None


def _liger(x: Tensor, weight_D: Tensor) -> backend.LigerLayers | None:
    if x.dtype != weight_D.dtype or x.shape[-1] > backend.LIGER_WIDTH or x.numel() == 0:
        return None
    return backend.liger_layers(x.device.type)


def rms_norm_reference(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`rms_norm` in plain PyTorch."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def add_rms_norm_reference(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` in plain PyTorch."""
    total = x + added
    return rms_norm_reference(total, weight_D, eps), total
