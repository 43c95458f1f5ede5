"""Reference of kernels/gate.py, any device."""

import torch
from torch import Tensor
from torch.nn import functional as F


def gate(gate_up: Tensor) -> Tensor:
    """See `longdraft.kernels.gate.gate`."""
    first, up = gate_up.chunk(2, -1)
    opened = F.silu(first)
    return opened * up if opened.requires_grad else opened.mul_(up)


def clamped_gate(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """See `longdraft.kernels.gate.clamped_gate`."""
    first, up = gate_up.chunk(2, -1)
    first, up = first.clamp(max=limit), up.clamp(-limit, limit)
    return first * torch.sigmoid(slope * first) * (up + 1)
