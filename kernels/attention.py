"""Shared by all attention: the reference under a dense mask, sinks, and the merge of two sets of keys.

Attention sinks (gpt-oss, arXiv 2508.10925): each head has a learned score, like that of one more key without a value.
The other keys then get less of the softmax: the output is scaled by sigmoid(log-sum-exp of the scores - sink).
Shapes: ... any leading shape, B slots, T queries, S keys, H query heads, K key/value heads, G = H / K, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def masked_attention(q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, mask_BTS: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in which row t of slot b reads key s if `mask_BTS` is true there.

    Keys and values that no query reads may be NaN. Holds B x H x T x S scores.

    Returns: the output [B, T, H, d] in q's dtype, scores scaled by d ** -0.5, zeros for a row that reads nothing; and
    the natural log-sum-exps of the scaled scores, fp32 [B, T, H], -inf for such a row.
    """
    q_BTKGd = where_read(q_BTHd, mask_BTS.transpose(1, 2)).unflatten(2, (keys_BSKd.shape[2], -1))
    scores_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, where_read(keys_BSKd, mask_BTS))
    scores_BKGTS = scores_BKGTS * q_BTHd.shape[3] ** -0.5
    scores_BKGTS = scores_BKGTS.masked_fill(~mask_BTS[:, None, None], float("-inf"))
    lse_BTH = scores_BKGTS.logsumexp(-1).flatten(1, 2).transpose(1, 2).contiguous()
    # Without keys there is no softmax: let such a row read everything, and multiply the result by zero.
    blind_B11T1 = ~mask_BTS.any(2)[:, None, None, :, None]
    weights_BKGTS = scores_BKGTS.masked_fill(blind_B11T1, 0.0).softmax(-1) * ~blind_B11T1
    out_BTKGd = torch.einsum("bkgts,bskd->btkgd", weights_BKGTS, where_read(values_BSKd, mask_BTS))
    return out_BTKGd.flatten(2, 3).to(q_BTHd.dtype), lse_BTH


def where_read(rows_BSKd: Tensor, mask_BTS: Tensor) -> Tensor:
    """The rows in fp32, with zeros for those that no query reads: they may hold NaN, and 0 * NaN would reach a sum."""
    return rows_BSKd.float().where(mask_BTS.any(1)[:, :, None, None], 0)


def with_sinks(out_Hd: Tensor, lse_H: Tensor | None, sinks_H: Tensor | None) -> Tensor:
    """Correct the output of attention for sinks: [..., H, d] in out's dtype. PyTorch runs on every device.

    Args:
        out_Hd: [..., H, d], attention without sinks.
        lse_H: fp32 [..., H], natural log-sum-exps of the scaled scores; -inf where nothing was read. Needed with sinks.
        sinks_H: the sinks' scores; None: there are none, and `out_Hd` is returned.
    """
    if sinks_H is None:
        return out_Hd
    assert lse_H is not None
    assert not (torch.is_grad_enabled() and out_Hd.requires_grad), "log-sum-exps of fused attention have no gradient"
    # In fp64: the last bit of sigmoid depends on a query's place in the pass, and the rounded result must not.
    share_H = torch.sigmoid(lse_H.double() - sinks_H.double())
    return (out_Hd.float() * share_H.float()[..., None]).to(out_Hd.dtype)


def attention_with_sinks(attention: Callable[..., Any], sinks_H: Tensor | None) -> Callable[..., Any]:
    """Wrap a function like `backend.varlen_attention` so that its output accounts for sinks, if there are any."""
    if sinks_H is None:
        return attention

    def attend(*arguments: Any) -> Tensor:
        out_NHd, lse_HN = attention(*arguments, with_lse=True)
        return with_sinks(out_NHd, lse_HN.T, sinks_H)

    return attend


def merge(own: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the outputs [..., d] and log-sum-exps [...] of the same rows over two sets of keys into those over both."""
    share = torch.sigmoid(own[1] - others[1])[..., None]
    out = torch.lerp(others[0].to(share.dtype), own[0].to(share.dtype), share)
    return out.to(own[0].dtype), torch.logaddexp(own[1], others[1])
