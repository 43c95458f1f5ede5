"""A layer's mixture-of-experts feed-forward, which takes the place of models/layer.py's MLP."""

from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.experts import ExpertWeights, experts
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.stream import RMSNorm, Stream


class Experts(nn.Module):
    """Adds the weighted sum of each token's experts of norm(stream) to the stream; gate and up are one projection."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        assert config.experts is not None
        self.config, width = config.experts, config.hidden_size
        number, size = self.config.number, self.config.size
        self.router = nn.Parameter(torch.empty(number, width))
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * size, width))
        self.down_proj = nn.Parameter(torch.empty(number, width, size))
        shapes = (number,), (number, 2 * size), (number, width)
        biases = [nn.Parameter(torch.empty(shape)) if self.config.bias else None for shape in shapes]
        self.router_bias, self.gate_up_bias, self.down_bias = biases

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        stream.add(self._sum, stream.normed(norm), post_norm)

    def _sum(
        self, x_BTD: Tensor, _: RMSNorm | None = None, /, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The experts' sum as a `Product` of the stream (models/stream.py); x has been normed already."""
        weights = ExpertWeights(
            self.router, self.gate_up_proj, self.down_proj,
            self.router_bias, self.gate_up_bias, self.down_bias, self.config.clamped_gate,
        )  # fmt: skip
        sum_BTD = experts(x_BTD, weights, self.config.per_token, self.config.normalised, **options)
        return sum_BTD if residual is None else sum_BTD.add_(residual)
