"""Attention of a draft's rows over another model's cache: every row reads all committed rows of its slot, unmasked.

Why ours on a GPU: the Triton kernel of the tree attention reads no length to the host, and cuts a long cache into runs,
without which few rows leave a GPU idle. Of the flash kernels only flash-attn's `flash_attn_with_kvcache` cuts likewise,
and PyTorch has nothing like it for users without flash-attn, which they must compile.
Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.attention import masked_attention
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree_attention import triton_for


def cross_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """Attention in which every row of slot b reads the cache rows [0, lengths[b]).

    Up to 128 rows go through the C kernels on a CPU and Triton on a GPU; all else through PyTorch, slot by slot.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows in q's dtype. K divides H: head h reads key head h // G. Rows beyond a length
            are never read (they may be NaN). Their strides may differ.
        lengths_B: int64, committed rows of each slot.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for a slot of length 0.
    """
    if q_BTHd.shape[1] <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.attention_rows(q_BTHd, keys_BSKd, values_BSKd, lengths_B, None, blind=True)
    if (triton := triton_for(q_BTHd)) is not None:
        return triton.cross_attention(q_BTHd, keys_BSKd, values_BSKd, lengths_B)[0]
    slots = zip(q_BTHd, keys_BSKd, values_BSKd, lengths_B.tolist(), strict=True)
    return torch.stack([_slot_attention(q, keys[:length], values[:length]) for q, keys, values, length in slots])


def _slot_attention(q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor) -> Tensor:
    """One slot. Query groups are folded into the query length, so that keys and values are read once, not repeated."""
    if not len(keys_SKd):
        return torch.zeros_like(q_THd)
    n_rows, n_heads, head_dim = q_THd.shape
    n_kv_heads = keys_SKd.shape[1]
    q_KQd = q_THd.reshape(n_rows, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)
    q_1KQd, keys_1KSd, values_1KSd = q_KQd[None], keys_SKd.transpose(0, 1)[None], values_SKd.transpose(0, 1)[None]
    out_KGTd = scaled_dot_product_attention(q_1KQd, keys_1KSd, values_1KSd).view(n_kv_heads, -1, n_rows, head_dim)
    return out_KGTd.permute(2, 0, 1, 3).reshape(n_rows, n_heads, head_dim)


def cross_attention_reference(
    q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """`cross_attention` by one dense mask, with the natural log-sum-exps of the scaled scores, fp32 [B, T, H]."""
    mask_BS = torch.arange(keys_BSKd.shape[1], device=q_BTHd.device) < lengths_B[:, None]
    mask_BTS = mask_BS[:, None].expand(-1, q_BTHd.shape[1], -1)
    return masked_attention(q_BTHd, keys_BSKd, values_BSKd, mask_BTS)
