"""Plain causal attention over whole rows, without a cache: training, scoring, and the prefill of an empty cache.

No trees and no cache here: see tree_attention.py. Shapes: B rows, T tokens, H query heads, K key/value heads, d width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries handled at once under a sliding window: bounds the mask at this many rows by (this + window) columns.
WINDOW_BLOCK = 512


def causal_attention(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, window: int | None = None) -> Tensor:
    """Token t reads tokens max(0, t - window + 1) .. t, by order in the row, whatever their positions.

    Args:
        q_BTHd: queries after RoPE. k_BTKd, v_BTKd: keys and values, K divides H (head h reads h // (H / K)).
        window: number of tokens a query sees, itself included; None for all.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    n_rows = q_BTHd.shape[1]
    q_BHTd, k_BKTd, v_BKTd = q_BTHd.transpose(1, 2), k_BTKd.transpose(1, 2), v_BTKd.transpose(1, 2)
    grouped = q_BHTd.shape[1] != k_BKTd.shape[1]
    if window is None or window >= n_rows:
        out_BHTd = scaled_dot_product_attention(q_BHTd, k_BKTd, v_BKTd, is_causal=True, enable_gqa=grouped)
        return out_BHTd.transpose(1, 2)
    blocks = []
    for start in range(0, n_rows, WINDOW_BLOCK):
        stop = min(start + WINDOW_BLOCK, n_rows)
        first = max(0, start - window + 1)
        row_t = torch.arange(start, stop, device=q_BTHd.device)[:, None]
        column = torch.arange(first, stop, device=q_BTHd.device)
        mask = (column <= row_t) & (column > row_t - window)
        keys, values = k_BKTd[:, :, first:stop], v_BKTd[:, :, first:stop]
        q_block = q_BHTd[:, :, start:stop]
        blocks.append(scaled_dot_product_attention(q_block, keys, values, attn_mask=mask, enable_gqa=grouped))
    return torch.cat(blocks, 2).transpose(1, 2)
