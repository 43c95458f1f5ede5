"""RoPE's rotation of query and key heads. Not here: the tables of cosines and sines (models/rope.py).

Shapes: B slots, T rows, n heads, d head width, F = d / 2 frequencies.
"""

from torch import Tensor

from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.reference.rotate import rotate as _reference


def rotate(x_BTnd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor) -> Tensor:
    """Rotate heads, the first half of a head's width paired with the second: a new tensor of x's shape and dtype.

    Args:
        x_BTnd: heads before RoPE; may be a slice of a wider projection.
        cos_BT11F: cosines; B may be 1 for all slots.
        sin_BT12F: the sines, negative for the first half.
    """
    few = x_BTnd.shape[0] * x_BTnd.shape[1] <= rows.MOST_LINEAR_ROWS
    known = x_BTnd.dtype == cos_BT11F.dtype and rows.serves(x_BTnd.dtype)
    if few and known and x_BTnd.device.type == "cpu" and not x_BTnd.requires_grad and rows.library() is not None:
        return rows.rotate_rows(x_BTnd, cos_BT11F, sin_BT12F)
    return _reference(x_BTnd, cos_BT11F, sin_BT12F)
