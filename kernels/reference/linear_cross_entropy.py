"""Linear layer and cross-entropy in one, in chunks of rows; plain PyTorch, runs anywhere.

The gradient with respect to the hidden states is made in the forward pass, chunk by chunk, so that neither the logits
nor their gradient ever exist for more than one chunk. The weight is frozen: it gets no gradient. Not here: the choice
of the implementation (kernels/linear_cross_entropy.py).
Shapes: M rows, D hidden, V vocabulary, C rows of a chunk, K ranks counted.
"""

import torch
from torch import Tensor

# Two fp32 buffers of C x V exist at a time (logits, and one more while ranks are counted). 64 MiB each is 341 rows at
# V = 49,152 and 130 rows at V = 128,256: enough rows for a matrix product to run at full speed.
CHUNK_BYTES = 64 * 2**20


def rows_per_chunk(vocab_size: int) -> int:
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def count_ranks(logits_CV: Tensor, labels_C: Tensor, top_k: int) -> Tensor:
    """How many labels have exactly r logits before them, r = 0..top_k-1: int64 [top_k]; of equal logits the lower
    token id comes first, as in an argmax."""
    label_logits_C1 = logits_CV.gather(1, labels_C[:, None])
    before_C = (logits_CV > label_logits_C1).sum(1)
    ids_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    before_C += ((logits_CV == label_logits_C1) & (ids_V < labels_C[:, None])).sum(1)
    return torch.bincount(before_C.clamp(max=top_k), minlength=top_k + 1)[:top_k]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, top_k: int, chunk_rows: int, grad: bool):
        loss_sum = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        rank_counts_K = torch.zeros(top_k, dtype=torch.int64, device=hidden_MD.device)
        hidden_grad_MD = torch.empty_like(hidden_MD) if grad else None
        for start in range(0, hidden_MD.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            labels_C = labels_M[rows]
            logits_CV = (hidden_MD[rows] @ weight_VD.T).float()
            label_logits_C1 = logits_CV.gather(1, labels_C[:, None])
            if top_k:
                rank_counts_K += count_ranks(logits_CV, labels_C, top_k)
            max_C1 = logits_CV.amax(1, keepdim=True)
            exp_CV = logits_CV.sub_(max_C1).exp_()
            sum_C1 = exp_CV.sum(1, keepdim=True)
            loss_sum += (sum_C1.log() + max_C1 - label_logits_C1).sum()
            if hidden_grad_MD is not None:
                probs_CV = exp_CV.div_(sum_C1)
                probs_CV.scatter_add_(1, labels_C[:, None], probs_CV.new_full((len(labels_C), 1), -1.0))
                hidden_grad_MD[rows] = probs_CV.to(weight_VD.dtype) @ weight_VD
        if hidden_grad_MD is not None:
            ctx.save_for_backward(hidden_grad_MD)
        ctx.mark_non_differentiable(rank_counts_K)
        return loss_sum, rank_counts_K

    @staticmethod
    def backward(ctx, *grads):
        (hidden_grad_MD,) = ctx.saved_tensors
        return hidden_grad_MD * grads[0].to(hidden_grad_MD.dtype), None, None, None, None, None


def linear_cross_entropy(
    hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, ignore_index: int, top_k: int, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of `hidden @ weight.T` against the labels that are not `ignore_index`.

    Returns:
        fp32 scalar (differentiable in hidden_MD), int64 [top_k] counts of labels by rank (`count_ranks`).
    """
    kept_N = (labels_M != ignore_index).nonzero().squeeze(1)
    grad = torch.is_grad_enabled() and hidden_MD.requires_grad
    chunk_rows = chunk_rows or rows_per_chunk(weight_VD.shape[0])
    return _LinearCrossEntropy.apply(hidden_MD[kept_N], weight_VD.detach(), labels_M[kept_N], top_k, chunk_rows, grad)  # pyright: ignore[reportReturnType]
