"""Losses of a chunk of the draft's logits against the target's, and their gradient in the draft's place; plain PyTorch.

p is the target's distribution of a row, q the draft's. This runs on every device: it is little work beside the products
with the LM head, and only a block of rows is held in fp32. Not here: those products, chunks
(kernels/linear_distillation.py).
Shapes: C rows of a chunk, B rows of a block, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longdraft.kernels.reference.linear_cross_entropy import count_before, rows_per_block

TINY = 1e-30
# Limit on log p/q: beyond it a token adds nothing to any sum in fp32.
MOST_LOG_RATIO = 69.0


def block_rows(vocab_size: int, gpu: bool = False) -> int:
    """B. On a GPU a fourth of cross-entropy's, as more than a dozen numbers are held for each logit."""
    return max(1, rows_per_block(vocab_size, gpu) // (4 if gpu else 1))


def kl(log_p_BV: Tensor, log_q_BV: Tensor, p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q), the sum of p log(p / q), [B], and its gradient in the draft's logits [B, V]: q - p if p sums to 1."""
    loss_B = (log_p_BV - log_q_BV).mul_(p_BV).sum(1)
    return loss_B, torch.addcmul(-p_BV, q_BV, p_BV.sum(1, keepdim=True))


def overlap(log_p_BV: Tensor, log_q_BV: Tensor, p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor]:
    """-log of the sum of min(p, q), how often classical rejection sampling accepts, and its gradient; as `kl`."""
    shared_B1 = torch.minimum(p_BV, q_BV).sum(1, keepdim=True).clamp_(min=TINY)
    lower_BV = q_BV * (q_BV < p_BV)
    gradient_BV = torch.addcmul(-lower_BV, q_BV, lower_BV.sum(1, keepdim=True)).div_(shared_B1)
    return -shared_B1[:, 0].log(), gradient_BV


def acceptance(log_p_BV: Tensor, log_q_BV: Tensor, p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor]:
    """-log A and its gradient, as `kl`. A is how often both choose the same token under the same Gumbel noise g:
    argmax(log p + g) = argmax(log q + g).

    A = sum over v of 1 / sum over w of max(p_w / p_v, q_w / q_v), where both have their Gumbel maximum at v. It lies
    between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978). In the order of falling r = p / q the inner sum is
    P_v / p_v + Q_v / q_v, where P_v sums p up to v and Q_v sums q behind v; times p_v that is P_v + Q_v r_v >= 1.
    What p lacks of 1 is on tokens that the draft does not have; it counts in every P_v.
    """
    ratio_BV, order_BV = torch.sort(log_p_BV - log_q_BV, dim=1, descending=True)
    ratio_BV.clamp_(max=MOST_LOG_RATIO).exp_()
    p_BV, q_BV = p_BV.gather(1, order_BV), q_BV.gather(1, order_BV)
    lost_B1 = (1 - p_BV.sum(1, keepdim=True)).clamp_(min=0)
    behind_BV = (1 - q_BV.cumsum(1)).clamp_(min=0)
    whole_BV = torch.addcmul(p_BV.cumsum(1).add_(lost_B1), behind_BV, ratio_BV)
    # a_v = 1 / inner sum = p_v / whole; b_v = a_v / q_v. As q_w grows, every a_v with a larger ratio falls by a_v b_v,
    # and a_w itself rises.
    a_BV, weight_BV = p_BV.div_(whole_BV), ratio_BV.div_(whole_BV)
    accepted_B1 = a_BV.sum(1, keepdim=True).clamp_(min=TINY)
    weight_BV.mul_(a_BV)
    before_BV = weight_BV.cumsum(1).sub_(weight_BV)
    sorted_BV = q_BV.mul_(before_BV).addcmul_(weight_BV, behind_BV, value=-1).div_(accepted_B1)
    return -accepted_B1[:, 0].log(), torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "kl": kl, "overlap": overlap, "acceptance": acceptance,
}  # fmt: skip


def chunk_distillation(
    logits_CV: Tensor,
    target_CV: Tensor,
    log_totals_C: Tensor | None,
    labels_C: Tensor,
    loss_C: Tensor,
    before_C: Tensor,
    overlap_C: Tensor | None,
    objective: str,
    text_weight: float,
    ignore_index: int,
    top_k: int,
    gradient: bool,
) -> None:
    """The loss of every row, computed in fp32 for logits of any dtype.

    Args:
        logits_CV: the draft's, fp32, bf16 or fp16; with `gradient` overwritten with the loss's gradient. Rows whose
            label is `ignore_index` then hold arbitrary values.
        target_CV: the target's, for the same tokens.
        log_totals_C: fp32, log-sum-exp of the target's logits over its whole vocabulary; None: over those given, so
            that p is renormalised to the draft's tokens.
        labels_C, loss_C, before_C, ignore_index, top_k: as for `chunk_losses` of reference/linear_cross_entropy.py.
        overlap_C: fp32, written: the sum of min(p, q) of every row, with a label or not; None: not needed.
        objective: one of LOSSES.
        text_weight: weight in [0, 1] of the labels' cross-entropy in the loss.
        gradient: whether to overwrite the logits.
    """
    n_rows, n_words = logits_CV.shape
    ignored_C = labels_C == ignore_index
    labels_C = labels_C.masked_fill(ignored_C, 0)
    for start in range(0, n_rows, n_block := block_rows(n_words, logits_CV.is_cuda)):
        rows = slice(start, min(start + n_block, n_rows))
        totals_B = None if log_totals_C is None else log_totals_C[rows]
        outputs = loss_C[rows], before_C[rows], None if overlap_C is None else overlap_C[rows]
        inputs = logits_CV[rows], target_CV[rows], totals_B, labels_C[rows, None]
        _block_losses(*inputs, *outputs, objective, text_weight, top_k, gradient)
    loss_C.masked_fill_(ignored_C, 0.0)
    if top_k:
        before_C.masked_fill_(ignored_C, n_words)


def _block_losses(
    logits_BV: Tensor,
    target_BV: Tensor,
    totals_B: Tensor | None,
    label_B1: Tensor,
    loss_B: Tensor,
    before_B: Tensor,
    overlap_B: Tensor | None,
    objective: str,
    text_weight: float,
    top_k: int,
    gradient: bool,
) -> None:
    exact_BV, target_BV = logits_BV.float(), target_BV.float()  # no copies of fp32 logits
    if top_k:
        before_B.copy_(count_before(exact_BV, label_B1, top_k, torch.empty_like(exact_BV)))
    log_q_BV = torch.log_softmax(exact_BV, 1)
    totals_B = target_BV.logsumexp(1) if totals_B is None else totals_B
    log_p_BV = target_BV - totals_B[:, None]
    p_BV, q_BV = log_p_BV.exp(), log_q_BV.exp()
    if overlap_B is not None:
        overlap_B.copy_(torch.minimum(p_BV, q_BV).sum(1))
    objective_B, gradient_BV = LOSSES[objective](log_p_BV, log_q_BV, p_BV, q_BV)
    if text_weight:
        objective_B = torch.lerp(objective_B, -log_q_BV.gather(1, label_B1)[:, 0], text_weight)
        text_gradient_BV = q_BV.scatter_add_(1, label_B1, q_BV.new_full(label_B1.shape, -1.0))
        gradient_BV.lerp_(text_gradient_BV, text_weight)
    loss_B.copy_(objective_B)
    if gradient:
        logits_BV.copy_(gradient_BV)
