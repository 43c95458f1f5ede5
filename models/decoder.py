"""One decoder for Llamas, Gemma 3 and gpt-oss: RMSNorm, grouped-query attention with RoPE, gated feed-forward.

It is frozen (no gradient needs to flow through it) and single-device. Not here: what a pass asks for and gives
(models/passes.py), reading checkpoints (models/hf.py), choosing tokens (infer/).
Shapes: B slots, T query tokens of a pass, R of them with logits, D hidden width, H query heads, K key/value heads, d
head width.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from longdraft.kernels.causal_attention import causal_attention
from longdraft.kernels.chain_attention import prompt_attention
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.cpu_impl.layers import MOST_TOKENS, LayerTable, LayerWeights, can_run
from longdraft.kernels.gate import gelu_gate
from longdraft.kernels.linear import linear
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.segment_attention import Segment, segment_attention, send_segments
from longdraft.kernels.tree_attention import PassPlan, tree_attention
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import on_device
from longdraft.models.experts import Experts
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, Span, TargetOutput, take_at, take_one, take_spans
from longdraft.models.rope import Rope, piece_lengths
from longdraft.models.stream import RMSNorm, Stream

# What is finished once the last layer's K and V are written: with nothing else asked for, the pass stops there.
_BEFORE_LAST_ATTENTION = frozenset({"last_kv", "queries"})
_SPANS_ALONE = _BEFORE_LAST_ATTENTION | {"of_spans"}


# The last layer's output, of the spans where nothing else is asked for, or its input where a pass ends before it; each
# layer's wanted queries [L, B, H, d]; the last layer's K and V.
_LayersOutput = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]


class Embedding(nn.Embedding):
    """Rows of the table times `scale`, which is rounded to their dtype first."""

    def __init__(self, number: int, width: int, scale: float):
        super().__init__(number, width)
        self.scale = scale

    def reset_parameters(self) -> None:
        """Nothing is drawn: a target's weights are read. PyTorch would draw for the meta device too, by its compiler,
        which takes a second to import."""

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype).item()


class Linear(nn.Linear):
    """nn.Linear through kernels/linear.py, with the norm before it and what follows it in the same call."""

    def reset_parameters(self) -> None:
        """Nothing is drawn, as above: who trains one draws by a generator of its own."""

    def forward(
        self,
        input: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        prompt_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        before, parts = None if norm is None else (norm.weight, norm.eps), {"gated": gated, "residual": residual}
        return linear(input, self.weight, self.bias, norm=before, prompt_lengths=prompt_lengths, **parts)


@dataclass
class _Context:
    """What the layers of one pass share."""

    given: Pass
    ropes: list[tuple[Tensor, Tensor]]  # cos and sin by Decoder.ropes
    plan: PassPlan | None
    pieces: list[Segment] | None
    spans: list[Segment] | None  # the pass's spans as queries laid end to end

    def part(self, tokens: slice) -> "_Context":
        """The same pass, for some of its tokens."""
        ropes = [(cos[:, tokens].contiguous(), sin[:, tokens].contiguous()) for cos, sin in self.ropes]
        return replace(self, ropes=ropes)

    def chunks(self) -> list[slice]:
        """The tokens of a pass, as many at a time as products and feed-forward take."""
        n_tokens = self.ropes[0][0].shape[1]
        size = self.given.chunk or max(1, n_tokens)
        return [slice(start, start + size) for start in range(0, n_tokens, size)]

    def of_spans(self) -> "_Context":
        """The same pass, where only its spans go on as queries."""
        spans = self.given.spans
        ropes = [(take_spans(cos, spans), take_spans(sin, spans)) for cos, sin in self.ropes]
        return replace(self, ropes=ropes, pieces=self.spans)


class Attention(nn.Module):
    """Grouped-query attention of one layer; q, k and v come from one projection, in this order."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.window = config.sliding_windows[layer] if config.sliding_windows else None
        self.rope = int(config.rope_of(layer) is not config.rope)  # which of Decoder.ropes
        rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.n_heads)) if config.attention_sinks else None

    def project(self, stream: Stream, norm: RMSNorm, context: _Context) -> tuple[Tensor, Tensor, Tensor]:
        """Post-RoPE q [B, T, H, d] and k, and v [B, T, K, d]; k and v are written to the cache, if there is one."""
        qkv_BTNd = stream.read(self.qkv_proj, norm).unflatten(-1, (-1, self.head_dim))
        norms, tables = self._head_norms(), context.ropes[self.rope]
        if context.given.cache is None:
            qk = rotate(qkv_BTNd[:, :, : -self.n_kv_heads], *tables, norms)
        else:
            qk = context.given.cache.append(self.layer, qkv_BTNd, *tables, norms)
        return qk[:, :, : self.n_heads], qk[:, :, self.n_heads :], qkv_BTNd[:, :, -self.n_kv_heads :]

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.n_heads, self.q_norm.eps)

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, context: _Context) -> Tensor:
        """Attention over the pass's own tokens, or the cache, before the output projection: [B, T, H, d]."""
        cache, prompt_lengths, shard = context.given.cache, context.given.prompt_lengths, context.given.shard
        if context.pieces is not None:
            attend = segment_attention if shard is None else shard.attend
            return attend(q_BTHd[0], k_BTKd[0], v_BTKd[0], context.pieces, self.window, self.sinks)[None]
        if cache is None:
            return causal_attention(q_BTHd, k_BTKd, v_BTKd, self.window, self.sinks)
        if prompt_lengths is not None:
            return prompt_attention(q_BTHd, k_BTKd, v_BTKd, prompt_lengths, self.window, self.sinks)
        plan = context.plan
        assert plan is not None
        return tree_attention(
            q_BTHd, cache.keys[self.layer], cache.values[self.layer], cache.lengths,
            plan.tree_mask_BTT, self.window, plan, self.sinks,
        )  # fmt: skip


class MLP(nn.Module):
    """Adds down(activation(gate(x)) * up(x)) of x = norm(stream); gate and up are one projection, gate's rows first."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.silu = config.activation == "silu"

    def forward(self, stream: Stream, norm: RMSNorm, post_norm: RMSNorm | None = None) -> None:
        gated_BTF = stream.read(self.gate_up_proj, norm, gated=self.silu)
        stream.add(self.down_proj, gated_BTF if self.silu else gelu_gate(gated_BTF), post_norm)


class Layer(nn.Module):
    """attention, then feed-forward, each on a normed copy and added to the stream, in Gemma through one more norm."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Experts(config) if config.has_experts(layer) else MLP(config)
        post_norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) if config.post_norms else None for _ in "am"]
        self.post_attention_norm, self.post_mlp_norm = post_norms

    def project(self, stream: Stream, context: _Context) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this layer (see `Attention.project`)."""
        chunks = context.chunks()
        if len(chunks) == 1:
            return self.attention.project(stream, self.attention_norm, context)
        norm = self.attention_norm
        parts = [self.attention.project(stream.part(tokens), norm, context.part(tokens)) for tokens in chunks]
        q_BTHd, k_BTKd, v_BTKd = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return q_BTHd, k_BTKd, v_BTKd

    def finish(self, stream: Stream, qkv: tuple[Tensor, Tensor, Tensor], context: _Context) -> None:
        """Adds the layer's two parts to its input, from its q, k, v; in chunks they take its tokens' place."""
        heads_BTF = self.attention.attend(*qkv, context).flatten(2)
        chunks = context.chunks()
        if len(chunks) == 1:
            self._add(stream, heads_BTF)
            return
        for tokens in chunks:
            part = stream.part(tokens)
            self._add(part, heads_BTF[:, tokens])
            stream.rows[:, tokens] = part.rows

    def _add(self, stream: Stream, heads_BTF: Tensor) -> None:
        stream.add(self.attention.o_proj, heads_BTF, self.post_attention_norm)
        self.mlp(stream, self.mlp_norm, self.post_mlp_norm)

    def weights(self) -> LayerWeights | None:
        """What the layer computes with; None for what C does not compute: experts, a RoPE of its own, norms behind the
        sub-layers, another gate than silu, sinks."""
        attention, mlp = self.attention, self.mlp
        other = self.post_mlp_norm is not None or attention.rope or attention.sinks is not None
        if other or isinstance(mlp, Experts) or not mlp.silu:
            return None
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm))
        return LayerWeights(
            self.attention_norm.weight, attention.qkv_proj.weight, attention.qkv_proj.bias, q_norm, k_norm,
            attention.o_proj.weight, attention.o_proj.bias,
            self.mlp_norm.weight, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias,
            mlp.down_proj.weight, mlp.down_proj.bias, attention.window,
        )  # fmt: skip


class _KnownTable:
    """The layers' table for C, for as long as all weights lie where they did; None where C cannot have them."""

    def __init__(self, layers: "list[Layer]", config: DecoderConfig):
        modules = [module for layer in layers for module in layer.modules()]
        self._cells = [(m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None]
        self._firsts = [(layer.attention_norm._parameters, "weight") for layer in layers]
        self._seen, self._seen_firsts = self._places(self._cells), self._places(self._firsts)
        weights = [layer.weights() for layer in layers]
        shape = config.n_heads, config.n_kv_heads, config.rms_norm_eps
        known = [layer for layer in weights if layer is not None]
        possible = len(known) == len(weights) and can_run(known, config.head_dim)
        self.table = LayerTable(known, *shape) if possible else None

    @staticmethod
    def _places(cells: Sequence[tuple[dict, str]]) -> list[object]:
        """Each weight's address, and the dtype: it may be moved, cast or replaced."""
        weights = [cast(Tensor, cell[name]) for cell, name in cells]
        return [weights[0].dtype, *(weight.data_ptr() for weight in weights)]

    def holds(self, whole: bool) -> bool:
        """Whether they still lie there; not whole: one of each layer, for all take 0.2 ms of a pass of SmolLM2.

        A single weight that is replaced while a text is decoded is seen when a prompt is read next.
        """
        known = self._places(self._firsts) == self._seen_firsts
        return known and (not whole or self._places(self._cells) == self._seen)

    def __reduce__(self) -> tuple:  # a copy of a decoder makes a table of its own weights
        return type(None), ()


class Decoder(nn.Module):
    """A frozen target: tokens in, what was asked for out. `records`: whether its code can be recorded and replayed."""

    records = True

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = Rope(config.rope)
        self.ropes = [self.rope, *([] if config.window_rope is None else [Rope(config.window_rope)])]
        # Entered around each layer's work; whoever keeps the weights elsewhere brings them here (train/sharding.py).
        self.around_layer: Callable[[Layer], AbstractContextManager[object]] = nullcontext
        self.refreshed = 0  # how often other weights were taken over (models/from_transformers.py)
        self._table: _KnownTable | None = None
        self._table_is_sure = False  # whether all weights were looked at since the last wide pass
        self.tie()

    @property
    def weights_stay(self) -> bool:
        """Whether passes are this process's own affair; else `around_layer` brings the weights of each, which takes the
        other ranks and the host, so that no pass can be recorded and replayed."""
        return self.around_layer is nullcontext

    def tie(self) -> None:
        """Share the embedding with the LM head where the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def __call__(self, *args, **kwargs) -> Any:
        """`forward`, with kernels launched on the weights' device, whichever is the current one."""
        with on_device(self.embed_tokens.weight.device):
            return super().__call__(*args, **kwargs)

    def look_again(self) -> None:
        """Another text begins or weights were written: the next narrow pass looks where all of them lie."""
        self._table_is_sure = False

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this model, in its dtype and on its device."""
        self.look_again()
        config, weight = self.config, self.embed_tokens.weight
        return KVCache(
            config.n_layers, batch, capacity, config.n_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    @torch.no_grad()
    def forward(self, given: Pass) -> TargetOutput:
        """What one pass gives."""
        context, needs = self._prepare(given), given.needs
        tokens_BT = given.tokens_BT
        if given.shard is not None:
            tokens_BT, context = tokens_BT[:, given.shard.tokens], context.part(given.shard.tokens)
        # The stream lets go of the embeddings behind the first layer.
        stream = Stream(self.embed_tokens(tokens_BT), given.prompt_lengths)
        found = self._layers_in_c(stream.rows, context) or self._layers(stream, context)
        hidden_BTD, queries_LBHd, last_kv = found
        output = TargetOutput(queries=queries_LBHd, last_kv=last_kv if "last_kv" in needs else None)
        if needs <= _BEFORE_LAST_ATTENTION:
            return output
        if "pre_norm" in needs:
            output.pre_norm = hidden_BTD
        if "post_norm" in needs:
            output.post_norm = self.norm(hidden_BTD)
        if "of_spans" in needs:
            output.of_spans = self.norm(hidden_BTD if needs <= _SPANS_ALONE else take_spans(hidden_BTD, given.spans))
        if "logits" in needs:  # from the un-normed states, so that logits do not depend on what else is needed
            output.logits = self.lm_head(take_at(hidden_BTD, given.logits_at_BR), self.norm)
        return output

    def _prepare(self, given: Pass) -> _Context:
        cache, borders, positions_BT = given.cache, given.borders, given.positions()
        lengths, pieces, spans = None if cache is None else cache.prompt_lengths, given.pieces(), None
        if borders is not None:
            spans = _as_queries(given.spans, borders)
            send_segments(spans, positions_BT.device)
            dependent = any(rope.length_dependent for rope in self.ropes)
            lengths = piece_lengths(positions_BT, borders) if dependent else None
        ropes = [rope(positions_BT, lengths, self.embed_tokens.weight.dtype) for rope in self.ropes]
        return _Context(given, ropes, given.plan(), pieces, spans)

    def _layers(self, stream: Stream, context: _Context) -> _LayersOutput:
        """The layers one after the other."""
        layers, given, queries = cast("list[Layer]", self.layers), context.given, []
        for layer in layers:
            with self.around_layer(layer):
                qkv = layer.project(stream, context)
                if "queries" in given.needs:
                    queries.append(take_one(qkv[0], given.queries_at_B))
                if layer is layers[-1] and given.needs <= _SPANS_ALONE:
                    if "of_spans" in given.needs:
                        stream.leave(take_spans(stream.rows, given.spans))
                        of_spans = take_spans(qkv[0], given.spans), *qkv[1:]
                        layer.finish(stream, of_spans, context.of_spans())
                else:
                    layer.finish(stream, qkv, context)
        return stream.rows, torch.stack(queries) if queries else None, qkv[1:]

    def _layers_in_c(self, x_BTD: Tensor, context: _Context) -> _LayersOutput | None:
        """The same bits from one call, for few tokens behind a cache on a CPU; None where there is no such call."""
        given, cache, weight = context.given, context.given.cache, self.embed_tokens.weight
        n_slots, n_tokens, _ = x_BTD.shape
        narrow = given.prompt_lengths is None and n_slots * n_tokens <= MOST_TOKENS
        served = weight.device.type == "cpu" and self.weights_stay and rows.serves(weight.dtype)
        if cache is None or not (narrow and served):
            self.look_again()
            return None
        if self._table is None or not self._table.holds(whole=not self._table_is_sure):
            self._table = _KnownTable(cast("list[Layer]", self.layers), self.config)
        self._table_is_sure = True
        if self._table.table is None:
            return None
        cache.check_room(n_tokens)
        own, early = (cache.keys, cache.values, cache.lengths), given.needs <= _BEFORE_LAST_ATTENTION
        found = self._table.table.run(x_BTD, *context.ropes[0], own, given.tree_mask_BTT, early)
        queries_at_B, wanted = given.queries_at_B, "queries" in given.needs
        queries = torch.stack([take_one(q_BTHd, queries_at_B) for q_BTHd in found.q_LBTHd]) if wanted else None
        # Copies: of all layers no more is kept than is asked for.
        last_kv = (found.k_LBTKd[-1].clone(), found.v_LBTKd[-1].clone()) if "last_kv" in given.needs else None
        return found.hidden_BTD, queries, last_kv


def _as_queries(spans: Sequence[Span], borders: Sequence[int]) -> list[Segment]:
    """The spans' tokens end to end, which read their pieces from the start."""
    ends = accumulate(stop - start for start, stop in spans)
    starts = [max(border for border in borders if border <= start) for start, _ in spans]
    return [
        Segment(end - (stop - start), end, first, stop)
        for (start, stop), end, first in zip(spans, ends, starts, strict=True)
    ]
