"""Attention under a dense mask, in fp32: the reference of all attention here, and the own rows of wide trees.

Shapes: B slots, T queries, S keys, H query heads, K key/value heads, G = H / K, d head width.
"""

import torch
from torch import Tensor


def masked_attention(q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, mask_BTS: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in which row t of slot b reads key s if `mask_BTS` is true there.

    Rows that nobody reads may be NaN. Holds B x H x T x S scores.

    Returns: the output [B, T, H, d] in q's dtype, scores scaled by d ** -0.5, zeros for a row that reads nothing; and
    the natural log-sum-exps of the scaled scores, fp32 [B, T, H], -inf for such a row.
    """
    weights_BKGTS, lse_BTH = attention_weights(q_BTHd, keys_BSKd, mask_BTS)
    out_BTKGd = torch.einsum("bkgts,bskd->btkgd", weights_BKGTS, where_read(values_BSKd, mask_BTS))
    return out_BTKGd.flatten(2, 3).to(q_BTHd.dtype), lse_BTH


def attention_weights(q_BTHd: Tensor, keys_BSKd: Tensor, mask_BTS: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of the scaled scores over the keys that a row reads, fp32 [B, K, G, T, S], and the log-sum-exps of
    `masked_attention`; the weights of a row that reads nothing are zero."""
    q_BTKGd = where_read(q_BTHd, mask_BTS.transpose(1, 2)).unflatten(2, (keys_BSKd.shape[2], -1))
    scores_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, where_read(keys_BSKd, mask_BTS))
    scores_BKGTS = scores_BKGTS * q_BTHd.shape[3] ** -0.5
    scores_BKGTS = scores_BKGTS.masked_fill(~mask_BTS[:, None, None], float("-inf"))
    lse_BTH = scores_BKGTS.logsumexp(-1).flatten(1, 2).transpose(1, 2).contiguous()
    # Without keys there is no softmax: let such a row read everything, and multiply the result by zero.
    blind_B11T1 = ~mask_BTS.any(2)[:, None, None, :, None]
    return scores_BKGTS.masked_fill(blind_B11T1, 0.0).softmax(-1) * ~blind_B11T1, lse_BTH


def where_read(rows_BSKd: Tensor, mask_BTS: Tensor) -> Tensor:
    """The rows in fp32, with zeros for those that nobody reads: they may hold NaN, and 0 * NaN would reach a sum."""
    return rows_BSKd.float().where(mask_BTS.any(1)[:, :, None, None], 0)
