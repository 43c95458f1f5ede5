"""Reference of kernels/segment_attention.py: one dense mask, fp32 softmax, plain PyTorch, any device.

Not fast: it holds H x N x M scores. Shapes as there; head h reads key head h // G, G = H / K.
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
    """Same contract as `longdraft.kernels.segment_attention.segment_attention`; segments are not checked."""
    n_queries, n_heads, head_dim = q_NHd.shape
    mask_NM = read_keys(n_queries, len(k_MKd), segments, window).to(q_NHd.device)
    # Rows that nobody reads may hold NaN, which 0 * NaN would carry into the sum over values.
    read_M11 = mask_NM.any(0)[:, None, None]
    k_MKd, v_MKd = k_MKd.float().where(read_M11, 0), v_MKd.float().where(read_M11, 0)
    q_NKGd = q_NHd.float().unflatten(1, (k_MKd.shape[1], -1))
    scores_KGNM = torch.einsum("nkgd,mkd->kgnm", q_NKGd, k_MKd) * head_dim**-0.5
    # A row that reads nothing has no softmax: it reads everything, and counts for nothing.
    blind_N1 = ~mask_NM.any(1, keepdim=True)
    weights_KGNM = scores_KGNM.masked_fill(~(mask_NM | blind_N1), float("-inf")).softmax(-1) * ~blind_N1
    return torch.einsum("kgnm,mkd->nkgd", weights_KGNM, v_MKd).reshape(n_queries, n_heads, head_dim).to(q_NHd.dtype)
