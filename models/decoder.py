"""The decoder for Llama-like models, Gemma 3, gpt-oss and Qwen3.5: embedding, layers, final norm and LM head.

It is frozen (no gradient needs to flow through it). models/passes.py says what a pass takes and
returns, models/layer.py what a layer computes.
Shapes: B slots, T query tokens of a pass, R of them with logits, L layers, D hidden width, H query heads, K key/value
heads, d head width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longdraft.kernels.cpu import rows
from longdraft.kernels.cpu.layers import MOST_TOKENS, LayerTable, can_run
from longdraft.kernels.delta_layer import recent_in_pieces
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.device import on_device
from longdraft.models.kv_cache import KVCache
from longdraft.models.layer import Attention, Layer
from longdraft.models.passes import LayerContext, Pass, TargetOutput, take_at, take_one
from longdraft.models.rope import Rope, piece_ids, piece_lengths, query_factors
from longdraft.models.stream import Linear, RMSNorm, Stream
from longdraft.models.tensor_parallel import ALONE, TensorParallel, split

# Known once the last layer's K and V are written: a pass that needs nothing else stops there.
_BEFORE_LAST_ATTENTION = frozenset({"last_kv", "queries"})

# The states [B, T, D] after the last layer (before it if the pass stops early), the wanted queries [L, B, H, d], and
# the last layer's K and V.
_LayersOutput = tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]


class Embedding(nn.Embedding):
    """nn.Embedding times `scale`, which is rounded to the embedding's dtype first, as in Gemma."""

    def __init__(self, number: int, width: int, scale: float):
        super().__init__(number, width)
        self.scale = scale

    def reset_parameters(self) -> None:
        """Do nothing: a target's weights are loaded. PyTorch would initialise even on the meta device, through its
        compiler, which takes a second to import.
        """

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype).item()


class LMHead(Linear):
    """A linear layer whose rows, one for each of `n_tokens` tokens, the ranks share; each gets all logits."""

    def __init__(self, width: int, n_tokens: int, ranks: TensorParallel = ALONE):
        super().__init__(width, ranks.place(n_tokens)[1], bias=False)
        self.n_tokens, self.ranks = n_tokens, ranks

    def forward(self, input: Tensor, norm: RMSNorm | None = None, **options: Any) -> Tensor:
        part = super().forward(input, norm, **options)
        return self.ranks.joined(part, part.dim() - 1, self.n_tokens)


class _CLayers:
    """The layers' `table` for the C kernels, None if C cannot compute them; valid while all weights stay in place."""

    def __init__(self, layers: "list[Layer]", config: DecoderConfig):
        modules = [module for layer in layers for module in layer.modules()]
        self._weights = [(m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None]
        self._seen = self._addresses()
        weights = [layer.c_weights() for layer in layers]
        known = [layer for layer in weights if layer is not None]
        computable = len(known) == len(weights) and can_run(known, config.head_dim) and not config.rope.query_growth
        shape = config.n_heads, config.n_kv_heads, config.rms_norm_eps
        self.table = LayerTable(known, *shape) if computable else None

    def _addresses(self) -> list[int]:
        return [cast(Tensor, owner[name]).data_ptr() for owner, name in self._weights]

    def is_valid(self) -> bool:
        """Whether no weight was moved, cast or replaced in its module's dict."""
        return self._addresses() == self._seen

    def __reduce__(self) -> tuple:
        """Copy as None: a copied decoder makes a table of its own weights."""
        return type(None), ()


class Decoder(nn.Module):
    """A frozen target: a Pass in, a TargetOutput out.

    Attributes:
        may_fail_to_record: whether its passes may do what no CUDA graph records.
        refreshed: how often its weights were replaced (models/hf.py).
        around_layer: context manager entered around each layer. It brings the weights in if they are kept elsewhere
            (train/sharding.py).
        whole_config: the shape of the target. config: of what this process computes of it.

    Args:
        ranks: the processes that compute it together.
    """

    may_fail_to_record = False
    refreshed = 0
    ranks = ALONE

    def __init__(self, config: DecoderConfig, ranks: TensorParallel = ALONE):
        super().__init__()
        self.ranks, self.whole_config = ranks, config
        self.config = config = split(config, ranks.size)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embedding_scale)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, ranks)
        self.rope = Rope(config.rope)
        self.ropes = [self.rope, *([] if config.window_rope is None else [Rope(config.window_rope)])]
        self.around_layer: Callable[[Layer], AbstractContextManager[object]] = nullcontext
        self._c_layers: _CLayers | None = None
        self.tie()

    @property
    def weights_stay(self) -> bool:
        """Whether all weights stay on the device between passes. If not, `around_layer` brings them for each pass; that
        involves the host and the other ranks, so no pass can be recorded and replayed.
        """
        return self.around_layer is nullcontext

    def tie(self) -> None:
        """Share the embedding with the LM head where the configuration says so."""
        if self.config.tie_embeddings:
            table = self.embed_tokens.weight
            self.lm_head.weight = table if self.ranks.size == 1 else nn.Parameter(self.ranks.part(table, 0), False)

    def __call__(self, *args, **kwargs) -> Any:
        """`forward`, with kernels launched on the weights' device even if another one is current."""
        with on_device(self.embed_tokens.weight.device):
            return super().__call__(*args, **kwargs)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this model, in its dtype and on its device."""
        config, weight = self.config, self.embed_tokens.weight
        shape = len(config.attention_layers), batch, capacity, config.n_kv_heads, config.head_dim
        return KVCache(*shape, weight.dtype, weight.device, config.delta)

    @torch.no_grad()
    def forward(self, inputs: Pass) -> TargetOutput:
        """Run one pass and return the fields that it needs."""
        context, needs, tokens_BT = self._context(inputs), inputs.needs, inputs.tokens_BT
        if inputs.shard is not None:
            tokens_BT, context = tokens_BT[:, inputs.shard.tokens], context.of_tokens(inputs.shard.tokens)
        # The stream alone holds the embeddings, and frees them after the first layer.
        stream = Stream(self.embed_tokens(tokens_BT), self.ranks)
        layers_output = self._layers_in_c(stream.rows, context) or self._layers(stream, context)
        hidden_BTD, queries_LBHd, last_kv = layers_output
        output = TargetOutput(queries=queries_LBHd, last_kv=last_kv if "last_kv" in needs else None)
        if needs <= _BEFORE_LAST_ATTENTION:
            return output
        if "pre_norm" in needs:
            output.pre_norm = hidden_BTD
        if "post_norm" in needs:
            output.post_norm = self.norm(hidden_BTD)
        if "logits" in needs:  # from the states before the norm, so that logits do not depend on what else is needed
            output.logits = self.lm_head(take_at(hidden_BTD, inputs.logits_at_BR), self.norm)
        return output

    def _context(self, inputs: Pass) -> LayerContext:
        cache, borders, positions_BT = inputs.cache, inputs.borders, inputs.positions()
        lengths, pieces = None if cache is None else cache.prompt_lengths, inputs.pieces()
        if borders is not None:
            length_dependent = any(rope.length_dependent for rope in self.ropes)
            lengths = piece_lengths(positions_BT, borders) if length_dependent else None
        ropes = [rope(positions_BT, lengths, self.embed_tokens.weight.dtype) for rope in self.ropes]
        if cache is not None and cache.delta is not None:
            cache.delta.pending.clear()  # of a pass that was not committed
        factors = query_factors(self.config.rope, positions_BT, self.embed_tokens.weight.dtype)
        context = LayerContext(inputs, inputs.plan(), pieces, ropes, factors)
        if self.config.delta is not None:
            if borders is not None:
                piece_T = piece_ids(borders, positions_BT.device)
                context.piece_S = pad(piece_T, (1, 0), value=-1)
                context.recent_BTW = recent_in_pieces(piece_T, self.config.delta.kernel)
            if context.plan is not None:
                context.recent_BTW = context.plan.recent_rows(self.config.delta.kernel)
        return context

    def _layers(self, stream: Stream, context: LayerContext) -> _LayersOutput:
        """Run the layers one by one, which changes the stream."""
        layers, inputs, queries = cast("list[Layer]", self.layers), context.inputs, []
        for layer in layers:
            with self.around_layer(layer):
                qkv = layer.project(stream, context)
                if "queries" in inputs.needs and isinstance(layer.attention, Attention):
                    queries.append(take_one(qkv[0], inputs.queries_at_B))
                if layer is not layers[-1] or not inputs.needs <= _BEFORE_LAST_ATTENTION:
                    layer.finish(stream, qkv, context)
        _, k_BTKd, v_BTKd = qkv  # of the last layer, which has attention
        return stream.rows, torch.stack(queries) if queries else None, (k_BTKd, v_BTKd)

    def _layers_in_c(self, x_BTD: Tensor, context: LayerContext) -> _LayersOutput | None:
        """`_layers` in one C call, with the same bits; None unless C supports the pass: a cache, few tokens, a CPU."""
        inputs, cache, n_tokens = context.inputs, context.inputs.cache, x_BTD.shape[1]
        table = None if cache is None else self._c_table(len(x_BTD) * n_tokens)
        if cache is None or table is None:
            return None
        cache.check_room(n_tokens)
        ends_early = inputs.needs <= _BEFORE_LAST_ATTENTION
        kv_cache = cache.keys, cache.values, cache.lengths
        c_output = table.run(x_BTD, *context.ropes[0], kv_cache, inputs.tree_mask_BTT, ends_early)
        # Copies, so that all other q, k and v of the layers are freed.
        queries = last_kv = None
        if "queries" in inputs.needs:
            queries = torch.stack([take_one(q_BTHd, inputs.queries_at_B) for q_BTHd in c_output.q_LBTHd])
        if "last_kv" in inputs.needs:
            last_kv = c_output.k_LBTKd[-1].clone(), c_output.v_LBTKd[-1].clone()
        return c_output.hidden_BTD, queries, last_kv

    def _c_table(self, n_tokens: int) -> LayerTable | None:
        """The table of the current weights; None if the C kernels do not support them or this many tokens."""
        weight = self.embed_tokens.weight
        on_cpu = weight.device.type == "cpu" and self.weights_stay and rows.serves(weight.dtype)
        if not on_cpu or n_tokens > MOST_TOKENS or self.ranks.size > 1:
            return None
        if self._c_layers is None or not self._c_layers.is_valid():
            self._c_layers = _CLayers(cast("list[Layer]", self.layers), self.config)
        return self._c_layers.table
