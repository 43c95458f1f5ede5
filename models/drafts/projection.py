"""The linear layer of every draft: our kernels if it is frozen, plain PyTorch if it trains."""

from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels.gate import gate
from longdraft.kernels.linear import linear
from longdraft.models.layer import Linear
from longdraft.models.stream import RMSNorm


class Projection(Linear):
    """The decoder's linear layer, with its fast paths if the weight is frozen, and trainable in plain PyTorch.

    ZeRO-3 gathers a module's weights only around the module's own call, so nothing here reads another module's weights.
    """

    def forward(
        self,
        input: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """As the decoder's `Linear`. first_row: the first output to compute; those before it are left out."""
        weight, bias = self.weight[first_row:], None if self.bias is None else self.bias[first_row:]
        if not self.weight.requires_grad:
            before = None if norm is None else (norm.weight, norm.eps)
            return linear(input, weight, bias, norm=before, gated=gated, residual=residual)
        y = F.linear(input if norm is None else norm(input), weight, bias)
        if gated:
            y = gate(y)
        return y if residual is None else y + residual
