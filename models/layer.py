"""One layer of the decoder: attention and feed-forward, each reading the residual stream and adding to it.

Shapes: B slots, T query tokens of a pass, D hidden width, F feed-forward width, H query heads, K key/value heads,
N = H + 2 K, d head width.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.chain_attention import causal_attention
from longdraft.kernels.cpu.layers import LayerWeights
from longdraft.kernels.experts import ExpertWeights, experts
from longdraft.kernels.gate import gelu_gate
from longdraft.kernels.linear import linear
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.kernels.tree import PassPlan
from longdraft.kernels.tree_attention import tree_attention
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.passes import Pass
from longdraft.models.stream import RMSNorm, Stream


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
    ) -> Tensor:
        norm_and_eps = None if norm is None else (norm.weight, norm.eps)
        return linear(input, self.weight, self.bias, norm=norm_and_eps, gated=gated, residual=residual)


@dataclass
class AttentionContext:
    """What the attention of every layer needs of a pass: `plan` is `inputs.plan()`, `pieces` is `inputs.pieces()`."""

    inputs: Pass
    plan: PassPlan | None
    pieces: list[Segment] | None


@dataclass
class LayerContext(AttentionContext):
    """What the layers of one pass share."""

    ropes: list[tuple[Tensor, Tensor]]  # cos and sin of the pass's tokens, for each of Decoder.ropes

    def of_tokens(self, tokens: slice) -> "LayerContext":
        """The context of these tokens of the pass."""
        ropes = [(cos[:, tokens].contiguous(), sin[:, tokens].contiguous()) for cos, sin in self.ropes]
        return replace(self, ropes=ropes)

    def chunks(self) -> list[slice]:
        """The tokens of the pass in runs of at most `Pass.chunk`."""
        n_tokens = self.ropes[0][0].shape[1]
        size = self.inputs.chunk or max(1, n_tokens)
        return [slice(start, start + size) for start in range(0, n_tokens, size)]


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
    """Grouped-query attention; q, k and v come from one projection, in this order."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.window = config.windows[layer]
        self.rope = int(config.rope_of(layer) is not config.rope)  # index into Decoder.ropes
        n_outputs = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, n_outputs, bias=config.attention_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
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
        return qk[:, :, : self.n_heads], qk[:, :, self.n_heads :], qkv_BTNd[:, :, -self.n_kv_heads :]

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.n_heads, self.q_norm.eps)


class MLP(nn.Module):
    """Adds down(activation(gate(x)) * up(x)) of x = norm(stream); gate and up are one projection, gate's rows first."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.silu = config.activation == "silu"

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        gated_BTF = stream.read(self.gate_up_proj, norm, gated=self.silu)
        if not self.silu:
            gated_BTF = gelu_gate(gated_BTF)  # frees the [B, T, 2 F] input
        stream.add(self.down_proj, gated_BTF, post_norm)


class Experts(nn.Module):
    """A mixture of experts instead of an MLP: runs each token's experts on norm(stream) and adds their weighted sum."""

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
        self, x_BTD: Tensor, _: RMSNorm | None = None, /, residual: Tensor | None = None, **_options: Any
    ) -> Tensor:
        """The experts' sum as a `Product` of the stream (models/stream.py); x has been normed already."""
        weights = ExpertWeights(
            self.router, self.gate_up_proj, self.down_proj,
            self.router_bias, self.gate_up_bias, self.down_bias, self.config.clamped_gate,
        )  # fmt: skip
        sum_BTD = experts(x_BTD, weights, self.config.per_token, self.config.normalised)
        return sum_BTD if residual is None else sum_BTD.add_(residual)


class Layer(nn.Module):
    """Attention, then feed-forward, each added to the stream. Gemma also norms what they add."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Experts(config) if config.has_experts(layer) else MLP(config)
        post_norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) if config.post_norms else None for _ in "am"]
        self.post_attention_norm, self.post_mlp_norm = post_norms

    def project(self, stream: Stream, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all tokens (see `Attention.project`), chunk by chunk."""
        chunks, norm = context.chunks(), self.attention_norm
        if len(chunks) == 1:
            return self.attention.project(stream, norm, context)
        qkvs = [self.attention.project(stream.of_tokens(chunk), norm, context.of_tokens(chunk)) for chunk in chunks]
        q_BTHd, k_BTKd, v_BTKd = (torch.cat(chunk, 1) for chunk in zip(*qkvs, strict=True))
        return q_BTHd, k_BTKd, v_BTKd

    def finish(self, stream: Stream, qkv: tuple[Tensor, Tensor, Tensor], context: LayerContext) -> None:
        """Attend with q, k and v of all tokens, then add both sub-layers to the stream, chunk by chunk."""
        attention = self.attention
        heads_BTF = attend(*qkv, context, attention.layer, attention.window, attention.sinks).flatten(2)
        chunks = context.chunks()
        if len(chunks) == 1:
            self._add(stream, heads_BTF)
            return
        for chunk in chunks:
            stream_of_chunk = stream.of_tokens(chunk)
            self._add(stream_of_chunk, heads_BTF[:, chunk])
            stream.rows[:, chunk] = stream_of_chunk.rows

    def _add(self, stream: Stream, heads_BTF: Tensor) -> None:
        stream.add(self.attention.o_proj, heads_BTF, self.post_attention_norm)
        self.mlp(stream, self.mlp_norm, self.post_mlp_norm)

    def c_weights(self) -> LayerWeights | None:
        """The weights for the C kernels; None if they do not support the layer: one with experts, a RoPE of its own,
        norms after the sub-layers, a gate other than silu, or sinks.
        """
        attention, mlp = self.attention, self.mlp
        is_special = self.post_mlp_norm is not None or attention.rope or attention.sinks is not None
        if is_special or isinstance(mlp, Experts) or not mlp.silu:
            return None
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return LayerWeights(
            self.attention_norm.weight, attention.qkv_proj.weight, attention.qkv_proj.bias, q_norm, k_norm,
            attention.o_proj.weight, attention.o_proj.bias,
            self.mlp_norm.weight, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias,
            mlp.down_proj.weight, mlp.down_proj.bias, attention.window,
        )  # fmt: skip
