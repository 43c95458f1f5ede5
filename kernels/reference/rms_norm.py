"""References of kernels/rms_norm.py. Shapes as there."""

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `longdraft.kernels.rms_norm.rms_norm`."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.rms_norm.add_rms_norm`."""
    total = x + added
    return rms_norm(total, weight_D, eps), total
