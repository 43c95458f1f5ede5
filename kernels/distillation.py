"""Three losses between a draft's distribution and the target's, computed by blocks of logits, with their gradients.

Why ours: Liger's fused distillation also computes the gradient of the head, which is frozen here: one more product and
V x D more memory. It takes one part per call, holds 1024 rows of both logits for any V, and has KL but not the
acceptance. Its fused KL against given probabilities needs all tokens x V of them.
Shapes: R states of the target, M labels of a part, C rows of a chunk, B rows of a block, D hidden width, V vocabulary;
p is the target's distribution of a row, q the draft's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TINY = 1e-30
# Limit on log p/q: beyond it a token adds nothing to any sum in fp32.
MOST_LOG_RATIO = 69.0
BLOCK = 512  # numbers of a row, in `running_sum`


class Distillation(NamedTuple):
    """The target's distributions where a part has labels, and the loss of the draft's against them.

    Attributes:
        states: [R, D] in the draft's dtype, the target's input of the LM head.
        rows: each part's int64 [M]: the state that teaches each label.
        objective: "kl", KL(p || q); "overlap", -log of the sum of min(p, q); "acceptance", -log of how often both
            choose the same token under the same Gumbel noise.
        text_weight: weight in [0, 1] of the labels' cross-entropy in the loss; the objective has the remaining weight.
        log_totals: fp32 [R], log-sum-exp of the target's logits over its whole vocabulary: if the LM head has fewer
            tokens, p on the others counts as lost. None renormalises p to the LM head's tokens.
        measure: also sum the overlaps, of min(p, q).
    """

    states: Tensor
    rows: Sequence[Tensor]
    objective: str
    text_weight: float = 0.0
    log_totals: Tensor | None = None
    measure: bool = False

    def of_chunk(self, rows_C: Tensor, weight_VD: Tensor, logits_CV: Tensor, overlap_C: Tensor) -> "TargetChunk":
        """The target's side of a chunk of these states; writes its logits."""
        torch.mm(self.states[rows_C], weight_VD.T, out=logits_CV)
        totals_C = None if self.log_totals is None else self.log_totals[rows_C]
        return TargetChunk(self, logits_CV, totals_C, overlap_C if self.measure else None)


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
    P_v / p_v + Q_v / q_v, where P_v sums p up to v and Q_v sums q after v; times p_v that is P_v + Q_v r_v >= 1.
    What p lacks of 1 is on tokens that the draft does not have; it counts in every P_v.
    """
    ratio_BV, order_BV = torch.sort(log_p_BV - log_q_BV, dim=1, descending=True)
    ratio_BV.clamp_(max=MOST_LOG_RATIO).exp_()
    p_BV, q_BV = p_BV.gather(1, order_BV), q_BV.gather(1, order_BV)
    lost_B1 = (1 - p_BV.sum(1, keepdim=True)).clamp_(min=0)
    after_BV = (1 - running_sum(q_BV)).clamp_(min=0)
    whole_BV = torch.addcmul(running_sum(p_BV).add_(lost_B1), after_BV, ratio_BV)
    # a_v = 1 / inner sum = p_v / whole; b_v = a_v / q_v. As q_w grows, every a_v with a larger ratio falls by a_v b_v,
    # and a_w itself rises.
    a_BV, weight_BV = p_BV.div_(whole_BV), ratio_BV.div_(whole_BV)
    accepted_B1 = a_BV.sum(1, keepdim=True).clamp_(min=TINY)
    weight_BV.mul_(a_BV)
    before_BV = running_sum(weight_BV).sub_(weight_BV)
    sorted_BV = q_BV.mul_(before_BV).addcmul_(weight_BV, after_BV, value=-1).div_(accepted_B1)
    return -accepted_B1[:, 0].log(), torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV)


def running_sum(x_BV: Tensor) -> Tensor:
    """`cumsum` over a row. If deterministic algorithms are required, which `cumsum` lacks on a GPU, it multiplies with
    triangular matrices of ones: within blocks of a row, then over the blocks' sums."""
    if not torch.are_deterministic_algorithms_enabled():
        return x_BV.cumsum(1)
    n_blocks = -(-x_BV.shape[1] // BLOCK)
    within_BCN = pad(x_BV, (0, n_blocks * BLOCK - x_BV.shape[1])).unflatten(1, (n_blocks, BLOCK))
    within_BCN = within_BCN @ x_BV.new_ones(BLOCK, BLOCK).triu()
    before_BC = pad(within_BCN[:, :-1, -1], (1, 0)) @ x_BV.new_ones(n_blocks, n_blocks).triu()
    return (within_BCN + before_BC[..., None]).flatten(1)[:, : x_BV.shape[1]]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "kl": kl, "overlap": overlap, "acceptance": acceptance,
}  # fmt: skip


class TargetChunk(NamedTuple):
    """The target's side of a chunk.

    Attributes:
        like: what to compare, and how.
        logits_CV: the target's logits for the draft's tokens.
        log_totals_C: fp32, log-sum-exps over the target's whole vocabulary; None: over those tokens.
        overlap_C: fp32, written for every row, with a label or not; None: not needed.
    """

    like: Distillation
    logits_CV: Tensor
    log_totals_C: Tensor | None
    overlap_C: Tensor | None

    def losses(self, block: slice, logits_BV: Tensor, label_B1: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each row of a block, [B], and its gradient in the draft's logits [B, V], both fp32."""
        log_q_BV, target_BV = torch.log_softmax(logits_BV, 1), self.logits_CV[block].float()
        totals_B = target_BV.logsumexp(1) if self.log_totals_C is None else self.log_totals_C[block]
        log_p_BV = target_BV - totals_B[:, None]
        p_BV, q_BV = log_p_BV.exp(), log_q_BV.exp()
        if self.overlap_C is not None:
            self.overlap_C[block] = torch.minimum(p_BV, q_BV).sum(1)
        loss_B, gradient_BV = LOSSES[self.like.objective](log_p_BV, log_q_BV, p_BV, q_BV)
        if weight := self.like.text_weight:
            loss_B = torch.lerp(loss_B, -log_q_BV.gather(1, label_B1)[:, 0], weight)
            text_gradient_BV = q_BV.scatter_add_(1, label_B1, q_BV.new_full(label_B1.shape, -1.0))
            gradient_BV.lerp_(text_gradient_BV, weight)
        return loss_B, gradient_BV
