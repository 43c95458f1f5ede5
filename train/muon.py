"""Muon under DeepSpeed's ZeRO-1 and 2: matrices move by their momentum made orthogonal, norms and biases by AdamW.

A weight's momentum has a few large directions and many small ones; made orthogonal, all of them count alike (Jordan et
al. 2024, https://kellerjordan.github.io/posts/muon). Scaled as by Liu et al. (arXiv 2502.16982), an entry moves by
about as much as AdamW would move it, so rates and weight decay mean the same. DeepSpeed has a Muon of its own, which
clips what is already orthogonal, so that the limit sets the length of every step, and keeps momentum in bf16.
Not here: the rate of a step, clipping (deepspeed_engine.py). Shapes: a matrix is [R, C], a share [S].
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
# A matrix of orthogonal rows or columns has entries of this root mean square, times the root of its longer side.
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


class Muon(torch.optim.Optimizer):
    """What ZeRO leaves of the parameters is one tensor a group, this rank's share of all of them end to end.

    Its state has AdamW's names, for DeepSpeed converts checkpoints to other numbers of ranks by them: `exp_avg` is the
    momentum, and `exp_avg_sq` is nothing for matrices.

    Args:
        groups: as AdamW's; of matrices or of none.
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
        momentum_S = state["exp_avg"].lerp_(share_S.grad, 1 - MOMENTUM)
        whole = _of_all_ranks(share_S.grad.lerp(momentum_S, MOMENTUM))  # Nesterov's
        first = 0 if len(whole) == len(share_S) else dist.get_rank() * len(share_S)
        share_S.mul_(1 - group["lr"] * group["weight_decay"])
        start = 0
        for shape in group["shapes"]:
            stop = start + prod(shape)
            begin, end = max(start, first), min(stop, first + len(share_S))
            if begin < end:
                turned = orthogonal(whole[start:stop].view(shape), self._dtype).flatten()
                rate = group["lr"] * ENTRY * max(shape) ** 0.5
                share_S[begin - first : end - first].sub_(turned[begin - start : end - start], alpha=rate)
            start = stop


def _adamw(share_S: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [share_S], [share_S.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
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
