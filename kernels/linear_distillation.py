"""A draft's losses against the target's own distribution, through the LM head that both share, without their logits.

The draft's labelled rows are taken in chunks as in kernels/linear_cross_entropy.py, and beside each chunk's logits are
the target's, from its states at the same places: nothing of labels x vocabulary exists. The losses are plain PyTorch on
every device (reference/linear_distillation.py). Liger's fused distillation does less for a frozen head: it also makes
the head's gradient, a product more and V x D more of memory; it takes one part a call, holds 1024 rows of both logits
whatever V is, and knows KL, but not the acceptance. Its KL of probabilities wants all of these, tokens x V.
Not here: which positions of the target teach a label (train/methods.py).
Shapes: P parts, N states of a part, M labels of a part, R states of the target, C of a chunk, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import check_parts, chunked
from longdraft.kernels.reference.linear_distillation import LOSSES, chunk_distillation


class LinearDistillation(NamedTuple):
    """`loss_sums` fp32 [P], differentiable; `n_labels` int64 [P]; `rank_counts` int64 [P, K], as
    `LinearCrossEntropy`'s; `overlaps` fp32 [P]: the sum of min(p, q), summed over all rows of a part, or 0."""

    loss_sums: Tensor
    n_labels: Tensor
    rank_counts: Tensor
    overlaps: Tensor


class TargetStates(NamedTuple):
    """`states` [R, D]: what the LM head reads of the target, in the draft's dtype; `rows` int64 [M] of each part: which
    of them teaches each label; `log_totals` fp32 [R]: log-sum-exp of the target's logits of its whole vocabulary, where
    the LM head given here is of fewer tokens and what lies on others shall count as lost; None renormalises."""

    states: Tensor
    rows: Sequence[Tensor]
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
    """Each part's loss between `softmax(hidden @ weight.T)` and `softmax(target @ weight.T)`, summed over its labels.

    The gradient is made in the forward pass and given away in the backward pass, which can therefore run once.

    Args:
        hiddens, weight_VD, labels, rows, ignore_index, top_k: as of `linear_cross_entropy`.
        objective: "kl", KL(target || draft); "overlap", -log of the sum of min(p, q); "acceptance", -log of how often
            both choose the same token under the same Gumbel noise.
        text_weight: share of the labels' cross-entropy in the loss, beside the objective.
        measure: also sum the overlaps, over all rows, ignored labels' too.

    Raises:
        ValueError: unknown objective; dtypes, or numbers of parts or labels, that differ.
    """
    if objective not in LOSSES:
        raise ValueError(f"objective: {objective!r} is none of {', '.join(LOSSES)}")
    check_parts(hiddens, weight_VD, labels, rows)
    check_parts([target.states] * len(hiddens), weight_VD, labels, target.rows)
    n_labels = torch.stack([(labels_M != ignore_index).sum() for labels_M in labels])
    rows = rows or [torch.arange(len(labels_M), device=labels_M.device) for labels_M in labels]
    sizes, taught_T = [len(labels_M) for labels_M in labels], torch.cat(list(target.rows))
    overlap_T = target.states.new_zeros(sum(sizes), dtype=torch.float32)
    beside: list[Tensor] = []  # the target's logits of a chunk, which all chunks share

    def losses(chunk: slice, logits_CV: Tensor, labels_C: Tensor, loss_C: Tensor, before_C: Tensor, *given) -> None:
        if not beside:
            beside.append(torch.empty_like(logits_CV))
        target_CV, taught_C = beside[0][: len(logits_CV)], taught_T[chunk]
        torch.mm(target.states[taught_C], weight_VD.detach().T, out=target_CV)
        totals_C = None if target.log_totals is None else target.log_totals[taught_C]
        chunk_distillation(
            logits_CV, target_CV, totals_C, labels_C, loss_C, before_C, overlap_T[chunk] if measure else None,
            objective, text_weight, *given,
        )  # fmt: skip

    sums_P, counts_PK = chunked(hiddens, weight_VD, labels, rows, ignore_index, top_k, losses, logits_beside=1)
    overlaps_P = torch.stack([part.sum() for part in overlap_T.split(sizes)])
    return LinearDistillation(sums_P, n_labels, counts_PK, overlaps_P)
