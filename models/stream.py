"""The residual stream of a transformer, and the norm and the linear layers that read it.

On a CPU each linear layer is one C call, together with the norm before it and the addition after it
(kernels/linear.py). On a GPU cuBLAS does the linear layers, and an addition is fused with the norm that follows it
(kernels/rms_norm.py). Shapes: B slots, T tokens, D hidden width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.linear import linear
from longdraft.kernels.rms_norm import add_rms_norm, adds_with_norm, rms_norm
from longdraft.models.tensor_parallel import ALONE, TensorParallel

# A linear layer, called with its input, an optional norm of the input, and options.
Product = Callable[..., Tensor]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """The norm of x; with `added`, the pair (norm of x + added, x + added)."""
        if added is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, added, self.weight, self.eps)


class Linear(nn.Linear):
    """nn.Linear through kernels/linear.py, which fuses the norm before it, the gate after it and the residual."""

    def reset_parameters(self) -> None:
        """Do nothing: a target's weights are loaded, and a draft initialises its own with its own generator."""

    def forward(
        self,
        input: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """first_row: the first output to compute; those before it are skipped."""
        weight, bias = self.weight, self.bias
        if first_row:
            weight, bias = weight[first_row:], None if bias is None else bias[first_row:]
        if norm is not None and norm.weight.requires_grad:
            input, norm = norm(input), None  # ZeRO-3 gathers a module's weights only around its own call
        norm_and_eps = None if norm is None else (norm.weight, norm.eps)
        return linear(input, weight, bias, norm=norm_and_eps, gated=gated, residual=residual)


class Stream:
    """The residual stream [B, T, D] of a pass's tokens. Sub-layers in turn read it through their norm and add to it.

    ranks: what a sub-layer adds is summed over these.
    """

    def __init__(self, rows_BTD: Tensor, ranks: TensorParallel = ALONE):
        self._rows, self._pending = rows_BTD, None  # pending: added at the next norm
        self._ranks = ranks

    @property
    def rows(self) -> Tensor:
        """The sum of all that was added so far, [B, T, D]."""
        if self._pending is not None:
            self._rows, self._pending = self._rows + self._pending, None
        return self._rows

    def normed(self, norm: RMSNorm) -> Tensor:
        """norm(stream), [B, T, D]."""
        if self._pending is None or not adds_with_norm(self._rows):
            return norm(self.rows)
        normed_BTD, self._rows = norm(self._rows, self._pending)
        self._pending = None
        return normed_BTD

    def read(self, product: Product, norm: RMSNorm, **options: Any) -> Tensor:
        """product(norm(stream)); `options` are passed to the product."""
        if self._pending is None or not adds_with_norm(self._rows):
            return product(self.rows, norm, **options)
        return product(self.normed(norm), **options)

    def add(self, product: Product, x: Tensor, post_norm: RMSNorm | None = None) -> None:
        """stream += product(x), or post_norm(product(x))."""
        if post_norm is not None or self._ranks.size > 1 or adds_with_norm(self._rows):
            added = self._ranks.sum(product(x))
            self._rows, self._pending = self.rows, added if post_norm is None else post_norm(added)
        else:
            self._rows = product(x, residual=self._rows)

    def of_tokens(self, tokens: slice) -> "Stream":
        """A separate stream of these tokens; adding to it does not change this one."""
        return Stream(self.rows[:, tokens], self._ranks)
