"""References of kernels/rotate.py, any device. Shapes as there."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


class HeadNorms(NamedTuple):
    """RMSNorms of heads before RoPE: weight `q_d` for the first `n_queries` heads, `k_d` for the others, the keys."""

    q_d: Tensor
    k_d: Tensor
    n_queries: int
    eps: float


def normed(x_BTnd: Tensor, norms: HeadNorms | None) -> Tensor:
    """The heads after their norms, rounded to x's dtype."""
    if norms is None:
        return x_BTnd
    split = norms.n_queries, x_BTnd.shape[2] - norms.n_queries
    parts = zip(x_BTnd.split(split, 2), (norms.q_d, norms.k_d), strict=True)
    return torch.cat([rms_norm(part, weight.shape, weight, norms.eps) for part, weight in parts], 2)


def rotate(x_BTnd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor, norms: HeadNorms | None = None) -> Tensor:
    """See `longdraft.kernels.rotate.rotate`."""
    n_slots, n_rows, n_heads, head_dim = x_BTnd.shape
    halves_BTn2F = normed(x_BTnd, norms).view(n_slots, n_rows, n_heads, 2, head_dim // 2)
    rotated = torch.addcmul(halves_BTn2F * cos_BT11F, halves_BTn2F.flip(3), sin_BT12F)
    return rotated.view(n_slots, n_rows, n_heads, head_dim)


def rotate_append(
    qkv_BTNd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """See `longdraft.kernels.rotate.rotate_append`."""
    n_kv = keys_BSKd.shape[2]
    qk_BTnd = rotate(qkv_BTNd[:, :, :-n_kv], cos_BT11F, sin_BT12F, norms)
    slots_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    places_BT = lengths_B[:, None] + torch.arange(qkv_BTNd.shape[1], device=lengths_B.device)
    keys_BSKd[slots_B1, places_BT] = qk_BTnd[:, :, -n_kv:]
    values_BSKd[slots_B1, places_BT] = qkv_BTNd[:, :, -n_kv:]
    return qk_BTnd
