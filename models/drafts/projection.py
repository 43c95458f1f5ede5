"""The linear layer of every draft: fast where it is frozen, plain where it trains."""

from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels.gate import gate
from longdraft.kernels.linear import linear
from longdraft.models.decoder import Linear
from longdraft.models.stream import RMSNorm


class Projection(Linear):
    """The decoder's linear layer; frozen it has its fast paths, and training it is plain PyTorch.

    ZeRO-3 gathers a module's weights around its own call alone: nothing here reads another module's.
    """

    def forward(
        self,
        input: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """As the decoder's; `first_row`: only the outputs from this one on."""
        weight, bias = self.weight[first_row:], None if self.bias is None else self.bias[first_row:]
        if not self.weight.requires_grad:
            before = None if norm is None else (norm.weight, norm.eps)
            return linear(input, weight, bias, norm=before, gated=gated, residual=residual)
        y = F.linear(input if norm is None else norm(input), weight, bias)
        if gated:
            y = gate(y)
        return y if residual is None else y + residual
