"""Select rows of one slot's cache: scores of keys, the best keys, means of chunks, and copies of rows.

PyTorch goes layer by layer, which bounds the fp32 copies. Nothing is read on the host.
Shapes: L layers, S rows of the slot, H query heads, K key/value heads, d head width, R rows picked, C chunks.
"""

import torch
from torch import Tensor

# Keys scored at once, which bounds their fp32 copy.
BLOCK = 8192


def key_scores(queries_LHd: Tensor, keys_LSKd: Tensor) -> Tensor:
    """Importance of keys: q . k summed over the query group of each key head, fp32 [L, K, S], unscaled.

    It is computed as the sum of the group's queries times the key, so no key is repeated.

    Args:
        queries_LHd: queries of one token after RoPE; head h belongs to key head h // (H / K).
        keys_LSKd: keys to be scored, S >= 1.

    Source: TokenSwift (arXiv 2502.18890), section 3.2.
    """
    layers, n_kv_heads = [], keys_LSKd.shape[2]
    for query_Hd, keys_SKd in zip(queries_LHd, keys_LSKd, strict=True):
        query_Kd = query_Hd.float().unflatten(0, (n_kv_heads, -1)).sum(1)
        blocks = [torch.einsum("kd,skd->ks", query_Kd, block.float()) for block in keys_SKd.split(BLOCK)]
        layers.append(torch.cat(blocks, 1))
    return torch.stack(layers)


def top_keys(queries_LHd: Tensor, keys_LSKd: Tensor, count: int) -> Tensor:
    """The `count` keys of each layer and key head with the highest `key_scores`: int64 [L, K, count], best first."""
    return key_scores(queries_LHd, keys_LSKd).topk(count, dim=2).indices


def chunk_means(keys_LSKd: Tensor, chunk: int, out_LCKd: Tensor) -> None:
    """Write the mean of every `chunk` consecutive keys. Sums are in fp32, in the order of rows.

    Args:
        keys_LSKd: S = C * chunk rows, at least one chunk.
        chunk: keys per chunk.
        out_LCKd: written, in any dtype.

    Source: TriForce (arXiv 2404.11912), section 4.1.
    """
    for keys_SKd, out_CKd in zip(keys_LSKd, out_LCKd, strict=True):
        out_CKd.copy_(keys_SKd.unflatten(0, (-1, chunk)).mean(1, dtype=torch.float32))


def gather_rows(
    keys_LSKd: Tensor, values_LSKd: Tensor, index_LRK: Tensor, keys_out_LRKd: Tensor, values_out_LRKd: Tensor
) -> None:
    """Copy row index[l, r, k] of keys and values of layer l and key head k to row r of the outputs.

    Args:
        keys_LSKd, values_LSKd: of any strides.
        index_LRK: int64 in [0, S), of any strides.
        keys_out_LRKd, values_out_LRKd: written; they must share no memory with keys and values.
    """
    for source_LSKd, out_LRKd in ((keys_LSKd, keys_out_LRKd), (values_LSKd, values_out_LRKd)):
        for source_SKd, index_RK, out_RKd in zip(source_LSKd, index_LRK, out_LRKd, strict=True):
            out_RKd.copy_(source_SKd.gather(0, index_RK[..., None].expand(-1, -1, source_SKd.shape[-1])))
