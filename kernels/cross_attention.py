"""Attention of a draft's rows over another model's cache: every row reads all of its slot's committed rows, no mask.

The plain reference is reference/cross_attention.py. On a GPU with Triton the kernel of the tree attention serves: it
reads no length to the host and cuts a long cache into runs, without which few rows leave a GPU idle. Of the flash
kernels only flash-attn's `flash_attn_with_kvcache` cuts likewise, and PyTorch has none for who has not compiled that.
Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.tree_attention import triton_for


def cross_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
) -> Tensor:
    """Every row of slot b reads the cache rows [0, lengths[b]).

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows in q's dtype, K divides H (head h reads h // G); what lies beyond a length is
            never read (it may be NaN). Their strides may differ.
        lengths_B: int64.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zero for a slot of length 0.
    """
    if q_BTHd.shape[1] <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.attention_rows(q_BTHd, keys_BSKd, values_BSKd, lengths_B, None, blind=True)
    if (triton := triton_for(q_BTHd)) is not None:
        return triton.cross_attention(q_BTHd, keys_BSKd, values_BSKd, lengths_B)[0]
    slots = zip(q_BTHd, keys_BSKd, values_BSKd, lengths_B.tolist(), strict=True)
    return torch.stack([_slot_attention(q, keys[:length], values[:length]) for q, keys, values, length in slots])


def _slot_attention(q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor) -> Tensor:
    """Query groups fold into the query length, so that keys and values are read once and never repeated."""
    if not len(keys_SKd):
        return torch.zeros_like(q_THd)
    n_rows, n_heads, head_dim = q_THd.shape
    n_kv_heads = keys_SKd.shape[1]
    q_KQd = q_THd.reshape(n_rows, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)
    q_1KQd, keys_1KSd, values_1KSd = q_KQd[None], keys_SKd.transpose(0, 1)[None], values_SKd.transpose(0, 1)[None]
    out_KGTd = scaled_dot_product_attention(q_1KQd, keys_1KSd, values_1KSd).view(n_kv_heads, -1, n_rows, head_dim)
    return out_KGTd.permute(2, 0, 1, 3).reshape(n_rows, n_heads, head_dim)
