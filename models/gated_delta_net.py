"""Gated DeltaNet (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5: a sub-layer in place of attention.

kernels/gated_delta.py computes its rule and kernels/delta_layer.py what is around it; models/delta_states.py keeps its
state between passes. Shapes: B slots, T tokens, V heads of the values, k key width, v value width, C channels of the
convolution, F = V v, W the convolution's width, X all outputs of the projection.
"""

import torch
from torch import Tensor, nn

from longdraft.kernels.delta_chunks import chain
from longdraft.kernels.delta_layer import DeltaWeights, delta_tokens, gated_norm
from longdraft.kernels.gated_delta import tree
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.delta_states import DeltaStates, last_inputs
from longdraft.models.passes import LayerContext
from longdraft.models.stream import Linear, RMSNorm, Stream

# Tokens of a text that are taken at a time, which bounds their fp32 copies.
BLOCK = 1024


class GatedDeltaNet(nn.Module):
    """Reads the stream through a causal convolution and the gated delta rule. One product gives, in this order, the
    convolution's channels (queries, keys, values), the output's gate and, for each head of the values, beta and decay.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        assert config.delta is not None
        self.config = delta = config.delta
        self.index = delta.layers.index(layer)  # into DeltaStates
        width = delta.value_heads * delta.value_dim
        self.in_proj = Linear(config.hidden_size, delta.channels + width + 2 * delta.value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(delta.channels, delta.kernel))
        self.log_rate, self.decay_bias = (nn.Parameter(torch.empty(delta.value_heads)) for _ in range(2))
        self.norm = RMSNorm(delta.value_dim, config.rms_norm_eps)
        self.o_proj = Linear(width, config.hidden_size, bias=False)

    def project(self, stream: Stream, norm: RMSNorm, context: LayerContext) -> tuple[Tensor]:
        """All that the tokens need of the stream: [B, T, in_proj's rows]."""
        return (stream.read(self.in_proj, norm),)

    def attend(self, projected: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """The heads' outputs of all tokens of the pass, [B, T, V v]. With a cache, its state advances by the tokens of
        `Pass.commits_B`, or they become pending."""
        (projected_BTX,), cache, weights = projected, context.inputs.cache, self._weights()
        states = None if cache is None else cache.delta
        if states is None or context.inputs.commits_B is not None:
            read_BTVv = self._read_text(projected_BTX, weights, context, states)
        else:
            assert context.plan is not None
            before_BWC, memory_BVkv = states.inputs[self.index], states.memory[self.index]
            tokens = delta_tokens(projected_BTX, before_BWC, context.recent_BTW, weights)
            states.pending.append((projected_BTX[..., : self.config.channels], tokens))
            read_BTVv = tree(tokens, memory_BVkv, context.plan)
        gate_BTF = projected_BTX.split(weights.sizes, -1)[1]
        return gated_norm(read_BTVv, gate_BTF, self.norm.weight, self.norm.eps)

    def _weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv, self.log_rate, self.decay_bias, self.config.key_heads, self.config.key_dim)

    def _read_text(
        self, projected_BTX: Tensor, weights: DeltaWeights, context: LayerContext, states: DeltaStates | None
    ) -> Tensor:
        """What the tokens of texts read, [B, T, V, v]: of a prompt, whose states advance, or without a cache."""
        delta, (batch, n_tokens, _) = self.config, projected_BTX.shape
        if states is None:
            memory = projected_BTX.new_zeros(batch, *delta.memory_shape, dtype=torch.float32)
            before_BWC = projected_BTX.new_zeros(batch, delta.kernel - 1, delta.channels)
        else:
            memory, before_BWC = states.memory[self.index], states.inputs[self.index]
        commits_B, piece_S = context.inputs.commits_B, context.piece_S
        read_BTVv = projected_BTX.new_empty(batch, n_tokens, delta.value_heads, delta.value_dim)
        for start in range(0, n_tokens, BLOCK):
            stop = min(start + BLOCK, n_tokens)
            tokens = delta_tokens(projected_BTX, before_BWC, context.recent_BTW, weights, slice(start, stop))
            if commits_B is not None:
                tokens = tokens.only(commits_B - start)
            read, memory = chain(tokens, memory, None if piece_S is None else piece_S[start : stop + 1])
            read_BTVv[:, start:stop] = read
        if states is not None and commits_B is not None:
            states.memory[self.index].copy_(memory)
            inputs_BTC = projected_BTX[..., : delta.channels]
            states.inputs[self.index].copy_(last_inputs(before_BWC, inputs_BTC, commits_B))
        return read_BTVv
