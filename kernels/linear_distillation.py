"""A draft's losses against the target's distribution, through the LM head that both share, without holding all logits.

The draft's labelled rows are processed in chunks as in kernels/linear_cross_entropy.py. Beside a chunk's logits are the
target's, computed from its states at the same places, so nothing of labels x vocabulary exists.

Why ours: Liger's fused distillation also computes the gradient of the head, which is frozen here: one more product and
V x D more memory. It takes one part per call, holds 1024 rows of both logits for any V, and knows KL but not the
acceptance. Its fused KL against given probabilities needs all of these, tokens x V.
Not here: which positions of the target teach a label (train/methods/base.py).
Shapes: P parts, N states of a part, M labels of a part, R states of the target, C rows of a chunk, D hidden width,
V vocabulary, K ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import check_parts, chunked
from longdraft.kernels.reference.linear_distillation import LOSSES, chunk_distillation


class LinearDistillation(NamedTuple):
    """Sums over each part's labels."""

    loss_sums: Tensor  # fp32 [P], differentiable
    n_labels: Tensor  # int64 [P]
    rank_counts: Tensor  # int64 [P, K], as in `LinearCrossEntropy`
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
    PyTorch runs on every device (reference/linear_distillation.py).

    Args:
        hiddens, weight_VD, labels, rows, ignore_index, top_k: as for `linear_cross_entropy`.
        objective: "kl", KL(p || q); "overlap", -log of the sum of min(p, q); "acceptance", -log of how often both
            choose the same token under the same Gumbel noise.
        text_weight: weight in [0, 1] of the labels' cross-entropy in the loss; the objective has the rest.
        measure: also compute the overlaps.
    Raises:
        ValueError: the objective is unknown, or dtypes or numbers of parts or labels differ.
    """
    if objective not in LOSSES:
        raise ValueError(f"objective: {objective!r} is none of {', '.join(LOSSES)}")
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
