"""The loss that every draft trains on, in parts, through the target's frozen LM head: the text, or the target itself.

A part is what is counted apart: a head of TokenSwift or Medusa, a noise shift of LongSpec. Tokens lie end to end, N of
them, in document pieces of their own; a label never lies in another piece than the token that it belongs to.
Not here: networks (the methods' files), which rows make a step (train/batches.py).
Shapes: N tokens, M labels of a part, D hidden, V vocabulary, P parts, K ranks counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.kernels.linear_distillation import TargetStates, linear_distillation

RANKS = 3
IGNORED = -100  # a label that counts for nothing


class Part(NamedTuple):
    """`rows` int64 [M]: the states that have a label; `labels` int64 [M]: their token ids, or IGNORED."""

    rows: Tensor
    labels: Tensor


class Teaching(NamedTuple):
    """What the target says where a part has labels, and what is lost by not saying the same: `objective` and
    `text_weight` are `linear_distillation`'s; `measure`: also sum the overlap of both distributions."""

    target: TargetStates
    objective: str
    text_weight: float = 0.0
    measure: bool = False


class DraftLoss(NamedTuple):
    """`sums` fp32 [P], differentiable: each part's summed loss; `n_labels` int64 [P]: over how many labels;
    `rank_counts` int64 [P, K]: labels by their rank among the logits; `overlaps` fp32 [P]: of both distributions,
    summed over all rows, or 0 where it is not measured."""

    sums: Tensor
    n_labels: Tensor
    rank_counts: Tensor
    overlaps: Tensor


def draft_loss(
    states: Sequence[Tensor],
    parts: Sequence[Part],
    lm_head_VD: Tensor,
    count_ranks: bool,
    teaching: Teaching | None = None,
) -> DraftLoss:
    """The loss of every part, summed over its labels; all parts in one pass, backward once.

    Args:
        states: what the LM head reads for each part, [N, D].
        lm_head_VD: the frozen LM head.
        count_ranks: also count the labels among the first RANKS candidates.
        teaching: None for cross-entropy of the labels.
    """
    labels, rows = ([part[i] for part in parts] for i in (1, 0))
    options: dict[str, Any] = {"rows": rows, "ignore_index": IGNORED, "top_k": RANKS if count_ranks else 0}
    if teaching is None:
        out = linear_cross_entropy(states, lm_head_VD, labels, **options)
        return DraftLoss(*out, overlaps=torch.zeros_like(out.loss_sums))
    target, objective, options["text_weight"], options["measure"] = teaching
    return DraftLoss(*linear_distillation(states, lm_head_VD, labels, target, objective, **options))


def ahead(tokens_N: Tensor, supervised_N: Tensor, borders: Sequence[int], distance: int) -> Part:
    """The part whose token t proposes token t + `distance`: all such pairs within a piece, the second supervised.

    Args:
        tokens_N: token ids. supervised_N: bool; tokens that may be a label.
        borders: where each piece starts, and at the end N.
    """
    device, sizes_P = tokens_N.device, torch.tensor(borders).diff()
    piece_ends_N = torch.tensor(borders[1:]).repeat_interleave(sizes_P).to(device)
    t_N = torch.arange(len(tokens_N), device=device)
    rows = t_N[t_N + distance < piece_ends_N]
    rows = rows[supervised_N[rows + distance]]
    return Part(rows, tokens_N[rows + distance].long())
