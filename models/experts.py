"""A layer's feed-forward of many experts, in the place of decoder.py's MLP."""

from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.experts import ExpertWeights, experts
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.stream import RMSNorm, Stream


class Experts(nn.Module):
    """Adds the experts' sum of norm(stream) to the stream; of each expert gate and up are one projection."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        of, width = config.experts, config.hidden_size
        assert of is not None
        self.of = of
        self.router = nn.Parameter(torch.empty(of.number, width))
        self.gate_up_proj = nn.Parameter(torch.empty(of.number, 2 * of.size, width))
        self.down_proj = nn.Parameter(torch.empty(of.number, width, of.size))
        shapes = (of.number,), (of.number, 2 * of.size), (of.number, width)
        biases = [nn.Parameter(torch.empty(shape)) if of.bias else None for shape in shapes]
        self.router_bias, self.gate_up_bias, self.down_bias = biases

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        stream.add(self._sum, stream.normed(norm), post_norm)

    def _sum(
        self, x_BTD: Tensor, _: RMSNorm | None = None, /, residual: Tensor | None = None, **options: Any
    ) -> Tensor:
        weights = ExpertWeights(
            self.router, self.gate_up_proj, self.down_proj,
            self.router_bias, self.gate_up_bias, self.down_bias, self.of.clamped_gate,
        )  # fmt: skip
        sum_BTD = experts(x_BTD, weights, self.of.per_token, self.of.normalised, **options)
        return sum_BTD if residual is None else sum_BTD.add_(residual)
