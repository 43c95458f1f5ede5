"""The residual stream of a transformer, and the norms that read it.

On a CPU an addition to the stream is part of the product before it, and a norm part of the product behind it: one
call of C each (kernels/linear.py). On a GPU products are a library's, so an addition waits for the norm that follows,
and the two are one kernel (kernels/rms_norm.py). Shapes: B slots, T rows, D hidden width.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longdraft.kernels.rms_norm import add_rms_norm, adds_with_norm, rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, added: Tensor | None = None) -> Any:
        """The norm of x; or, where something is added, (the norm of x + added, x + added)."""
        if added is None:
            return rms_norm(x, self.weight, self.eps)
        return add_rms_norm(x, added, self.weight, self.eps)


class Product(Protocol):
    """A linear layer as models/decoder.py has it: with a norm before it, and something added to its outputs."""

    def __call__(self, input: Tensor, norm: RMSNorm | None = None, /, **options: Any) -> Tensor: ...


class Stream:
    """The stream of a pass's tokens [B, T, D]: sub-layers read it through their norms and add to it, in turn.

    prompt_lengths: where the tokens are whole prompts, for the products (kernels/linear.py).
    """

    def __init__(self, rows_BTD: Tensor, prompt_lengths: Sequence[int] | None = None):
        self._rows, self._waiting = rows_BTD, None
        self._of_products = {} if prompt_lengths is None else {"prompt_lengths": prompt_lengths}

    @property
    def rows(self) -> Tensor:
        """All that was added so far, [B, T, D]."""
        if self._waiting is not None:
            self._rows, self._waiting = self._rows + self._waiting, None
        return self._rows

    def normed(self, norm: RMSNorm) -> Tensor:
        """The stream behind this norm, [B, T, D]."""
        if self._waiting is None:
            return norm(self._rows)
        if not adds_with_norm(self._rows):
            return norm(self.rows)
        normed_BTD, self._rows = norm(self._rows, self._waiting)
        self._waiting = None
        return normed_BTD

    def read(self, product: Product, norm: RMSNorm, **options: Any) -> Tensor:
        """product(norm(stream)); `options` go to the product."""
        if self._waiting is None or not adds_with_norm(self._rows):
            return product(self.rows, norm, **self._of_products, **options)
        return product(self.normed(norm), **self._of_products, **options)

    def add(self, product: Product, x: Tensor, post_norm: RMSNorm | None = None) -> None:
        """stream + product(x), or stream + post_norm(product(x))."""
        if post_norm is not None or adds_with_norm(self._rows):
            added = product(x, **self._of_products)
            self._rows, self._waiting = self.rows, added if post_norm is None else post_norm(added)
        else:
            self._rows = product(x, residual=self._rows, **self._of_products)

    def leave(self, rows_BTD: Tensor) -> None:
        """From here on it is of these rows alone."""
        self._rows, self._waiting = rows_BTD, None

    def part(self, rows: slice) -> "Stream":
        """The stream of some rows, from here on a stream of its own."""
        return Stream(self.rows[:, rows])
