"""The loss that every draft trains on, through the target's frozen LM head: towards the text, or the target itself.

The loss has parts that are summed and counted separately: the heads of TokenSwift or Medusa, the noise shifts of
LongSpec. N tokens of several document pieces are packed end to end; a label is always in the same piece as its token.
Shapes: N tokens, M labels of a part, D hidden, V vocabulary, P parts, K ranks counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.kernels.linear_distillation import TargetStates, linear_distillation

TOP_K = 3
IGNORED = -100  # a label that does not count


class LossPart(NamedTuple):
    """The labels of a part of the loss: `rows` int64 [M], the states that have a label, and `labels` int64 [M], their
    token ids, or IGNORED."""

    rows: Tensor
    labels: Tensor


class Distillation(NamedTuple):
    """The target's distributions where a part has labels, and how the loss compares the draft's with them: `objective`
    and `text_weight` as of `linear_distillation`. `measure`: also sum the overlap of both distributions."""

    target: TargetStates
    objective: str
    text_weight: float = 0.0
    measure: bool = False


class DraftLoss(NamedTuple):
    """Sums for each part.

    Attributes:
        sums: fp32 [P], differentiable: the loss, summed over labels.
        n_labels: int64 [P], the number of labels.
        top_k_counts: int64 [P, K], how many labels have which rank among the logits.
        overlaps: fp32 [P], the overlap of the draft's and the target's distribution, summed over rows; 0 if it is not
            measured.
    """

    sums: Tensor
    n_labels: Tensor
    top_k_counts: Tensor
    overlaps: Tensor


def draft_loss(
    states: Sequence[Tensor],
    parts: Sequence[LossPart],
    lm_head_VD: Tensor,
    count_top_k: bool,
    distillation: Distillation | None = None,
) -> DraftLoss:
    """The loss of every part, summed over its labels. All parts are computed in one call, and go backward once.

    Args:
        states: the LM head's input for each part, [N, D].
        lm_head_VD: the frozen LM head.
        count_top_k: also count the labels among the first TOP_K candidates.
        distillation: None for cross-entropy of the labels.
    """
    labels, rows = ([part[i] for part in parts] for i in (1, 0))
    options: dict[str, Any] = {"rows": rows, "ignore_index": IGNORED, "top_k": TOP_K if count_top_k else 0}
    if distillation is None:
        out = linear_cross_entropy(states, lm_head_VD, labels, **options)
        return DraftLoss(*out, overlaps=torch.zeros_like(out.loss_sums))
    target, objective, options["text_weight"], options["measure"] = distillation
    return DraftLoss(*linear_distillation(states, lm_head_VD, labels, target, objective, **options))


def ahead(tokens_N: Tensor, supervised_N: Tensor, borders: Sequence[int], distance: int) -> LossPart:
    """The part in which token t proposes token t + `distance`: all such pairs within a piece whose second token is
    supervised.

    Args:
        tokens_N: token ids. supervised_N: bool; tokens that may be a label.
        borders: where each piece starts, then N.
    """
    device, sizes_P = tokens_N.device, torch.tensor(borders).diff()
    piece_ends_N = torch.tensor(borders[1:]).repeat_interleave(sizes_P).to(device)
    t_N = torch.arange(len(tokens_N), device=device)
    rows = t_N[t_N + distance < piece_ends_N]
    rows = rows[supervised_N[rows + distance]]
    return LossPart(rows, tokens_N[rows + distance].long())
