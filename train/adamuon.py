"""AdaMuon (arXiv 2507.11005) under DeepSpeed's ZeRO-1 and 2, for matrices; norms and biases move by AdamW.

A weight's momentum has a few large directions and many small ones; made orthogonal, all of them count alike (Muon,
Jordan et al. 2024, https://kellerjordan.github.io/posts/muon). Each entry is then divided by its own root mean square
of late, and moves by about as much as AdamW would move it (Liu et al., arXiv 2502.16982). Other than in the paper, the
momentum keeps its sizes and is Nesterov's, and no norm of a whole update is taken, so that ranks exchange nothing else.
DeepSpeed has a Muon of its own, which clips what is already orthogonal, so that the limit sets the length of every
step, and keeps momentum in bf16. Not here: the rate of a step, clipping (deepspeed_engine.py).
Shapes: a matrix is [R, C], a share [S].
"""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTUM = 0.95
# Of the polynomial a x + b x^3 + c x^5, which takes singular values of up to 1 to about 1 in so many steps.
COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
# By so much of the rate an entry moves, in the root mean square: as AdamW's do.
ENTRY = 0.2


def orthogonal(matrix_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of the matrix's U S V^T, roughly (its singular values lie between 0.7 and 1.2), computed in this dtype."""
    a, b, c = COEFFICIENTS
    x = (matrix_RC / matrix_RC.norm().clamp(min=1e-30)).to(dtype)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if tall else x).to(matrix_RC.dtype)


class AdaMuon(torch.optim.Optimizer):
    """What ZeRO leaves of the parameters is one tensor a group, this rank's share of all of them end to end.

    Its state has AdamW's names, by which DeepSpeed converts checkpoints to other numbers of ranks: `exp_avg` is the
    momentum, `exp_avg_sq` the mean square of what moves an entry.

    Args:
        groups: as AdamW's; of matrices or of none.
        betas: the first is of norms and biases alone, the momentum of matrices is MOMENTUM; the second is of all.
        dtype: for the products that make a matrix orthogonal.
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
        """All ranks call it together."""
        for group in self.param_groups:
            for share in group["params"]:
                if share.grad is None:
                    continue
                state = self.state[share]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(share), torch.zeros_like(share)
                (self._turn if group["shapes"] else _adamw)(share, state, group)

    def _turn(self, share_S: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """The step of matrices. Each rank makes orthogonal what it has a part of, from all ranks' momentum."""
        assert share_S.grad is not None
        state["step"] += 1
        beta = group["betas"][1]
        correction = 1 - beta ** float(state["step"])
        momentum_S = state["exp_avg"].lerp_(share_S.grad, 1 - MOMENTUM)
        whole = _of_all_ranks(share_S.grad.lerp(momentum_S, MOMENTUM))  # Nesterov's
        first = 0 if len(whole) == len(share_S) else dist.get_rank() * len(share_S)
        share_S.mul_(1 - group["lr"] * group["weight_decay"])
        start = 0
        for shape in group["shapes"]:
            stop = start + prod(shape)
            begin, end = max(start, first), min(stop, first + len(share_S))
            if begin < end:
                turned = orthogonal(whole[start:stop].view(shape), self._dtype).flatten()[begin - start : end - start]
                own = slice(begin - first, end - first)
                squares = state["exp_avg_sq"][own].mul_(beta).addcmul_(turned, turned, value=1 - beta)
                sizes = (squares / correction).sqrt_().add_(group["eps"])
                share_S[own].addcdiv_(turned, sizes, value=-ENTRY * group["lr"])
            start = stop


def _adamw(share_S: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    (beta1, beta2), grad_S = group["betas"], share_S.grad
    assert grad_S is not None
    adamw(
        [share_S], [grad_S], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        foreach=False, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip


def _of_all_ranks(share_S: Tensor) -> Tensor:
    """The ranks' shares end to end."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if n_ranks == 1:
        return share_S
    whole = share_S.new_empty(n_ranks * len(share_S))
    dist.all_gather_into_tensor(whole, share_S)
    return whole
