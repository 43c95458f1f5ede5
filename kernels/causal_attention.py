"""Plain causal attention over whole rows, without a cache, by PyTorch: scoring, and training off a GPU or in fp32.

Shapes: B rows, T queries, S >= T keys, H query heads, K key/value heads, d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.backend import HALF
from longdraft.kernels.chain_attention import in_parts

# Queries per call where a mask is needed: bounds the mask at this many rows by the keys that they may read.
BLOCK = 512


def causal_attention(
    q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, window: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal attention in which query t reads keys 0 .. S - T + t, the last `window` of them.

    PyTorch's scaled_dot_product_attention runs everywhere: without a mask if there is no window, else in blocks of
    queries under a small mask. With sinks, which need log-sum-exps, `in_parts` runs instead.

    Args:
        q_BTHd: queries after RoPE.
        k_BSKd, v_BSKd: keys and values. K divides H: head h reads key head h // (H / K).
        window: number of keys a query reads at most, its own token's included if S = T; None for all.
        sinks_H: attention sinks (kernels/sinks.py); None for none. With sinks nothing has a gradient.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    if sinks_H is not None:
        rows = zip(q_BTHd.split(1), k_BSKd.split(1), v_BSKd.split(1), strict=True)
        return torch.cat([in_parts(q, k, v, window, sinks_H) for q, k, v in rows])
    n_queries, n_keys = q_BTHd.shape[1], k_BSKd.shape[1]
    q_BHTd, k_BKSd, v_BKSd = q_BTHd.transpose(1, 2), k_BSKd.transpose(1, 2), v_BSKd.transpose(1, 2)
    operands, grouped = (q_BHTd, k_BKSd, v_BKSd), q_BHTd.shape[1] != k_BKSd.shape[1]
    if window is None or window >= n_keys:
        if n_queries == n_keys:
            return scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        if q_BTHd.is_cuda and q_BTHd.dtype in HALF:  # the flash kernel takes this bias without making a mask of it
            from torch.nn.attention.bias import causal_lower_right  # takes a second: it imports PyTorch's compiler

            lower_right = causal_lower_right(n_queries, n_keys)
            return scaled_dot_product_attention(*operands, attn_mask=lower_right, enable_gqa=grouped).transpose(1, 2)
    return _blockwise(q_BHTd, k_BKSd, v_BKSd, n_keys if window is None else window, grouped).transpose(1, 2)


def _blockwise(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, window: int, grouped: bool) -> Tensor:
    """[B, H, T, d], BLOCK queries at a time, under a mask over the keys that any of them reads."""
    n_queries, before = q_BHTd.shape[2], k_BKSd.shape[2] - q_BHTd.shape[2]
    blocks, shape, mask = [], None, None
    for start in range(0, n_queries, BLOCK):
        stop = min(start + BLOCK, n_queries)
        first = max(0, before + start - window + 1)
        # Under a window most blocks have the same mask. They share it, as autograd keeps it for the backward pass.
        if shape != (shape := (stop - start, before + stop - first)):
            last_T1 = torch.arange(shape[1] - shape[0], shape[1], device=q_BHTd.device)[:, None]
            key_S = torch.arange(shape[1], device=q_BHTd.device)
            closed_TS = (key_S > last_T1) | (key_S <= last_T1 - window)
            mask = torch.zeros(shape, dtype=q_BHTd.dtype, device=q_BHTd.device).masked_fill_(closed_TS, float("-inf"))
        operands = q_BHTd[:, :, start:stop], k_BKSd[:, :, first : before + stop], v_BKSd[:, :, first : before + stop]
        blocks.append(scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=grouped))
    return torch.cat(blocks, 2)
