"""RoPE's rotation of query and key heads after their norms, if a model has any, and the write of keys and values to a
cache.

Why ours: Liger's RoPE knows neither norms of heads nor caches.
Shapes: B slots, T tokens, N heads of x, of which n are rotated, d head width, F = d / 2 frequencies; with a cache
N = n + K, K heads of k and of v; S cache capacity.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend
from longdraft.kernels.cpu import rows


class HeadNorms(NamedTuple):
    """RMSNorms of heads before RoPE: weight `q_d` for the first `n_queries` heads, `k_d` for the others, the keys."""

    q_d: Tensor
    k_d: Tensor
    n_queries: int
    eps: float


# A layer's keys and values [B, S, K, d], of any strides but the last, which is 1, and the slots' lengths, int64 [B].
LayerCache = tuple[Tensor, Tensor, Tensor]


def rotate(
    x_BTnd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    norms: HeadNorms | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """Rotate heads: a new tensor of x's dtype. The first half of a head is paired with the second.

    With a cache, x has the heads of q, then of k, then of v: q and k are rotated, [B, T, N - K, d], and k and v are
    written to rows lengths[b] .. lengths[b] + T - 1. Lengths and other rows do not change. Whether there is room is not
    checked; on a GPU, rows beyond the capacity are dropped. Nothing is read on the host.

    Norms are rounded to x's dtype, and so is the product with the cosine before the one with the sine is added. On a
    GPU this is one Triton launch unless x needs a gradient; on a CPU one C call in bf16, and in fp32 while decoding, if
    the cache's heads are contiguous; otherwise PyTorch.

    Args:
        x_BTnd: heads before RoPE; may be a slice of a wider projection.
        cos_BT11F: cosines. B may be 1, for all slots, and T may be 1, for all rows.
        sin_BT12F: sines, negated for the first half; B and T likewise.
        norms: RMSNorms of the heads before they are rotated.
        cache: one layer's; only those rows change.
    """
    if (triton := triton_for(x_BTnd, cos_BT11F)) is not None:
        return triton.rotate(x_BTnd, cos_BT11F, sin_BT12F, norms, cache)
    if _in_c(x_BTnd, cos_BT11F, norms, cache):
        return rows.rotate_rows(x_BTnd, cos_BT11F, sin_BT12F, norms, cache)
    return rotate_reference(x_BTnd, cos_BT11F, sin_BT12F, norms, cache)


def _in_c(x_BTnd: Tensor, cos_BT11F: Tensor, norms: HeadNorms | None, cache: LayerCache | None) -> bool:
    """Whether the C kernels rotate heads like these, for any number of tokens: C sums norms in an order of its own, so
    the choice must not depend on T."""
    table = x_BTnd.dtype == cos_BT11F.dtype and cos_BT11F.shape[1] == x_BTnd.shape[1]
    served = rows.serves(x_BTnd.dtype) and x_BTnd.device.type == "cpu" and not x_BTnd.requires_grad
    fits = x_BTnd.numel() > 0 and (norms is None or x_BTnd.shape[3] % 8 == 0)
    adjoin = cache is None or all(x.stride()[2:] == (x.shape[3], 1) for x in cache[:2])
    return table and served and fits and adjoin and rows.library() is not None


def triton_for(x_BTnd: Tensor, cos_BT11F: Tensor) -> Any | None:
    """The module triton/rotate.py if it supports heads like these, else None. No gradient goes through it."""
    if x_BTnd.dtype != cos_BT11F.dtype or (torch.is_grad_enabled() and x_BTnd.requires_grad):
        return None
    return backend.triton_kernels("rotate", x_BTnd.device.type)


def normed(x_BTnd: Tensor, norms: HeadNorms | None) -> Tensor:
    """The heads after their norms, rounded to x's dtype."""
    if norms is None:
        return x_BTnd
    split = norms.n_queries, x_BTnd.shape[2] - norms.n_queries
    parts = zip(x_BTnd.split(split, 2), (norms.q_d, norms.k_d), strict=True)
    return torch.cat([F.rms_norm(part, weight.shape, weight, norms.eps) for part, weight in parts], 2)


def rotate_reference(
    x_BTnd: Tensor,
    cos_BT11F: Tensor,
    sin_BT12F: Tensor,
    norms: HeadNorms | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """`rotate` in plain PyTorch."""
    qk_BTnd = x_BTnd if cache is None else x_BTnd[:, :, : -cache[0].shape[2]]
    n_slots, n_rows, n_heads, head_dim = qk_BTnd.shape
    halves_BTn2F = normed(qk_BTnd, norms).view(n_slots, n_rows, n_heads, 2, head_dim // 2)
    rotated = torch.addcmul(halves_BTn2F * cos_BT11F, halves_BTn2F.flip(3), sin_BT12F)
    rotated_BTnd = rotated.view(n_slots, n_rows, n_heads, head_dim)
    if cache is not None:
        keys_BSKd, values_BSKd, lengths_B = cache
        slots_B1 = torch.arange(n_slots, device=lengths_B.device)[:, None]
        places_BT = lengths_B[:, None] + torch.arange(n_rows, device=lengths_B.device)
        n_kv = keys_BSKd.shape[2]
        keys_BSKd[slots_B1, places_BT] = rotated_BTnd[:, :, -n_kv:]
        values_BSKd[slots_B1, places_BT] = x_BTnd[:, :, -n_kv:]
    return rotated_BTnd
