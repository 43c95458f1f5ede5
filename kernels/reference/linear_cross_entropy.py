"""Cross-entropy of a chunk of logits, its gradient in their place, and the labels' ranks; plain PyTorch.

triton_impl/linear_cross_entropy.py does the same in one kernel, with the same signature. On a CPU this is not only the
reference but what runs. It takes a few rows at a time, so that the passes after the first find them in the cache, and
scratch memory is a block, not a chunk. Not here: the products with the LM head (kernels/linear_cross_entropy.py).
Shapes: C rows of a chunk, B rows of a block, b of them with the label among the first, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend

# Size of a block's fp32 logits. On a CPU 2 MiB, 10 rows at V = 49,152, stay in the cache and are still enough work to
# outweigh the overhead of a dozen calls; a GPU wants fewer and larger calls.
BLOCK_BYTES, GPU_BLOCK_BYTES = 2 * 2**20, 64 * 2**20


def rows_per_block(vocab_size: int, gpu: bool = False) -> int:
    """B."""
    return max(1, (GPU_BLOCK_BYTES if gpu else BLOCK_BYTES) // (4 * vocab_size))


def chunk_losses(
    logits_CV: Tensor,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    ignore_index: int,
    top_k: int,
    gradient: bool,
) -> None:
    """Cross-entropy of every row, computed in fp32 for logits of any dtype.

    Args:
        logits_CV: fp32, bf16 or fp16; with `gradient` overwritten with softmax - onehot(label). Rows whose label is
            `ignore_index` then hold arbitrary values.
        labels_C: int64 token ids, or `ignore_index`.
        loss_C: fp32, written; 0 where the label is `ignore_index`.
        before_C: int32 [C], or [0] if top_k is 0; written: how many logits rank before the label's, where equal logits
            rank by id, as in an argmax. It is exact below top_k; otherwise, and where the label is `ignore_index`, it
            is at least top_k.
        ignore_index: the label of rows that do not count.
        top_k: how many ranks are needed; 0 counts nothing.
        gradient: whether to overwrite the logits.
    """
    n_rows, n_words = logits_CV.shape
    n_block = rows_per_block(n_words, logits_CV.is_cuda)
    ignored_C = labels_C == ignore_index
    labels_C = labels_C.masked_fill(ignored_C, 0)  # `gather` needs an id
    scratch_BV = logits_CV.new_empty((min(n_block, n_rows), n_words), dtype=torch.float32)
    for start in range(0, n_rows, n_block):
        rows = slice(start, start + n_block)
        inputs = logits_CV[rows], labels_C[rows, None], scratch_BV[: min(n_block, n_rows - start)]
        _block_losses(*inputs, loss_C[rows], before_C[rows], top_k, gradient)
    loss_C.masked_fill_(ignored_C, 0.0)
    if top_k:
        before_C.masked_fill_(ignored_C, n_words)


def _block_losses(
    logits_BV: Tensor,
    label_B1: Tensor,
    scratch_BV: Tensor,
    loss_B: Tensor,
    before_B: Tensor,
    top_k: int,
    gradient: bool,
) -> None:
    exact_BV = logits_BV.float()  # no copy of fp32 logits
    if top_k:
        before_B.copy_(count_before(exact_BV, label_B1, top_k, scratch_BV))
    # The exponentials cost most. softmax computes them once, and its largest probability is 1 / their sum.
    probs_BV = torch.softmax(exact_BV, 1, out=scratch_BV)
    torch.sub(exact_BV.amax(1) - exact_BV.gather(1, label_B1)[:, 0], probs_BV.amax(1).log_(), out=loss_B)
    if gradient:
        probs_BV.scatter_add_(1, label_B1, probs_BV.new_full(label_B1.shape, -1.0))
        logits_BV.copy_(probs_BV)


def count_before(logits_BV: Tensor, label_B1: Tensor, top_k: int, scratch_BV: Tensor) -> Tensor:
    """How many logits rank before the label's, as `chunk_losses` counts, in fp32: exact up to 2 ** 24. Summing bools
    would convert them all to int64."""
    own_B1 = logits_BV.gather(1, label_B1)
    before_B = torch.gt(logits_BV, own_B1, out=scratch_BV).sum(1)
    # Equal logits matter only for labels within the first top_k, which are few. A GPU counts all, to avoid a wait.
    first_b = torch.arange(len(before_B), device=logits_BV.device)
    if backend.is_host(logits_BV.device):
        first_b = first_b[before_B < top_k]
    equal_bV = torch.index_select(logits_BV, 0, first_b, out=scratch_BV[: len(first_b)]).eq_(own_B1[first_b])
    ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    equal_bV.masked_fill_(ids_V >= label_B1[first_b], 0.0)
    return before_B.index_add_(0, first_b, equal_bV.sum(1))
