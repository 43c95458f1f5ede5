"""Reference of kernels/segment_attention.py: one dense mask, fp32 softmax, plain PyTorch, any device.

It is slow and holds H x N x M scores. Shapes as there; G = H / K, head h reads key head h // G.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def read_keys(n_queries: int, n_keys: int, segments: Sequence[tuple[int, int, int, int]], window: int | None) -> Tensor:
    """Bool [N, M]: which keys each query reads."""
    mask_NM = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop in segments:
        last = torch.arange(q_stop - q_start)[:, None] + (k_stop - k_start) - (q_stop - q_start)
        key = torch.arange(k_stop - k_start)
        in_window = key > last - (n_keys if window is None else window)
        mask_NM[q_start:q_stop, k_start:k_stop] = (key <= last) & in_window
    return mask_NM


def segment_attention(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: Sequence[tuple[int, int, int, int]],
    window: int | None = None,
) -> Tensor:
    """See `longdraft.kernels.segment_attention.segment_attention`; segments are not checked."""
    mask_NM = read_keys(len(q_NHd), len(k_MKd), segments, window).to(q_NHd.device)
    weights_KGNM = _weights(q_NHd, k_MKd, mask_NM)
    return torch.einsum("kgnm,mkd->nkgd", weights_KGNM, _read(v_MKd, mask_NM)).flatten(1, 2).to(q_NHd.dtype)


def query_gradient(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    grad_NHd: Tensor,
    segments: Sequence[tuple[int, int, int, int]],
    window: int | None = None,
) -> Tensor:
    """The gradient of `segment_attention`'s queries, [N, H, d] in q's dtype, by the formula.

    With P the weights and dP the output's gradient times the values, it is
    d ** -0.5 * sum over keys of P * (dP - sum of P * dP) * K.

    grad_NHd: the output's gradient; rows in no segment are not read.
    """
    mask_NM = read_keys(len(q_NHd), len(k_MKd), segments, window).to(q_NHd.device)
    weights_KGNM = _weights(q_NHd, k_MKd, mask_NM)
    grad_NKGd = _read(grad_NHd, mask_NM.T).unflatten(1, (k_MKd.shape[1], -1))
    d_weights_KGNM = torch.einsum("nkgd,mkd->kgnm", grad_NKGd, _read(v_MKd, mask_NM))
    delta_KGN1 = (weights_KGNM * d_weights_KGNM).sum(-1, keepdim=True)
    d_scores_KGNM = weights_KGNM * (d_weights_KGNM - delta_KGN1) * q_NHd.shape[2] ** -0.5
    return torch.einsum("kgnm,mkd->nkgd", d_scores_KGNM, _read(k_MKd, mask_NM)).flatten(1, 2).to(q_NHd.dtype)


def _weights(q_NHd: Tensor, k_MKd: Tensor, mask_NM: Tensor) -> Tensor:
    """Softmax of the scaled scores over each query's keys, fp32 [K, G, N, M]; zeros for a query without keys."""
    q_NKGd = _read(q_NHd, mask_NM.T).unflatten(1, (k_MKd.shape[1], -1))
    scores_KGNM = torch.einsum("nkgd,mkd->kgnm", q_NKGd, _read(k_MKd, mask_NM)) * q_NHd.shape[2] ** -0.5
    # A row that reads nothing has no softmax: let it read everything, and multiply the result by zero.
    blind_N1 = ~mask_NM.any(1, keepdim=True)
    return scores_KGNM.masked_fill(~(mask_NM | blind_N1), float("-inf")).softmax(-1) * ~blind_N1


def _read(rows_MKd: Tensor, mask_NM: Tensor) -> Tensor:
    """The rows in fp32, with zeros for those that nobody reads: they may hold NaN, and 0 * NaN would reach a sum."""
    return rows_MKd.float().where(mask_NM.any(0)[:, None, None], 0)
