"""A draft's losses against the target's distribution, through the LM head that both share, without holding all logits.

The draft's labelled rows are processed in chunks as in kernels/linear_cross_entropy.py. Beside a chunk's logits are the
target's, computed from its states at the same places, so nothing of labels x vocabulary exists.

Why ours: Liger's fused distillation also computes the gradient of the head, which is frozen here: one more product and
V x D more memory. It takes one part per call, holds 1024 rows of both logits for any V, and knows KL but not the
acceptance. Its fused KL against given probabilities needs all of these, tokens x V.
Shapes: P parts, N states of a part, M labels of a part, R states of the target, C rows of a chunk, B rows of a block,
D hidden width, V vocabulary, K ranks; p is the target's distribution of a row, q the draft's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import check_parts, chunked, count_before, rows_per_block

TINY = 1e-30
# Limit on log p/q: beyond it a token adds nothing to any sum in fp32.
MOST_LOG_RATIO = 69.0


class LinearDistillation(NamedTuple):
    """Sums over each part's labels."""

    loss_sums: Tensor  # fp32 [P], differentiable
    n_labels: Tensor  # int64 [P]
    top_k_counts: Tensor  # int64 [P, K], as in `LinearCrossEntropy`
    overlaps: Tensor  # fp32 [P], sums of min(p, q) over all rows of a part, ignored ones included; 0 if not measured


class TargetStates(NamedTuple):
    """The target's side of the losses."""

    states: Tensor  # [R, D] in the draft's dtype, the input of the LM head
    rows: Sequence[Tensor]  # each part's int64 [M]: the state that teaches each label
    # fp32 [R], log-sum-exp of the target's logits over its whole vocabulary: if the LM head has fewer tokens, p on the
    # others counts as lost. None renormalises p to the LM head's tokens.
    log_totals: Tensor | None = None


def linear_distillation(
    hiddens: Sequence[Tensor],
    weight_VD: Tensor,
    labels: Sequence[Tensor],
    target: TargetStates,
    objective: str,
    *,
    rows: Sequence[Tensor] | None = None,
    text_weight: float = 0.0,
    ignore_index: int = -100,
    top_k: int = 0,
    measure: bool = False,
) -> LinearDistillation:
    """Each part's loss between p = `softmax(target @ weight.T)` and q = `softmax(hidden @ weight.T)`, over its labels.

    The forward pass computes the gradient and the backward pass hands it over, so the latter can run only once.
    PyTorch runs on every device: it is little work beside the products with the LM head.

    Args:
        hiddens, weight_VD, labels, rows, ignore_index, top_k: as for `linear_cross_entropy`.
        objective: "kl", KL(p || q); "overlap", -log of the sum of min(p, q); "acceptance", -log of how often both
            choose the same token under the same Gumbel noise.
        text_weight: weight in [0, 1] of the labels' cross-entropy in the loss; the objective has the rest.
        measure: also compute the overlaps.
    """
    assert objective in LOSSES, f"objective: {objective!r}"
    check_parts(hiddens, weight_VD, labels, rows)
    check_parts([target.states] * len(hiddens), weight_VD, labels, target.rows)
    n_labels = torch.stack([(labels_M != ignore_index).sum() for labels_M in labels])
    rows = rows or [torch.arange(len(labels_M), device=labels_M.device) for labels_M in labels]
    sizes, taught_T = [len(labels_M) for labels_M in labels], torch.cat(list(target.rows))
    overlap_T = target.states.new_zeros(sum(sizes), dtype=torch.float32)
    buffer: list[Tensor] = []  # for the target's logits of a chunk; all chunks share it

    def losses(chunk: slice, logits_CV: Tensor, labels_C: Tensor, loss_C: Tensor, before_C: Tensor, *options) -> None:
        if not buffer:
            buffer.append(torch.empty_like(logits_CV))
        target_CV, taught_C = buffer[0][: len(logits_CV)], taught_T[chunk]
        torch.mm(target.states[taught_C], weight_VD.detach().T, out=target_CV)
        totals_C = None if target.log_totals is None else target.log_totals[taught_C]
        chunk_distillation(
            logits_CV, target_CV, totals_C, labels_C, loss_C, before_C, overlap_T[chunk] if measure else None,
            objective, text_weight, *options,
        )  # fmt: skip

    sums_P, counts_PK = chunked(hiddens, weight_VD, labels, rows, ignore_index, top_k, losses, logits_beside=1)
    overlaps_P = torch.stack([part.sum() for part in overlap_T.split(sizes)])
    return LinearDistillation(sums_P, n_labels, counts_PK, overlaps_P)


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
        labels_C, loss_C, before_C, ignore_index, top_k: as for `chunk_losses` of linear_cross_entropy.py.
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
