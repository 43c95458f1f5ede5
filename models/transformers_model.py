"""TransformersModel: a model that transformers' own classes compute, behind our decoder's interface.

It serves families that models/decoder.py does not know. transformers lets a program replace the attention function.
Here q, k and v go to our decoder's attention, so packed pieces, caches, trees and ranks that share a row work as with
our decoder. Everything else is the model's own code; hooks collect the other fields of a TargetOutput.

Shapes: B slots, T query tokens, N tokens of the probe, D hidden width, V vocabulary, H query heads, K key/value heads,
d head width.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
from longdraft.models.passes import Pass, TargetOutput, take_at, take_one, take_spans
from longdraft.models.rope import Rope
from longdraft.models.transformers_shape import NOT_SERVED, find_layers, foreign_config

ATTENTION = "longdraft"
# The probe, a short pass that shows what a model is: where its pieces start, and by how much its last positions jump.
PROBE_BORDERS, PROBE_JUMP = [0, 9, 15], 5
# How far (`distance`) two computations of a layer may differ: a few roundings, but no other formula.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class _Running(AttentionContext):
    """A pass, and what it has shown so far.

    queries, windows: of each layer that has run its wanted queries [B, H, d] and its sliding window. heads: H, K and d
    of the last of these layers; last_kv: its K and V [B, T, K, d]. pre_norm: the final norm's input.
    """

    queries: list[Tensor] = field(default_factory=list)
    windows: list[int | None] = field(default_factory=list)
    heads: tuple[int, int, int] = (0, 0, 0)
    last_kv: tuple[Tensor, Tensor] | None = None
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
    _check_served(module, key, value, options)
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
    running.heads, running.last_kv = (q_BTHd.shape[2], k_BTKd.shape[2], width), (k_BTKd, v_BTKd)
    if "queries" in inputs.needs:
        running.queries.append(take_one(q_BTHd, inputs.queries_at_B))
    return attend(q_BTHd, k_BTKd, v_BTKd, running, layer, sliding_window, options.get("s_aux")), None


def _check_served(module: nn.Module, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> None:
    name = type(module).__name__
    if options.get("softcap") is not None:
        raise ValueError(f"target.loader: {name} has a soft cap on scores, which {NOT_SERVED}")
    if options.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ValueError(f"target.loader: {name} is not causal, which {NOT_SERVED}")
    if key.shape != value.shape:
        raise ValueError(
            f"target.loader: {name} has keys of width {key.shape[-1]} and values of width {value.shape[-1]} (latents, "
            f"as of MLA), which {NOT_SERVED}"
        )


AttentionInterface.register(ATTENTION, attention)


class TransformersModel(Decoder):
    """A frozen model of transformers as a target, with the interface of `Decoder`.

    A pass always runs all layers to the end, and all tokens at once (`Pass.chunk` has no effect). nn.Linear modules
    become our `Linear`, so that on a CPU a token's result does not depend on the width of its pass while decoding.
    Logits are the LM head's product: if transformers scales them afterwards, the factor is multiplied into a copy of
    the head's weights.

    Args:
        model: a `...ForCausalLM` with its weights; changed in place.
        known: its configuration as our decoder's; None: our decoder does not know the family.
        max_positions: how many positions it takes; None: as its configuration says.
        around_layer: as of `Decoder`, entered around each of the model's layers.

    Attributes:
        hf_model: the model. hf_attention: the attention function that transformers chose for it.
        rotates: whether the last layer's keys are rotated as models/rope.py does it, by `config.rope`.

    Raises ValueError, which names the reason, for a model whose layers, attention, positions or logits are not served.
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
        self.hf_model, self.known, self.around_layer = model.requires_grad_(False).eval(), known, around_layer
        self.hf_attention, self._class_name = model.config._attn_implementation, type(model).__name__
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
        self.rope = Rope(self.config.rope)
        self.rotates = known is not None or self._rotates()

    @torch.no_grad()
    def forward(self, inputs: Pass) -> TargetOutput:
        """Run one pass and return the fields that it needs."""
        running, needs = _Running(inputs, inputs.plan(), inputs.pieces()), inputs.needs
        hidden_BTD = self._run(self._body, running).last_hidden_state
        output = TargetOutput(last_kv=running.last_kv if "last_kv" in needs else None)
        if "queries" in needs:
            output.queries = torch.stack(running.queries)
        if "pre_norm" in needs:
            output.pre_norm = running.pre_norm
        if "post_norm" in needs:
            output.post_norm = hidden_BTD
        if "of_spans" in needs:
            output.of_spans = take_spans(hidden_BTD, inputs.spans)
        if "logits" in needs:
            output.logits = self.lm_head(take_at(hidden_BTD, inputs.logits_at_BR))
        return output

    def _run(self, module: nn.Module, running: _Running) -> Any:
        """Call the whole model or its body with the pass's tokens and positions."""
        inputs = running.inputs
        tokens = slice(None) if inputs.shard is None else inputs.shard.tokens
        positions_BT = inputs.positions().expand(inputs.tokens_BT.shape)
        reset = _RUNNING.set(running)
        try:
            return module(input_ids=inputs.tokens_BT[:, tokens], position_ids=positions_BT[:, tokens], use_cache=False)
        finally:
            _RUNNING.reset(reset)

    def _enter(self, layer: nn.Module, _: Any) -> None:
        self._open.append(self.around_layer(cast(Layer, layer)))
        self._open[-1].__enter__()

    def _leave(self, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)

    @torch.no_grad()
    def _probe(self) -> _Running:
        """Run the probe, which shows the layers; find the final norm, and take the logits' factor into the head."""
        inputs = self.probe_pass()
        running, outputs = _Running(inputs, inputs.plan(), inputs.pieces()), list[tuple[nn.Module, Any]]()
        inside_layers = set(self.layers.modules())
        hooks = [
            module.register_forward_hook(lambda module, _, output: outputs.append((module, output)))
            for module in self._body.modules()
            if module not in inside_layers
        ]
        try:
            logits_BTV = self._run(self.hf_model, running).logits
        finally:
            for hook in hooks:
                hook.remove()
        if len(running.windows) != len(self.layers):
            raise ValueError(
                f"target.loader: {len(running.windows)} of the {len(self.layers)} layers of {self._class_name} "
                f"give keys and values to transformers' attention interface; such a model {NOT_SERVED}"
            )
        (hidden_BTD,) = (output.last_hidden_state for module, output in outputs if module is self._body)
        self.norm = self._final_norm(hidden_BTD, outputs)
        self.norm.register_forward_pre_hook(_keep_pre_norm)
        self._scale_head(hidden_BTD, logits_BTV)
        return running

    def _final_norm(self, hidden_BTD: Tensor, outputs: Sequence[tuple[nn.Module, Any]]) -> nn.Module:
        """The last module with weights whose output is the body's: the very same memory."""
        norms = [
            module
            for module, output in outputs
            if isinstance(output, Tensor) and output.data_ptr() == hidden_BTD.data_ptr() and module.state_dict()
        ]
        if not norms:
            raise ValueError(f"target.loader: {self._class_name} has no final norm; it {NOT_SERVED}")
        return norms[-1]

    def _check_windows(self, told: Collection[int | None]) -> None:
        """Refuse a window that is in the model's mask alone and that its attention was not `told`: it would be lost."""
        config = self.hf_model.config.get_text_config()
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        is_sliding = [kind == "sliding_attention" for kind in kinds] if kinds else [True] * len(told)
        if window and any(slides and found is None for slides, found in zip(is_sliding, told, strict=True)):
            raise ValueError(
                f"target.loader: {self._class_name} has sliding_window {window}, which it puts into its mask "
                f"and does not tell transformers' attention interface; such a model {NOT_SERVED}"
            )

    def probe_pass(self, **options: Any) -> Pass:
        """The probe: two packed pieces of fixed random tokens, the second with a jump in its positions."""
        weight, n_tokens = self.embed_tokens.weight, PROBE_BORDERS[-1]
        tokens_N = torch.randint(len(weight), (n_tokens,), generator=torch.Generator().manual_seed(0))
        positions_N = torch.cat([torch.arange(stop - start) for start, stop in pairwise(PROBE_BORDERS)])
        positions_N[-PROBE_JUMP:] += PROBE_JUMP
        tokens_1N, positions_1N = (x[None].to(weight.device) for x in (tokens_N, positions_N))
        return Pass(tokens_1N, positions_BT=positions_1N, borders=PROBE_BORDERS, **options)

    def _scale_head(self, hidden_BTD: Tensor, logits_BTV: Tensor) -> None:
        """Multiply the head's weights by the factor that transformers puts on the logits, if there is one."""
        product_BTV = self.lm_head(hidden_BTD)
        ours, theirs = product_BTV.double(), logits_BTV.double()
        factor = float((ours * theirs).sum() / (ours * ours).sum())
        off = distance(factor * ours, theirs)
        if self.lm_head.bias is not None or not off < TOLERANCES[hidden_BTD.dtype]:
            raise ValueError(
                f"target.loader: the logits of {self._class_name} are no multiple of its LM head's product (a "
                f"bias, a soft cap; {off:.2g} off); it {NOT_SERVED}"
            )
        if not math.isclose(factor, 1, rel_tol=TOLERANCES[hidden_BTD.dtype]):
            weight = nn.Parameter(self.lm_head.weight * factor, requires_grad=False)
            with torch.device("meta"):
                self.lm_head = Linear(*reversed(weight.shape), bias=False)
            self.lm_head.weight = weight

    def _rotates(self) -> bool:
        """Whether a lone token's key at a later position is its key at position 0, rotated by `config.rope`."""
        last = min(100, self.config.max_positions - 1)
        positions_12 = torch.tensor([[0, last]], device=self.embed_tokens.weight.device)
        tokens_12 = torch.zeros_like(positions_12)
        output = self(Pass(tokens_12, positions_BT=positions_12, borders=[0, 1, 2], needs={"last_kv"}))
        assert output.last_kv is not None
        k_12Kd = output.last_kv[0].float()
        cos, sin = self.rope(positions_12[:, 1:], None, torch.float32)
        rotated = rotate(k_12Kd[:, :1].contiguous(), cos / self.rope.scaling, sin / self.rope.scaling)
        return distance(rotated, k_12Kd[:, 1:]) < TOLERANCES[output.last_kv[0].dtype]


def check_against(model: TransformersModel) -> dict[str, str]:
    """The target's fingerprint of configuration and, for a family that our decoder does not know, weights
    (models/fingerprint.py), once a probe pass agrees with transformers' own attention.

    Raises ValueError, with the largest difference, where it does not.
    """
    probe = model.probe_pass(needs=frozenset({"post_norm", "last_kv"}))
    output, expected = model(probe), _by_hf_attention(model, probe)
    assert output.last_kv is not None and output.post_norm is not None
    found = dict(zip(expected, (output.post_norm, *output.last_kv), strict=True))
    distances = {name: distance(found[name], expected[name]) for name in expected}
    worst = max(distances, key=lambda name: distances[name])
    # The layers' roundings add up like the steps of a random walk.
    if not distances[worst] < TOLERANCES[model.embed_tokens.weight.dtype] * len(model.layers) ** 0.5:
        raise ValueError(
            f"target.loader: a pass of {model._class_name} differs from transformers' own attention, most "
            f"in its {worst}, by {distances[worst]:.3g} of their norm; take another target"
        )
    if model.known is not None:
        return {"config": shape_hash(model.known)}
    config = json_hash({"model_type": model.hf_model.config.model_type, "shape": shape_hash(model.config)})
    weights = weights_hash(model, cast(Any, model.around_layer))
    return {"config": config} | ({} if weights is None else {"weights": weights})


@torch.no_grad()
def _by_hf_attention(model: TransformersModel, probe: Pass) -> dict[str, Tensor]:
    """The probe's outputs as transformers computes them, piece by piece."""
    outputs, positions_BT = [], probe.positions()
    model.hf_model.set_attn_implementation(model.hf_attention)
    try:
        for start, stop in pairwise(PROBE_BORDERS):
            tokens = slice(start, stop)
            outputs.append(
                model.hf_model.get_decoder()(
                    input_ids=probe.tokens_BT[:, tokens],
                    position_ids=positions_BT[:, tokens],
                    past_key_values=DynamicCache(),  # the configuration's own would drop what is outside a window
                )
            )
    finally:
        model.hf_model.set_attn_implementation(ATTENTION)
    layers = [output.past_key_values.layers[-1] for output in outputs]
    return {
        "final states": torch.cat([output.last_hidden_state for output in outputs], 1),
        "last keys": torch.cat([layer.keys.transpose(1, 2) for layer in layers], 1),
        "last values": torch.cat([layer.values.transpose(1, 2) for layer in layers], 1),
    }


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance: |a - b| / |b|."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _keep_pre_norm(_: nn.Module, arguments: tuple[Any, ...]) -> None:
    running = _RUNNING.get(None)
    if running is not None:
        running.pre_norm = arguments[0]
