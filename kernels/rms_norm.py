"""RMSNorm of the residual stream, and with the addition before it: on a GPU each is one kernel, Liger's.

All norms of a stream go through these two, so that a row has the same numbers in a pass of any width and whether or not
something is added to it. The plain references are in reference/rms_norm.py. Not here: norms of heads, which go with
their rotation (rotate.py). Shapes: ... any leading shape, D width.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import rms_norm as reference

# Of one row in Liger's kernels, which take it whole.
MOST_WIDTH = 65536


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once to x's dtype.

    Where a gradient is asked for, PyTorch's, which is one kernel each way too.

    Args:
        x: [..., D]. weight_D: in x's dtype.
    """
    liger = _liger(x, weight_D)
    if liger is None or (torch.is_grad_enabled() and (x.requires_grad or weight_D.requires_grad)):
        return reference.rms_norm(x, weight_D, eps)
    return liger.rms_norm(x, weight_D, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of x + added, x + added), the sum rounded before its norm is taken; with gradients.

    Args:
        x, added: [..., D] of one dtype. weight_D: in the same.
    """
    liger = _liger(x, weight_D)
    return (liger or reference).add_rms_norm(x, added, weight_D, eps)


def adds_with_norm(x: Tensor) -> bool:
    """Whether an addition to such a stream is best left to the norm that follows."""
    return _liger(x, x) is not None


def _liger(x: Tensor, weight_D: Tensor) -> backend.LigerLayers | None:
    if x.dtype != weight_D.dtype or x.shape[-1] > MOST_WIDTH or x.numel() == 0:
        return None
    return backend.liger_layers(x.device.type)
