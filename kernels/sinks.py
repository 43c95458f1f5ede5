"""Attention sinks (gpt-oss, arXiv 2508.10925): a learned score a head, of a key without a value that every query reads.

What it reads besides gets that much less of the softmax: the output is times sigmoid(log-sum-exp of its scores - sink).
Shapes: ... any, H heads, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_sinks(out_Hd: Tensor, lse_H: Tensor | None, sinks_H: Tensor | None) -> Tensor:
    """Attention [..., H, d] as if its queries had read the sinks too; as it is where there are none.

    lse_H: fp32 [..., H], log-sum-exps of the scaled scores, natural; -inf where nothing was read.
    """
    if sinks_H is None or lse_H is None:
        return out_Hd
    # In fp64, so that what is rounded does not depend on where in the pass a query stands: sigmoid's last bit does.
    share_H = torch.sigmoid(lse_H.double() - sinks_H.double())
    return (out_Hd.float() * share_H.float()[..., None]).to(out_Hd.dtype)


def attention_with_sinks(attention: Callable[..., Any], sinks_H: Tensor | None) -> Callable[..., Any]:
    """A function like `backend.varlen_attention`, as if its queries had read the sinks too."""
    if sinks_H is None:
        return attention

    def attend(*given: Any) -> Tensor:
        out_NHd, lse_HN = attention(*given, with_lse=True)
        return with_sinks(out_NHd, lse_HN.T, sinks_H)

    return attend
