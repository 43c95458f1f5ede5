"""References of kernels/selection.py: everything at once, with keys repeated for their query heads. Shapes as there."""

import torch
from torch import Tensor


def key_scores(queries_LHd: Tensor, keys_LSKd: Tensor) -> Tensor:
    """See `longdraft.kernels.selection.key_scores`."""
    n_heads, n_kv = queries_LHd.shape[1], keys_LSKd.shape[2]
    keys_LSHd = keys_LSKd.float().repeat_interleave(n_heads // n_kv, 2)
    return torch.einsum("lhd,lshd->lhs", queries_LHd.float(), keys_LSHd).unflatten(1, (n_kv, -1)).sum(2)


def chunk_means(keys_LSKd: Tensor, chunk: int, out_LCKd: Tensor) -> None:
    """See `longdraft.kernels.selection.chunk_means`."""
    out_LCKd.copy_(keys_LSKd.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))


def gather_rows(
    keys_LSKd: Tensor, values_LSKd: Tensor, index_LRK: Tensor, keys_out_LRKd: Tensor, values_out_LRKd: Tensor
) -> None:
    """See `longdraft.kernels.selection.gather_rows`."""
    layers_L11 = torch.arange(keys_LSKd.shape[0], device=index_LRK.device)[:, None, None]
    heads_K = torch.arange(keys_LSKd.shape[2], device=index_LRK.device)
    keys_out_LRKd.copy_(keys_LSKd[layers_L11, index_LRK, heads_K])
    values_out_LRKd.copy_(values_LSKd[layers_L11, index_LRK, heads_K])
