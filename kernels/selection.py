"""Select rows of one slot's cache: scores of keys, the best keys, means of chunks, and copies of rows.

On a GPU each function is one Triton launch for all layers, which reads keys once in their own dtype, with nothing read
on the host. Elsewhere PyTorch goes layer by layer, which bounds the fp32 copies and the scores that are held.
Shapes: L layers, S rows of the slot, H query heads, K key/value heads, d head width, R rows picked, C chunks.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend

# Keys scored at once, which bounds their fp32 copy.
BLOCK = 8192


def key_scores(queries_LHd: Tensor, keys_LSKd: Tensor) -> Tensor:
    """Importance of keys: q . k summed over the query group of each key head, fp32 [L, K, S], unscaled.

    It is computed as the sum of the group's queries times the key, so no key is repeated.

    Args:
        queries_LHd: queries of one token after RoPE; head h belongs to key head h // (H / K).
        keys_LSKd: keys to be scored, S >= 1, of any strides but the last, which is 1.

    Source: TokenSwift (arXiv 2502.18890), section 3.2.
    """
    if (triton := backend.triton_kernels("selection", keys_LSKd.device.type)) is not None:
        return triton.key_scores(queries_LHd, keys_LSKd)
    return torch.stack([_layer_scores(*layer) for layer in zip(queries_LHd, keys_LSKd, strict=True)])


def _layer_scores(query_Hd: Tensor, keys_SKd: Tensor) -> Tensor:
    n_kv_heads, width = keys_SKd.shape[1:]
    query_Kd = query_Hd.float().view(n_kv_heads, -1, width).sum(1)
    blocks = [torch.einsum("kd,skd->ks", query_Kd, block.float()) for block in keys_SKd.split(BLOCK)]
    return torch.cat(blocks, 1)


def top_keys(queries_LHd: Tensor, keys_LSKd: Tensor, count: int) -> Tensor:
    """The `count` keys of each layer and key head with the highest `key_scores`: int64 [L, K, count], best first."""
    if backend.triton_kernels("selection", keys_LSKd.device.type) is not None:
        return key_scores(queries_LHd, keys_LSKd).topk(count, dim=2).indices
    layers = zip(queries_LHd, keys_LSKd, strict=True)
    return torch.stack([_layer_scores(*layer).topk(count, dim=1).indices for layer in layers])


def chunk_means(keys_LSKd: Tensor, chunk: int, out_LCKd: Tensor) -> None:
    """Write the mean of every `chunk` consecutive keys. Sums are in fp32, in the order of rows.

    Args:
        keys_LSKd: S = C * chunk rows, at least one chunk, of any strides but the last, which is 1.
        chunk: keys per chunk.
        out_LCKd: written, in any dtype, of any strides but the last, which is 1.

    Source: TriForce (arXiv 2404.11912), section 4.1.
    """
    if (triton := backend.triton_kernels("selection", keys_LSKd.device.type)) is not None:
        triton.chunk_means(keys_LSKd, chunk, out_LCKd)
        return
    for keys_SKd, out_CKd in zip(keys_LSKd, out_LCKd, strict=True):
        out_CKd.copy_(keys_SKd.unflatten(0, (-1, chunk)).mean(1, dtype=torch.float32))


def gather_rows(
    keys_LSKd: Tensor, values_LSKd: Tensor, index_LRK: Tensor, keys_out_LRKd: Tensor, values_out_LRKd: Tensor
) -> None:
    """Copy row index[l, r, k] of keys and values of layer l and key head k to row r of the outputs.

    Args:
        keys_LSKd, values_LSKd: of any strides but the last, which is 1.
        index_LRK: int64 in [0, S), of any strides.
        keys_out_LRKd, values_out_LRKd: written; they must share no memory with keys and values.
    """
    if (triton := backend.triton_kernels("selection", keys_LSKd.device.type)) is not None:
        triton.gather_rows(keys_LSKd, values_LSKd, index_LRK, keys_out_LRKd, values_out_LRKd)
        return
    for source_LSKd, out_LRKd in ((keys_LSKd, keys_out_LRKd), (values_LSKd, values_out_LRKd)):
        for source_SKd, index_RK, out_RKd in zip(source_LSKd, index_LRK, out_LRKd, strict=True):
            out_RKd.copy_(source_SKd.gather(0, index_RK[..., None].expand(-1, -1, source_SKd.shape[-1])))


def key_scores_reference(queries_LHd: Tensor, keys_LSKd: Tensor) -> Tensor:
    """`key_scores` of all layers at once, with keys repeated for their query heads."""
    n_heads, n_kv = queries_LHd.shape[1], keys_LSKd.shape[2]
    keys_LSHd = keys_LSKd.float().repeat_interleave(n_heads // n_kv, 2)
    return torch.einsum("lhd,lshd->lhs", queries_LHd.float(), keys_LSHd).unflatten(1, (n_kv, -1)).sum(2)


def chunk_means_reference(keys_LSKd: Tensor, chunk: int, out_LCKd: Tensor) -> None:
    """`chunk_means` in plain PyTorch."""
    out_LCKd.copy_(keys_LSKd.unflatten(1, (-1, chunk)).mean(2, dtype=torch.float32))


def gather_rows_reference(
    keys_LSKd: Tensor, values_LSKd: Tensor, index_LRK: Tensor, keys_out_LRKd: Tensor, values_out_LRKd: Tensor
) -> None:
    """`gather_rows` in plain PyTorch."""
    layers_L11 = torch.arange(keys_LSKd.shape[0], device=index_LRK.device)[:, None, None]
    heads_K = torch.arange(keys_LSKd.shape[2], device=index_LRK.device)
    keys_out_LRKd.copy_(keys_LSKd[layers_L11, index_LRK, heads_K])
    values_out_LRKd.copy_(values_LSKd[layers_L11, index_LRK, heads_K])
