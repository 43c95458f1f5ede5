"""TransformersModel: runs a model through transformers' own classes, with the interface of our decoder.

It supports families that models/decoder.py does not. transformers lets a program replace its attention function: here
q, k and v go to our decoder's attention, so packed pieces, caches, trees and ranks that share a row work as with our
decoder. Everything else is the model's own code; hooks collect the other fields of a TargetOutput.

Shapes: B slots, T query tokens, N tokens of the probe, D hidden width, V vocabulary, H query heads, K key/value heads,
d head width.
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from longdraft.kernels.rotate import rotate
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.fingerprint import json_hash, shape_hash, weights_hash
from longdraft.models.layer import AttentionContext, Layer, Linear, attend
from longdraft.models.passes import Pass, TargetOutput, take_at, take_one
from longdraft.models.rope import LENGTH_DEPENDENT, ROPE_TYPES, Rope, RopeConfig

ATTENTION = "longdraft"
# The values of transformers' layer_types that mean attention over the keys of earlier tokens.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
# The probe is a short pass that reveals a model's structure. These are its pieces, and how far its last positions jump.
PROBE_BORDERS, PROBE_JUMP = [0, 9, 15], 5
# How far (`distance`) two computations of a layer may differ: more than rounding, less than another formula.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class _Running(AttentionContext):
    """A running pass, and what its layers have recorded so far.

    queries, windows, heads: for each layer that has run, its requested queries [B, H, d], its sliding window, and H, K
    and d. last_kv: K and V of the latest layer [B, T, K, d]. norm: the latest norm outside of the layers, at the end of
    a pass the final norm; pre_norm: its input [B, T, D].
    """

    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    heads: list[tuple[int, int, int]] = field(default_factory=list)
    last_kv: tuple[Tensor, Tensor] | None = None
    norm: nn.Module | None = None
    pre_norm: Tensor | None = None


_RUNNING: ContextVar[_Running] = ContextVar("running")


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
    """The attention function that transformers calls, once per layer, in order.

    Args:
        query, key, value: [B, H, T, d] and [B, K, T, d], after RoPE.
    Returns: [B, T, H, d].
    Raises ValueError for attention that our decoder does not compute.
    """
    if options.get("softcap") is not None or key.shape != value.shape:
        raise _not_served(module, "a soft cap on scores, or keys and values of different widths (latents, as in MLA)")
    running, width = _RUNNING.get(), query.shape[-1]
    inputs, layer = running.inputs, len(running.windows)
    if scaling is not None and not math.isclose(scaling, width**-0.5, rel_tol=1e-6):
        query = query * (scaling * width**0.5)  # our attention scales the scores by d ** -0.5
    q_BTHd, k_BTKd, v_BTKd = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if inputs.cache is not None:
        no_turn = q_BTHd.new_ones(*q_BTHd.shape[:2], 1, 1, width // 2)  # q and k are rotated already: cos 1, sin 0
        qkv_BTNd = torch.cat([q_BTHd, k_BTKd, v_BTKd], 2)
        inputs.cache.append(layer, qkv_BTNd, no_turn, torch.cat([torch.zeros_like(no_turn)] * 2, 3))
    running.windows.append(sliding_window)
    running.heads.append((q_BTHd.shape[2], k_BTKd.shape[2], width))
    running.last_kv = k_BTKd, v_BTKd
    if "queries" in inputs.needs:
        running.queries.append(take_one(q_BTHd, inputs.queries_at_B))
    return attend(q_BTHd, k_BTKd, v_BTKd, running, layer, sliding_window, options.get("s_aux")), None


AttentionInterface.register(ATTENTION, attention)


class TransformersModel(Decoder):
    """A frozen transformers model as a target, with the interface of `Decoder`.

    A pass always runs all layers to the end, and all tokens at once (`Pass.chunk` has no effect). nn.Linear modules
    become our `Linear`, so that on a CPU a token's result does not depend on the width of its pass while decoding.
    Logits are the LM head's product: if transformers scales them afterwards, the factor is multiplied into a copy of
    the head.

    Args:
        model: a `...ForCausalLM` with its weights; changed in place.
        known: its configuration as a DecoderConfig; None if our decoder does not support the family.
        max_positions: how many positions it takes; None: as its configuration says.
        around_layer: as in `Decoder`, entered around each of the model's layers.

    Attributes:
        hf_model: the model. hf_attention: the attention function that transformers chose for it.
        rotates: whether the last layer's keys are rotated as models/rope.py does it.

    Raises ValueError with the reason for a model whose layers, attention, positions or logits are not supported.
    """

    may_fail_to_record = True

    def __init__(
        self,
        model: Any,
        known: DecoderConfig | None = None,
        max_positions: int | None = None,
        around_layer: Callable[[Any], AbstractContextManager[object]] = nullcontext,
    ):
        nn.Module.__init__(self)
        self.hf_model, self.known, self.around_layer = model.requires_grad_(False).eval(), known, around_layer
        self.hf_attention = model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        self.layers, self._body = find_layers(model), model.get_decoder()
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self._body.warn_if_padding_and_no_attention_mask = lambda *_: None  # which reads tokens on the host
        for module in model.modules():
            if type(module) is nn.Linear:  # a subclass computes something else
                module.__class__ = Linear
        self._open: list[AbstractContextManager[object]] = []
        for layer in self.layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave, always_call=True)
        inside = set(self.layers.modules())
        for module in self._body.modules():
            if module not in inside and "norm" in type(module).__name__.lower():
                module.register_forward_pre_hook(_keep_pre_norm)
        probed = self._probe()
        rope = _known_rope(model.config.get_text_config())
        self.config = known or _foreign_config(model, probed, rope, max_positions)
        if max_positions is not None:
            self.config = replace(self.config, max_positions=max_positions)
        self.whole_config, self.rope = self.config, Rope(self.config.rope)
        self.rotates = known is not None or (rope is not None and self._turns_keys())

    @torch.no_grad()
    def forward(self, inputs: Pass) -> TargetOutput:
        """Run one pass and return the fields that it needs."""
        positions_BT = inputs.positions()
        if inputs.cache is not None:  # a draft's nodes may lie beyond the last position, where learned tables end
            positions_BT = positions_BT.clamp(max=self.config.max_positions - 1)
        inputs = replace(inputs, positions_BT=positions_BT.expand(inputs.tokens_BT.shape))
        running, needs = _Running(inputs, inputs.plan(), inputs.pieces()), inputs.needs
        hidden_BTD = self._run(self._body, running).last_hidden_state
        output = TargetOutput(last_kv=running.last_kv if "last_kv" in needs else None)
        if "queries" in needs:
            output.queries = torch.stack(running.queries)
        if "pre_norm" in needs:
            output.pre_norm = running.pre_norm
        if "post_norm" in needs:
            output.post_norm = hidden_BTD
        if "logits" in needs:
            output.logits = self.lm_head(take_at(hidden_BTD, inputs.logits_at_BR))
        return output

    def _run(self, module: nn.Module, running: _Running) -> Any:
        """Call the whole model or its body with the pass's tokens and positions."""
        inputs = running.inputs
        tokens = slice(None) if inputs.shard is None else inputs.shard.tokens
        assert inputs.positions_BT is not None
        tokens_BT, positions_BT = inputs.tokens_BT[:, tokens], inputs.positions_BT[:, tokens]
        reset = _RUNNING.set(running)
        try:
            return module(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
        finally:
            _RUNNING.reset(reset)

    def _enter(self, layer: nn.Module, _: Any) -> None:
        self._open.append(self.around_layer(cast(Layer, layer)))
        self._open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    def probe_pass(self, **options: Any) -> Pass:
        """The probe: two packed pieces of fixed random tokens, the second with a jump in its positions."""
        weight, n_tokens = self.embed_tokens.weight, PROBE_BORDERS[-1]
        tokens_N = torch.randint(len(weight), (n_tokens,), generator=torch.Generator().manual_seed(0))
        positions_N = torch.cat([torch.arange(stop - start) for start, stop in pairwise(PROBE_BORDERS)])
        positions_N[-PROBE_JUMP:] += PROBE_JUMP
        tokens_1N, positions_1N = (x[None].to(weight.device) for x in (tokens_N, positions_N))
        return Pass(tokens_1N, positions_BT=positions_1N, borders=PROBE_BORDERS, **options)

    @torch.no_grad()
    def _probe(self) -> _Running:
        """Run the probe and return what the layers recorded. If transformers scales the logits, multiply the LM head by
        the same factor."""
        inputs, model = self.probe_pass(), self.hf_model
        running = _Running(inputs, inputs.plan(), inputs.pieces())
        logits_BTV = self._run(model, running).logits
        if len(running.windows) != len(self.layers):
            raise _not_served(model, "layers that pass no keys and values to transformers' attention interface")
        if len(set(running.heads)) > 1:
            raise _not_served(model, "layers whose heads differ in number or width")
        text = model.config.get_text_config()
        window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
        slides = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(self.layers)
        if window and any(a and b is None for a, b in zip(slides, running.windows, strict=True)) and not self.known:
            raise _not_served(model, "a sliding_window in its mask that is not passed to its attention function")
        if running.pre_norm is None or running.norm is None:
            raise _not_served(model, "no final norm")
        self.norm = running.norm
        hidden_BTD = self.norm(running.pre_norm)
        ours, theirs = self.lm_head(hidden_BTD).double(), logits_BTV.double()
        factor, tolerance = float((ours * theirs).sum() / (ours * ours).sum()), TOLERANCES[hidden_BTD.dtype]
        if self.lm_head.bias is not None or not distance(factor * ours, theirs) < tolerance:
            raise _not_served(model, "logits that are not a multiple of its LM head's product (a bias, a soft cap)")
        if not math.isclose(factor, 1, rel_tol=tolerance):
            self.lm_head = copy.deepcopy(self.lm_head)  # the embedding may share its weights
            self.lm_head.weight.mul_(factor)
        return running

    def _turns_keys(self) -> bool:
        """Whether the last layer's keys are rotated as models/rope.py does it: some families do not rotate, others pair
        neighbours instead of halves. A token that reads only itself has the same key at every position, up to the
        rotation."""
        tokens_12 = self.probe_pass().tokens_BT[:, :1].repeat(1, 2)
        positions_12 = torch.tensor([[0, PROBE_JUMP]], device=tokens_12.device)
        inputs = Pass(tokens_12, positions_BT=positions_12, borders=[0, 1, 2], needs=frozenset({"last_kv"}))
        k_12Kd, _ = cast(Any, self(inputs).last_kv)
        cos, sin = self.rope(positions_12[:, 1:], None, k_12Kd.dtype)
        turned = rotate(k_12Kd[:, :1], cos, sin) / self.rope.scaling  # the first key has this factor already
        return distance(turned, k_12Kd[:, 1:]) < TOLERANCES[k_12Kd.dtype] * len(self.layers) ** 0.5


@torch.no_grad()
def check_against(model: TransformersModel) -> dict[str, str]:
    """Compare the probe's final states with those of transformers' own attention, then return the fingerprint of the
    target's configuration and, for a family that our decoder does not support, of its weights (models/fingerprint.py).

    Raises ValueError, with the difference, if the states do not agree.
    """
    probe = model.probe_pass(needs=frozenset({"post_norm"}))
    ours, theirs = model(probe).post_norm, []
    model.hf_model.set_attn_implementation(model.hf_attention)
    try:
        for piece in (slice(*borders) for borders in pairwise(PROBE_BORDERS)):
            tokens_BT, positions_BT = probe.tokens_BT[:, piece], probe.positions()[:, piece]
            cache = DynamicCache()  # without one, transformers takes a jump in the positions for a new text
            output = model._body(input_ids=tokens_BT, position_ids=positions_BT, past_key_values=cache)
            theirs.append(output.last_hidden_state)
    finally:
        model.hf_model.set_attn_implementation(ATTENTION)
    # The layers' roundings add up like the steps of a random walk.
    if not (off := distance(ours, torch.cat(theirs, 1))) < TOLERANCES[ours.dtype] * len(model.layers) ** 0.5:
        raise _not_served(model.hf_model, f"final states that differ from transformers' own by {off:.3g} of their norm")
    if model.known is not None:
        return {"config": shape_hash(model.known)}
    config = json_hash({"model_type": model.hf_model.config.model_type, "shape": shape_hash(model.config)})
    weights = weights_hash(model, cast(Any, model.around_layer))
    return {"config": config} | ({} if weights is None else {"weights": weights})


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance: |a - b| / |b|."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _keep_pre_norm(norm: nn.Module, arguments: tuple[Any, ...]) -> None:
    running = _RUNNING.get(None)
    if running is not None:
        running.norm, running.pre_norm = norm, arguments[0]


def find_layers(model: Any) -> nn.ModuleList:
    """The layers of a `...ForCausalLM`.

    Raises ValueError if not all of them are attention, and for rotary tables that depend on the length: transformers
    makes one table per pass, for its longest sequence, but pieces and trees have lengths of their own.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    if kinds:
        raise _not_served(model, f"layers of {', '.join(sorted(kinds))}")
    if any(rope.get("rope_type") in LENGTH_DEPENDENT for rope in _rope_parameters(text).values()):
        raise _not_served(model, "a rope_type whose table depends on the length")
    n_layers = getattr(text, "num_hidden_layers", 0)
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise _not_served(model, f"no list of {n_layers} layers")


def _not_served(model: nn.Module, what: str) -> ValueError:
    return ValueError(
        f"target.loader: {type(model).__name__} has {what}, which target.loader=transformers does not support; choose "
        "another target, or target.loader=longdraft if that supports this one"
    )


def _foreign_config(
    model: Any, probed: _Running, rope: dict[str, Any] | None, max_positions: int | None
) -> DecoderConfig:
    """The DecoderConfig of a model whose family our decoder does not support: the fields that drafts and caches read.

    Raises ValueError if neither the model's configuration nor `max_positions` says how many positions it takes.
    """
    text, (n_heads, n_kv_heads, head_dim) = model.config.get_text_config(), probed.heads[-1]
    vocab_size, width = model.get_output_embeddings().weight.shape
    positions = getattr(text, "max_position_embeddings", None) or max_positions
    if positions is None:
        raise ValueError(f"target.max_positions: the configuration of {type(model).__name__} does not give it; set it")
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * width,
        n_layers=len(probed.windows),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=next((getattr(text, name) for name in EPSILONS if getattr(text, name, None)), 1e-6),
        max_positions=positions,
        rope=RopeConfig(head_dim, positions, rope) if rope else RopeConfig(head_dim, positions),
        sliding_windows=tuple(probed.windows) if any(probed.windows) else None,
    )


def _rope_parameters(text: Any) -> dict[str, dict[str, Any]]:
    """transformers' `rope_parameters` by layer type; under "all" where all layers share them."""
    found = getattr(text, "rope_parameters", None) or {}
    return found if all(isinstance(value, dict) for value in found.values()) else {"all": found}


def _known_rope(text: Any) -> dict[str, Any] | None:
    """The parameters of the last layer's RoPE; None if models/rope.py does not support it."""
    kinds, parameters = getattr(text, "layer_types", None) or ["all"], _rope_parameters(text)
    last = parameters.get(kinds[-1]) or next(iter(parameters.values()), {})
    return last if last.get("rope_type") in ROPE_TYPES and last.get("partial_rotary_factor") in (None, 1.0) else None
