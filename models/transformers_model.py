"""A causal model of transformers with our decoder's interface, for families that models/decoder.py does not compute.

The model's own classes compute everything but attention, which transformers lets a program replace: here queries, keys
and values go to the decoder's attention, so that packed pieces are contexts of their own, and caches, trees and ranks
that share a row work as with our decoder. What else a target gives is taken by hooks. Not here: reading files (hf.py),
whether the two ways agree with transformers' own attention and with our decoder (transformers_check.py).
Shapes: B slots, T query tokens, D hidden width, H query heads, K key/value heads, d head width.
"""

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from longdraft.kernels.rotate import rotate
from longdraft.kernels.segment_attention import Segment
from longdraft.kernels.tree_attention import PassPlan
from longdraft.models.decoder import Attention, Decoder, Layer, Linear
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.passes import Pass, TargetOutput, take_at, take_one, take_spans
from longdraft.models.rope import Rope
from longdraft.models.transformers_shape import NOT_SERVED, find_layers, foreign_config

ATTENTION = "longdraft"
# Where the pieces of a short pass that shows what the model is start, and how far the last ones' tokens jump.
PROBE_BORDERS, PROBE_JUMP = [0, 9, 15], 5
# How far two ways of computing a layer may be apart (`distance`): a few roundings, no other formula.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class _Running:
    """A pass. From `queries` on, what it brought: of each layer its wanted queries, window and module; how many query
    and key heads there are and their width; the last layer's K and V; the final norm's input."""

    given: Pass
    plan: PassPlan | None
    pieces: list[Segment] | None
    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    attentions: list[nn.Module] = field(default_factory=list)
    heads: tuple[int, int, int] = (0, 0, 0)
    last_kv: tuple[Tensor, Tensor] | None = None
    pre_norm: Tensor | None = None


_RUNNING: ContextVar[_Running] = ContextVar("running")


@dataclass
class _Layer:
    """What the decoder's attention reads of a layer."""

    layer: int
    window: int | None
    sinks: Tensor | None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, d], key and value [B, K, T, d], post-RoPE, to [B, T, H, d].

    The layers of a pass call it one after the other. Raises: ValueError for what the decoder's attention does not
    compute.
    """
    running, name = _RUNNING.get(), type(module).__name__
    if options.get("softcap") is not None:
        raise ValueError(f"target.loader: {name} has a soft cap on scores, which {NOT_SERVED}")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"target.loader: {name} is not causal, which {NOT_SERVED}")
    if key.shape != value.shape:
        raise ValueError(
            f"target.loader: {name} has keys of width {key.shape[-1]} and values of width {value.shape[-1]} (latents, "
            f"as of MLA), which {NOT_SERVED}"
        )
    layer, width = len(running.windows), query.shape[-1]
    if scaling is not None and not math.isclose(scaling, width**-0.5, rel_tol=1e-6):
        query = query * (scaling * width**0.5)  # the decoder's scores are scaled by d ** -0.5
    q_BTHd, k_BTKd, v_BTKd = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    cache, tokens = running.given.cache, q_BTHd.shape[1]
    if cache is not None:
        one = q_BTHd.new_ones(len(q_BTHd), tokens, 1, 1, width // 2)
        qkv_BTNd = torch.cat([q_BTHd, k_BTKd, v_BTKd], 2)
        cache.append(layer, qkv_BTNd, one, torch.cat([torch.zeros_like(one)] * 2, 3))  # it is rotated already
    running.windows.append(sliding_window)
    running.attentions.append(module)
    running.heads, running.last_kv = (q_BTHd.shape[2], k_BTKd.shape[2], width), (k_BTKd, v_BTKd)
    if "queries" in running.given.needs:
        running.queries.append(take_one(q_BTHd, running.given.queries_at_B))
    of_layer: Any = _Layer(layer, sliding_window, options.get("s_aux"))
    context: Any = running
    return Attention.attend(of_layer, q_BTHd, k_BTKd, v_BTKd, context), None


AttentionInterface.register(ATTENTION, attention)


class TransformersModel(Decoder):
    """A frozen model of transformers as a target: a pass in, what was asked for out, as `Decoder.forward`.

    The layers always run to the last one. Products are the decoder's, so that on a CPU a token's result does not depend
    on the width of its pass while decoding. Logits are the LM head's product: one that transformers scales afterwards
    has the factor in its weights here, a copy.

    Args:
        model: a `...ForCausalLM` whose weights are there.
        known: our configuration of it; None: our decoder does not know the family.
        max_positions: how many it takes; None: as its configuration says.
        around_layer: as of `Decoder`, entered around each of the model's layers.

    Attributes:
        own: the model. own_attention: the attention that transformers chose for it.
        known: as given.
        rotates: whether the last layer's keys are rotated as models/rope.py does it, by `config.rope`.
    Raises: ValueError, which names what it is, for layers without keys and values of their own and for attention,
        positions or logits that this does not compute.
    """

    records = False

    def __init__(
        self,
        model: Any,
        known: DecoderConfig | None = None,
        max_positions: int | None = None,
        around_layer: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    ):
        nn.Module.__init__(self)
        self.own, self.known, self.around_layer = model.requires_grad_(False).eval(), known, around_layer
        self.own_attention = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        self.layers, self._body = find_layers(model), model.get_decoder()
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        for module in model.modules():
            if type(module) is nn.Linear:  # a subclass computes something else
                module.__class__ = Linear
        self._open: list[AbstractContextManager[object]] = []
        for layer in self.layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, always_call=True)
        probed = self._probe()
        if known is None:
            self._check_windows(probed.windows)
        self.config = known or foreign_config(model, probed.heads, probed.windows, max_positions)
        if max_positions is not None:
            self.config = replace(self.config, max_positions=max_positions)
        self._chunk_feed_forward(probed.attentions)
        self.rope = Rope(self.config.rope)
        self.rotates = known is not None or self._rotates()

    @torch.no_grad()
    def forward(self, given: Pass) -> TargetOutput:
        """What one pass gives."""
        running, needs = _Running(given, given.plan(), given.pieces()), given.needs
        hidden_BTD = self._run(self._body, running).last_hidden_state
        output = TargetOutput(last_kv=running.last_kv if "last_kv" in needs else None)
        if "queries" in needs:
            output.queries = torch.stack(running.queries)
        if "pre_norm" in needs:
            output.pre_norm = running.pre_norm
        if "post_norm" in needs:
            output.post_norm = hidden_BTD
        if "of_spans" in needs:
            output.of_spans = take_spans(hidden_BTD, given.spans)
        if "logits" in needs:
            output.logits = self.lm_head(take_at(hidden_BTD, given.logits_at_BR))
        return output

    def _run(self, part: nn.Module, running: _Running) -> Any:
        """What this part of the model gives for the pass."""
        given, tokens = running.given, slice(None) if running.given.shard is None else running.given.shard.tokens
        positions_BT = given.positions().expand(given.tokens_BT.shape)
        before = _RUNNING.set(running)
        try:
            return part(input_ids=given.tokens_BT[:, tokens], position_ids=positions_BT[:, tokens], use_cache=False)
        finally:
            _RUNNING.reset(before)

    def _enter(self, layer: nn.Module, _: Any) -> None:
        self._open.append(self.around_layer(cast(Layer, layer)))
        self._open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    @torch.no_grad()
    def _probe(self) -> _Running:
        """A short pass that shows where the final norm is, what the layers are and what becomes of the logits."""
        given = self.probe_pass()
        running, made = _Running(given, given.plan(), given.pieces()), list[tuple[nn.Module, Any]]()
        inside = set(self.layers.modules())
        hooks = [
            module.register_forward_hook(lambda module, _, output: made.append((module, output)))
            for module in self._body.modules()
            if module not in inside
        ]
        try:
            logits_BTV = self._run(self.own, running).logits
        finally:
            for hook in hooks:
                hook.remove()
        if len(running.windows) != len(self.layers):
            raise ValueError(
                f"target.loader: {len(running.windows)} of the {len(self.layers)} layers of {type(self.own).__name__} "
                f"give keys and values to transformers' attention interface; such a model {NOT_SERVED}"
            )
        (hidden_BTD,) = (output.last_hidden_state for module, output in made if module is self._body)
        norms = [
            module
            for module, output in made
            if isinstance(output, Tensor) and output.data_ptr() == hidden_BTD.data_ptr() and module.state_dict()
        ]
        if not norms:
            raise ValueError(f"target.loader: {type(self.own).__name__} has no final norm; it {NOT_SERVED}")
        self.norm = norms[-1]
        self.norm.register_forward_pre_hook(_keep_pre_norm)
        self._scale_head(hidden_BTD, logits_BTV)
        return running

    def _check_windows(self, told: Collection[int | None]) -> None:
        """A window that a family keeps in the mask alone, and does not tell the attention, would be lost here."""
        config = self.own.config.get_text_config()
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(told)
        if window and any(slid and one is None for slid, one in zip(slides, told, strict=True)):
            raise ValueError(
                f"target.loader: {type(self.own).__name__} has sliding_window {window}, which it puts into its mask "
                f"and does not tell transformers' attention interface; such a model {NOT_SERVED}"
            )

    def probe_pass(self, **options: Any) -> Pass:
        """Two pieces, the second with a jump in its positions, of tokens that are always the same."""
        weight, n_tokens = self.embed_tokens.weight, PROBE_BORDERS[-1]
        generator = torch.Generator().manual_seed(0)
        tokens_N = torch.randint(len(weight), (n_tokens,), generator=generator)
        positions_N = torch.cat([torch.arange(stop - start) for start, stop in pairwise(PROBE_BORDERS)])
        positions_N[-PROBE_JUMP:] += PROBE_JUMP
        there = {"device": weight.device}
        return Pass(
            tokens_N[None].to(**there), positions_BT=positions_N[None].to(**there), borders=PROBE_BORDERS, **options
        )

    def _scale_head(self, hidden_BTD: Tensor, logits_BTV: Tensor) -> None:
        """Brings a factor on the logits into the head's weights; of the whole model it is the last thing."""
        product_BTV = self.lm_head(hidden_BTD)
        ours, theirs = product_BTV.double(), logits_BTV.double()
        factor = float((ours * theirs).sum() / (ours * ours).sum())
        off = distance(factor * ours, theirs)
        if self.lm_head.bias is not None or not off < TOLERANCES[hidden_BTD.dtype]:
            raise ValueError(
                f"target.loader: the logits of {type(self.own).__name__} are no multiple of its LM head's product (a "
                f"bias, a soft cap; {off:.2g} off); it {NOT_SERVED}"
            )
        if not math.isclose(factor, 1, rel_tol=TOLERANCES[hidden_BTD.dtype]):
            weight = nn.Parameter(self.lm_head.weight * factor, requires_grad=False)
            with torch.device("meta"):
                self.lm_head = Linear(*reversed(weight.shape), bias=False)
            self.lm_head.weight = weight

    def _rotates(self) -> bool:
        """Whether the key of a token alone, further on, is that at position 0, rotated by `config.rope`."""
        there = {"device": self.embed_tokens.weight.device}
        positions_12 = torch.tensor([[0, min(100, self.config.max_positions - 1)]], **there)
        found = self(
            Pass(torch.zeros_like(positions_12), positions_BT=positions_12, borders=[0, 1, 2], needs={"last_kv"})
        )
        assert found.last_kv is not None
        k_12Kd = found.last_kv[0].float()
        cos, sin = self.rope(positions_12[:, 1:], None, torch.float32)
        rotated = rotate(k_12Kd[:, :1].contiguous(), cos / self.rope.scaling, sin / self.rope.scaling)
        return distance(rotated, k_12Kd[:, 1:]) < TOLERANCES[found.last_kv[0].dtype]

    def _chunk_feed_forward(self, attentions: Collection[nn.Module]) -> None:
        """What a layer has beside its attention takes a pass's tokens in chunks, where the pass asks for that."""
        holding = set(attentions)
        for part in (part for layer in self.layers for part in layer.children()):
            products = any(weight.dim() > 1 for weight in part.parameters())
            if products and not holding.intersection(part.modules()):
                part.forward = partial(_in_chunks, part.forward)


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over b's own."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _keep_pre_norm(_: nn.Module, arguments: tuple[Any, ...]) -> None:
    running = _RUNNING.get(None)
    if running is not None:
        running.pre_norm = arguments[0]


def _in_chunks(forward: Callable[..., Any], hidden: Tensor, *others: Any, **options: Any) -> Any:
    running = _RUNNING.get(None)
    size = None if running is None else running.given.chunk
    if size is None or others or options or hidden.dim() != 3 or hidden.shape[1] <= size:
        return forward(hidden, *others, **options)
    first, *rest = hidden.split(size, 1)
    begun = forward(first)
    if not isinstance(begun, Tensor):  # experts that also say whom they chose
        return forward(hidden)
    return torch.cat([begun, *(forward(part) for part in rest)], 1)
