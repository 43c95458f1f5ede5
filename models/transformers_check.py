"""Whether a model of transformers computes the same with our attention, with transformers' own and, where our decoder
knows the family, there; and the fingerprint that follows.

Each is a pass of a few tokens. Our decoder has one layer's weights at a time, copied from the model's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache

from longdraft.models.checkpoint import places
from longdraft.models.decoder import Decoder, Layer
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.fingerprint import json_hash, shape_hash, weights_hash
from longdraft.models.passes import TargetOutput
from longdraft.models.transformers_model import ATTENTION, TOLERANCES, TransformersModel, distance

NEEDS = frozenset({"pre_norm", "post_norm", "last_kv"})


def check_against(model: TransformersModel) -> dict[str, str]:
    """Raises ValueError, with the largest difference, where the ways do not agree; returns the target's fingerprint of
    configuration and weights, as models/fingerprint.py has it."""
    given = model.probe_pass(needs=NEEDS)
    found = model(given)
    _compare(model, found, _by_own_attention(model, given), "transformers' own attention")
    if model.known is None:
        known = {"model_type": model.own.config.model_type, "shape": shape_hash(model.config)}
        found, weights = json_hash(known), weights_hash(model, cast(Any, model.around_layer))
    else:
        decoder = _in_our_layers(model, model.known)
        _compare(model, found, decoder(given), "our decoder")
        found, weights = shape_hash(model.known), weights_hash(decoder, cast(Any, decoder.around_layer))
    return {"config": found} | ({} if weights is None else {"weights": weights})


def _compare(model: TransformersModel, found: TargetOutput, expected: TargetOutput, by: str) -> None:
    pairs = {name: (getattr(found, name), getattr(expected, name)) for name in ("pre_norm", "post_norm")}
    assert found.last_kv is not None and expected.last_kv is not None
    pairs |= {"last keys": (found.last_kv[0], expected.last_kv[0]), "values": (found.last_kv[1], expected.last_kv[1])}
    off = {name: distance(*pair) for name, pair in pairs.items() if pair[1] is not None}
    worst = max(off, key=lambda name: off[name])
    # Roundings of one layer after the other add up like steps of a random walk.
    if not off[worst] < TOLERANCES[model.embed_tokens.weight.dtype] * len(model.layers) ** 0.5:
        raise ValueError(
            f"target.loader: a pass of {type(model.own).__name__} differs from {by}, most in its {worst}, by "
            f"{off[worst]:.3g} of their norm; take target.loader=longdraft where it knows the model, or another target"
        )


@torch.no_grad()
def _by_own_attention(model: TransformersModel, given: Any) -> TargetOutput:
    """The pass as transformers computes it, piece by piece."""
    parts = []
    model.own.set_attn_implementation(model.own_attention)
    try:
        for start, stop in pairwise(given.borders):
            tokens = slice(start, stop)
            parts.append(
                model.own.get_decoder()(
                    input_ids=given.tokens_BT[:, tokens],
                    position_ids=given.positions_BT[:, tokens],
                    past_key_values=DynamicCache(),  # not the configuration's: a window's keeps its own tokens alone
                )
            )
    finally:
        model.own.set_attn_implementation(ATTENTION)
    layers = [part.past_key_values.layers[-1] for part in parts]
    k_BTKd, v_BTKd = (
        torch.cat([getattr(layer, name).transpose(1, 2) for layer in layers], 1) for name in ("keys", "values")
    )
    return TargetOutput(post_norm=torch.cat([part.last_hidden_state for part in parts], 1), last_kv=(k_BTKd, v_BTKd))


def _in_our_layers(model: TransformersModel, config: DecoderConfig) -> Decoder:
    """Our decoder of the model's weights, which has those of a layer within `around_layer` alone."""
    with torch.device("meta"):
        decoder = Decoder(config).to(model.embed_tokens.weight.dtype).requires_grad_(False).eval()
    decoder.embed_tokens.weight = model.embed_tokens.weight
    decoder.lm_head.weight = model.lm_head.weight
    table, theirs = places(config, loaded=True), dict(model.own.named_parameters())
    final = table["model.norm.weight"].value(cast(Any, model.norm).weight.detach())
    decoder.norm.weight = nn.Parameter(final.to(decoder.norm.weight.dtype), requires_grad=False)
    numbers = {layer: i for i, layer in enumerate(decoder.layers)}

    @contextmanager
    def filled(layer: nn.Module) -> Iterator[None]:
        i = numbers[layer]
        with model.around_layer(cast(Layer, model.layers[i])):
            layer.to_empty(device=model.embed_tokens.weight.device)
            parameters = {f"layers.{i}.{name}": weight for name, weight in layer.named_parameters()}
            for name, place in table.items():
                if place.parameter in parameters:
                    place.rows(parameters[place.parameter]).copy_(place.value(theirs[name]))
            yield
        layer.to("meta")

    decoder.around_layer = filled
    return decoder
