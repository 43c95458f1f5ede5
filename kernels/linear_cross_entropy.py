"""Cross-entropy of a frozen linear layer (the LM head) without its logits: Liger's kernel on a GPU, chunks elsewhere.

Not here: which positions and labels count (models/drafts/, train/batches.py).
Shapes: M rows, D hidden, V vocabulary, K ranks counted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import linear_cross_entropy as reference

IMPLEMENTATIONS = ("auto", "liger", "torch")
# Liger's kernel returns no ranks; beside it they are counted on at most this many rows, evenly spaced over the labels.
RANKED_ROWS_BESIDE_LIGER = 1024


class LinearCrossEntropy(NamedTuple):
    """`loss_sum` fp32 scalar; `n_labels` int64 scalar; `rank_counts` int64 [K]: labels whose logit is the (r+1)-th
    largest of its row; `n_ranked` int64 scalar: the labels that these were counted over."""

    loss_sum: Tensor
    n_labels: Tensor
    rank_counts: Tensor
    n_ranked: Tensor


def linear_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    *,
    ignore_index: int = -100,
    top_k: int = 0,
    implementation: str = "auto",
) -> LinearCrossEntropy:
    """Summed cross-entropy of `softmax(hidden @ weight.T)` against the labels; never holds M x V.

    Args:
        hidden_MD: fp32 or bf16; the only argument that gets a gradient.
        weight_VD: the frozen LM head, in hidden_MD's dtype.
        labels_M: int64 token ids, or `ignore_index`.
        top_k: count how often the label has rank 0..top_k-1 among the logits; 0 counts nothing. Chunked PyTorch counts
            over all labels from the logits it has anyway, Liger's kernel over a sample of rows.
        implementation: "liger" and "torch" are taken at their word, "auto" is Liger on a GPU where it is installed.

    Raises:
        ValueError: unknown implementation, or one that cannot run here; dtypes that differ.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: {implementation!r} is none of {', '.join(IMPLEMENTATIONS)}")
    if hidden_MD.dtype != weight_VD.dtype:
        raise ValueError(f"weight_VD: {weight_VD.dtype}, but hidden_MD is {hidden_MD.dtype}; cast one of them")
    n_labels = (labels_M != ignore_index).sum()
    use_liger = implementation == "liger" or (
        implementation == "auto" and hidden_MD.is_cuda and backend.liger_cross_entropy() is not None
    )
    use_liger = use_liger and len(hidden_MD) > 0  # Liger divides by the number of rows
    if not use_liger:
        loss_sum, rank_counts = reference.linear_cross_entropy(hidden_MD, weight_VD, labels_M, ignore_index, top_k)
        return LinearCrossEntropy(loss_sum, n_labels, rank_counts, n_labels if top_k else torch.zeros_like(n_labels))

    liger = backend.liger_cross_entropy()
    if liger is None:
        raise ValueError("implementation: 'liger' needs the packages liger-kernel and triton; install longdraft[gpu]")
    # (bias, class weights, ignore_index, z-loss, smoothing, reduction): the first of the results is the loss.
    loss_sum = liger.apply(hidden_MD, weight_VD.detach(), labels_M, None, None, ignore_index, 0.0, 0.0, "sum")[0]
    rank_counts, n_ranked = _sampled_ranks(hidden_MD, weight_VD, labels_M, ignore_index, top_k)
    return LinearCrossEntropy(loss_sum.float(), n_labels, rank_counts, n_ranked)


@torch.no_grad()
def _sampled_ranks(
    hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, ignore_index: int, top_k: int
) -> tuple[Tensor, Tensor]:
    if not top_k:
        return labels_M.new_zeros(0), labels_M.new_zeros(())
    stride = max(1, -(-len(labels_M) // RANKED_ROWS_BESIDE_LIGER))
    hidden_MD, labels_M = hidden_MD[::stride], labels_M[::stride]
    _, rank_counts = reference.linear_cross_entropy(hidden_MD, weight_VD, labels_M, ignore_index, top_k)
    return rank_counts, (labels_M != ignore_index).sum()
