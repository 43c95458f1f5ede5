"""Reference of kernels/cross_attention.py: one dense mask, fp32 softmax, plain PyTorch, any device. Shapes as there."""

import torch
from torch import Tensor


def cross_attention(q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor) -> Tensor:
    """See `longdraft.kernels.cross_attention.cross_attention`."""
    n_slots, n_rows, n_heads, head_dim = q_BTHd.shape
    n_kv_heads = keys_BSKd.shape[2]
    written_BS = torch.arange(keys_BSKd.shape[1], device=q_BTHd.device) < lengths_B[:, None]
    # Rows beyond a length may hold NaN, and 0 * NaN would carry it into the sum over values.
    keys_BSKd, values_BSKd = (x.float().where(written_BS[:, :, None, None], 0) for x in (keys_BSKd, values_BSKd))
    q_BTKGd = q_BTHd.float().view(n_slots, n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, keys_BSKd) * head_dim**-0.5
    scores_BKGTS = scores_BKGTS.masked_fill(~written_BS[:, None, None, None], float("-inf"))
    weights_BKGTS = torch.softmax(scores_BKGTS, -1).nan_to_num(0.0)  # zeros where there is nothing to read
    return torch.einsum("bkgts,bskd->btkgd", weights_BKGTS, values_BSKd).reshape(q_BTHd.shape).to(q_BTHd.dtype)
