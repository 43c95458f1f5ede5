"""AdaMuon (arXiv 2507.11005) for matrices under DeepSpeed's ZeRO-1 and 2; norms and biases move by AdamW.

A matrix's momentum has a few large directions and many small ones. Orthogonalising it gives all directions the same
size (Muon, Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). Each entry is then divided by its own
running root mean square, and moves by about as much as under AdamW (Liu et al., arXiv 2502.16982). Unlike in the paper,
the momentum is Nesterov's and keeps its magnitudes, not only its signs, and the update is not scaled by its norm, so
that the ranks exchange only momentum.
DeepSpeed's own Muon is not used: it clips the update after orthogonalising it, so that the limit sets the length of
every step, and it keeps momentum in bf16.
Shapes: a matrix is [R, C], a rank's share [S].
"""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTUM = 0.95
# Newton-Schulz: STEPS iterations of a x + b x^3 + c x^5 bring singular values of up to 1 to about 1.
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
# The root mean square of an update's entries, divided by the learning rate; about that of AdamW's updates.
UPDATE_RMS = 0.2


def orthogonal(matrix_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T for a matrix U S V^T, computed in this dtype and approximate: its singular values lie in 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = (matrix_RC / matrix_RC.norm().clamp(min=1e-30)).to(dtype)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).to(matrix_RC.dtype)


class AdaMuon(torch.optim.Optimizer):
    """AdaMuon on the tensors that ZeRO passes it: one for each group, this rank's share of the group's parameters end
    to end.

    DraftEngine makes the state, with AdamW's names: `exp_avg` is the momentum, `exp_avg_sq` the mean square of the
    orthogonal update.

    Args:
        groups: as for AdamW; each holds only matrices or no matrices.
        betas: the first applies to norms and biases alone (the momentum of matrices is MOMENTUM), the second to all.
        dtype: of the matmuls that orthogonalise a matrix.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, dtype: torch.dtype
    ):
        for group in groups:
            shapes = [tuple(parameter.shape) for parameter in group["params"]]
            group["shapes"] = shapes if all(len(shape) == 2 for shape in shapes) else []
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the weights; all ranks call it together."""
        for group in self.param_groups:
            for share in group["params"]:
                if share.grad is None:
                    continue
                (self._step_matrices if group["shapes"] else _adamw)(share, self.state[share], group)

    def _step_matrices(self, share_S: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Gather all ranks' momentum, and orthogonalise the matrices that overlap this rank's share."""
        assert share_S.grad is not None
        state["step"] += 1
        beta = group["betas"][1]
        correction = 1 - beta ** float(state["step"])
        momentum_S = state["exp_avg"].lerp_(share_S.grad, 1 - MOMENTUM)
        whole, first = share_S.grad.lerp(momentum_S, MOMENTUM), 0  # Nesterov's
        if dist.is_initialized() and dist.get_world_size() > 1:
            own, first = whole, dist.get_rank() * len(share_S)
            whole = own.new_empty(dist.get_world_size() * len(share_S))
            dist.all_gather_into_tensor(whole, own)
        share_S.mul_(1 - group["lr"] * group["weight_decay"])
        start = 0
        for shape in group["shapes"]:
            stop = start + prod(shape)
            begin, end = max(start, first), min(stop, first + len(share_S))
            if begin < end:
                update = orthogonal(whole[start:stop].view(shape), self._dtype).flatten()[begin - start : end - start]
                own = slice(begin - first, end - first)
                squares = state["exp_avg_sq"][own].mul_(beta).addcmul_(update, update, value=1 - beta)
                sizes = (squares / correction).sqrt_().add_(group["eps"])
                share_S[own].addcdiv_(update, sizes, value=-UPDATE_RMS * group["lr"])
            start = stop


def _adamw(share_S: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    (beta1, beta2), grad_S = group["betas"], share_S.grad
    assert grad_S is not None
    adamw(
        [share_S], [grad_S], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        foreach=False, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
