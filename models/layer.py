"""One layer of the decoder: attention and feed-forward, each reading the residual stream and adding to it.

Shapes: B slots, T query tokens of a pass, D hidden width, F feed-forward width, H query heads, K key/value heads,
N = H + 2 K, d head width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.chain_attention import causal_attention
from longdraft.kernels.cpu.layers import LayerWeights
from longdraft.kernels.experts import ExpertWeights, experts
from longdraft.kernels.gate import gelu_gate, sigmoid
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.segment_attention import segment_attention
from longdraft.kernels.tree_attention import tree_attention
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.gated_delta_net import GatedDeltaNet
from longdraft.models.passes import AttentionContext, LayerContext
from longdraft.models.stream import Linear, RMSNorm, Stream


def attend(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    context: AttentionContext,
    layer: int,
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of the pass's tokens, [B, T, H, d], over themselves and, with a cache, over its committed rows.

    q and k are rotated. layer: index into the cache. window: how many keys a query reads; None: all.
    sinks_H: see kernels/attention.py.
    """
    inputs, cache = context.inputs, context.inputs.cache
    if context.pieces is not None:
        attend_pieces = segment_attention if inputs.shard is None else inputs.shard.attend
        return attend_pieces(q_BTHd[0], k_BTKd[0], v_BTKd[0], context.pieces, window, sinks_H)[None]
    if cache is None:
        return causal_attention(q_BTHd, k_BTKd, v_BTKd, window, sinks_H)
    plan = context.plan
    assert plan is not None
    keys_BSKd, values_BSKd = cache.keys[layer], cache.values[layer]
    return tree_attention(q_BTHd, keys_BSKd, values_BSKd, cache.lengths, plan.tree_mask_BTT, window, plan, sinks_H)


class Attention(nn.Module):
    """Grouped-query attention; q, k and v come from one projection, in this order. Where the configuration says so,
    each head's output is multiplied by the sigmoid of a projection of the same input.
    """

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer = config.attention_layers.index(layer)  # into the cache
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.window = config.windows[layer]
        self.rope = int(config.rope_of(layer) is not config.rope)  # index into Decoder.ropes
        n_outputs = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, n_outputs, bias=config.attention_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        gate = config.hidden_size, config.n_heads * config.head_dim, config.attention_bias
        self.gate_proj = Linear(*gate) if config.gated else None
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.n_heads)) if config.attention_sinks else None

    def project(self, stream: Stream, norm: RMSNorm, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, d] and k [B, T, K, d] after RoPE, and v [B, T, K, d]; k and v also go into the cache, if any."""
        qkv_BTNd = stream.read(self.qkv_proj, norm).unflatten(-1, (-1, self.head_dim))
        norms, tables, cache = self._head_norms(), context.ropes[self.rope], context.inputs.cache
        if cache is None:
            qk = rotate(qkv_BTNd[:, :, : -self.n_kv_heads], *tables, norms)
        else:
            qk = cache.append(self.layer, qkv_BTNd, *tables, norms)
        if context.query_factors is not None:
            qk[:, :, : self.n_heads] *= context.query_factors
        return qk[:, :, : self.n_heads], qk[:, :, self.n_heads :], qkv_BTNd[:, :, -self.n_kv_heads :]

    def attend(self, qkv: tuple[Tensor, ...], context: LayerContext) -> Tensor:
        """The heads' outputs of all tokens of the pass, [B, T, H d]."""
        q_BTHd, k_BTKd, v_BTKd = qkv
        return attend(q_BTHd, k_BTKd, v_BTKd, context, self.layer, self.window, self.sinks).flatten(2)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.n_heads, self.q_norm.eps)


class MLP(nn.Module):
    """Adds down(activation(gate(x)) * up(x)) of x = norm(stream); gate and up are one projection, gate's rows first."""

    def __init__(self, config: DecoderConfig, size: int):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.silu = config.activation == "silu"

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        gated_BTF = stream.read(self.gate_up_proj, norm, gated=self.silu)
        if not self.silu:
            gated_BTF = gelu_gate(gated_BTF)  # frees the [B, T, 2 F] input
        stream.add(self.down_proj, gated_BTF, post_norm)


class Experts(nn.Module):
    """A mixture of experts instead of an MLP: runs each token's experts on norm(stream) and adds their weighted sum,
    with an MLP that all tokens go through, times the sigmoid of a product, where there is a shared expert."""

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
        shared = config.shared_expert_size
        self.shared = None if shared is None else MLP(config, shared)
        self.shared_gate = None if shared is None else Linear(width, 1, bias=False)

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        stream.add(self._sum, stream.normed(norm), post_norm)

    def _sum(
        self, x_BTD: Tensor, _: RMSNorm | None = None, /, residual: Tensor | None = None, **_options: Any
    ) -> Tensor:
        """The experts' sum as a `Product` of the stream (models/stream.py); x has been normed already."""
        weights = ExpertWeights(
            self.router, self.gate_up_proj, self.down_proj,
            self.router_bias, self.gate_up_bias, self.down_bias, self.config.clamped_gate,
        )  # fmt: skip
        sum_BTD = experts(x_BTD, weights, self.config.per_token, self.config.normalised)
        if self.shared is not None and self.shared_gate is not None:
            shared_BTD = self.shared.down_proj(self.shared.gate_up_proj(x_BTD, gated=True))
            sum_BTD += sigmoid(self.shared_gate(x_BTD)) * shared_BTD
        return sum_BTD if residual is None else sum_BTD.add_(residual)


class Layer(nn.Module):
    """Attention, then feed-forward, each added to the stream. Gemma also norms what they add."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer) if layer in config.attention_layers else GatedDeltaNet(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Experts(config) if config.has_experts(layer) else MLP(config, config.intermediate_size)
        post_norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) if config.post_norms else None for _ in "am"]
        self.post_attention_norm, self.post_mlp_norm = post_norms

    def project(self, stream: Stream, context: LayerContext) -> tuple[Tensor, ...]:
        """q, k and v of all tokens (see `Attention.project`; linear attention has one tensor), chunk by chunk."""
        chunks, norm = context.chunks(), self.attention_norm
        if len(chunks) == 1:
            return self.attention.project(stream, norm, context)
        qkvs = [self.attention.project(stream.of_tokens(chunk), norm, context.of_tokens(chunk)) for chunk in chunks]
        return tuple(torch.cat(chunk, 1) for chunk in zip(*qkvs, strict=True))

    def finish(self, stream: Stream, qkv: tuple[Tensor, ...], context: LayerContext) -> None:
        """Attend with q, k and v of all tokens, then add both sub-layers to the stream, chunk by chunk."""
        heads_BTF = self.attention.attend(qkv, context)
        chunks = context.chunks()
        if len(chunks) == 1:
            self._add(stream, heads_BTF)
            return
        for chunk in chunks:
            stream_of_chunk = stream.of_tokens(chunk)
            self._add(stream_of_chunk, heads_BTF[:, chunk])
            stream.rows[:, chunk] = stream_of_chunk.rows

    def _add(self, stream: Stream, heads_BTF: Tensor) -> None:
        if isinstance(self.attention, Attention) and self.attention.gate_proj is not None:
            heads_BTF = heads_BTF * sigmoid(stream.read(self.attention.gate_proj, self.attention_norm))
        stream.add(self.attention.o_proj, heads_BTF, self.post_attention_norm)
        self.mlp(stream, self.mlp_norm, self.post_mlp_norm)

    def c_weights(self) -> LayerWeights | None:
        """The weights for the C kernels; None if they do not support the layer: linear attention, or one with a
        gate, sinks or a RoPE of its own, experts, norms after the sub-layers, or a feed-forward's gate other than silu.
        """
        attention, mlp = self.attention, self.mlp
        if isinstance(attention, GatedDeltaNet) or isinstance(mlp, Experts) or not mlp.silu:
            return None
        if self.post_mlp_norm or attention.rope or attention.sinks is not None or attention.gate_proj:
            return None
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return LayerWeights(
            self.attention_norm.weight, attention.qkv_proj.weight, attention.qkv_proj.bias, q_norm, k_norm,
            attention.o_proj.weight, attention.o_proj.bias,
            self.mlp_norm.weight, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias,
            mlp.down_proj.weight, mlp.down_proj.bias, attention.window,
        )  # fmt: skip
