"""Reference of kernels/rotate.py. Shapes as there."""

import torch
from torch import Tensor


def rotate(x_BTnd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor) -> Tensor:
    """See kernels/rotate.py."""
    n_slots, n_rows, n_heads, head_dim = x_BTnd.shape
    halves_BTn2F = x_BTnd.view(n_slots, n_rows, n_heads, 2, head_dim // 2)
    rotated = torch.addcmul(halves_BTn2F * cos_BT11F, halves_BTn2F.flip(3), sin_BT12F)
    return rotated.view(n_slots, n_rows, n_heads, head_dim)
