"""Attention sinks (gpt-oss, arXiv 2508.10925): each head has a learned score, as of one more key, without a value.

The other keys get less of the softmax accordingly: the output is scaled by sigmoid(log-sum-exp of the scores - sink).
Shapes: ... any leading shape, N queries, H heads, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_sinks(out_Hd: Tensor, lse_H: Tensor | None, sinks_H: Tensor | None) -> Tensor:
    """Correct the output of attention for sinks: [..., H, d] in out's dtype. PyTorch runs on every device.

    Args:
        out_Hd: [..., H, d], attention without sinks.
        lse_H: fp32 [..., H], natural log-sum-exps of the scaled scores; -inf where nothing was read.
        sinks_H: the sinks' scores. If this or `lse_H` is None, there are none and `out_Hd` is returned.
    """
    if sinks_H is None or lse_H is None:
        return out_Hd
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
