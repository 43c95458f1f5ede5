"""The yardstick for kernels' errors: plain arithmetic in the operands' precision, in one order on every machine.

A kernel's error against fp64 (or fp32, for half precision) is at most twice that of these functions, a gradient's at
most three times. PyTorch's own products and attention cannot serve: their order of sums, and so their error, differs
between processors, thread counts and libraries. Here sums run along the reduced dimension one number at a time, from
first to last, in fp32; tensors are multiplied and added whole, and each operation rounds once, the same everywhere.
Results of products are rounded to the operands' dtype. Given fp64, everything is fp64: the truth. Exponentials and
logarithms are taken in fp64, since PyTorch's in fp32 differ by processor. Any device.

The fixture `plain` is this module. Shapes: N queries, M keys, H query heads, K key/value heads (head h reads key head h
// (H / K)), d head width, before which any dimensions may stand; D hidden, V vocabulary.
"""

from functools import reduce

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the precision of sums."""
    return x if x.dtype == torch.float64 else x.float()


def total(x: Tensor) -> Tensor:
    """The sum over the last dimension."""
    numbers = wide(x).movedim(-1, 0).contiguous()
    result = torch.zeros_like(numbers[0]) if len(numbers) else numbers.sum(0)
    for part in numbers:
        result += part
    return result


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, not rounded to their dtype."""
    columns = wide(left).movedim(-1, 0).unsqueeze(-1).contiguous()
    lines = wide(right).movedim(-2, 0).unsqueeze(-2).contiguous()
    shape = torch.broadcast_shapes(columns.shape[1:], lines.shape[1:])
    result = torch.zeros(shape, dtype=columns.dtype, device=columns.device)
    for column, line in zip(columns, lines, strict=True):
        result += column * line
    return result


def linear(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    y = product(x, weight_NI.T)
    return (y if bias_N is None else y + wide(bias_N)).to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Attention of q [..., N, H, d] to k and v [..., M, K, d]. sees: bool [..., N, M]; a query that sees none gives 0.

    Weights are rounded to the dtype before they are multiplied with the values, as in every kernel of that precision.
    """
    q, k, v = _heads_first(q, k, v)
    return product(_weights(q, k, sees).to(v.dtype), v).to(v.dtype).transpose(-3, -2)


def attention_gradients(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, for the output's gradient `grad` [..., N, H, d]."""
    groups = q.shape[-2] // k.shape[-2]
    q, k, v = _heads_first(q, k, v)
    grad = grad.transpose(-3, -2)
    weights = _weights(q, k, sees)
    d_weights = wide(product(grad, v.mT).to(v.dtype))
    d_scores = weights * (d_weights - total(weights * d_weights)[..., None]) * q.shape[-1] ** -0.5
    weights, d_scores = weights.to(v.dtype), d_scores.to(v.dtype)
    dq, dk, dv = (product(*factors).to(v.dtype) for factors in ((d_scores, k), (d_scores.mT, q), (weights.mT, grad)))
    # A key head adds the gradients of its query heads one after the other, as autograd does.
    dk, dv = (reduce(torch.add, x.unflatten(-3, (-1, groups)).unbind(-3)) for x in (dk, dv))
    return dq.transpose(-3, -2), dk.transpose(-3, -2), dv.transpose(-3, -2)


def cross_entropy(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(The sum of the losses, the states' gradient times `scale`); labels below 0 are ignored."""
    hidden_MD, counts = hidden_MD.detach(), labels_M >= 0
    logits_MV = wide(linear(hidden_MD, weight_VD))
    labels_M = labels_M.clamp(min=0)[:, None]
    largest_M1 = logits_MV.amax(1, keepdim=True)
    weights_MV = _exp(logits_MV - largest_M1)
    sums_M = total(weights_MV)
    losses_M = _log(sums_M) + (largest_M1 - logits_MV.gather(1, labels_M))[:, 0]
    grad_MV = weights_MV / sums_M[:, None]
    grad_MV.scatter_add_(1, labels_M, torch.full_like(largest_M1, -1.0))
    grad_MV = (grad_MV * scale * counts[:, None]).to(hidden_MD.dtype)
    return total(losses_M.where(counts, 0.0)), product(grad_MV, weight_VD).to(hidden_MD.dtype)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[-2] // k.shape[-2]
    return q.transpose(-3, -2), *(x.transpose(-3, -2).repeat_interleave(groups, -3) for x in (k, v))


def _weights(q: Tensor, k: Tensor, sees: Tensor) -> Tensor:
    """Softmax of the scaled scores, [..., H, N, M]."""
    sees = sees.unsqueeze(-3)
    scores = (product(q, k.mT) * q.shape[-1] ** -0.5).masked_fill(~sees, float("-inf"))
    weights = _exp(scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min))
    sums = total(weights)[..., None]
    return weights / sums.where(sums > 0, 1.0)


def _exp(x: Tensor) -> Tensor:
    return x.double().exp().to(x.dtype)


def _log(x: Tensor) -> Tensor:
    return x.double().log().to(x.dtype)
