"""Checks a TransformersModel against transformers' own attention and, for families that it knows, our decoder.

Each comparison is a pass of a few tokens (`TransformersModel.probe_pass`). Our decoder holds one layer's weights at a
time, copied from the model's. A model that passes gets its fingerprint here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.fingerprint import json_hash, shape_hash, weights_hash
from longdraft.models.hf_weights import places
from longdraft.models.layer import Layer
from longdraft.models.passes import TargetOutput
from longdraft.models.transformers_model import ATTENTION, TOLERANCES, TransformersModel, distance

NEEDS = frozenset({"pre_norm", "post_norm", "last_kv"})


def check_against(model: TransformersModel) -> dict[str, str]:
    """The target's fingerprint of configuration and weights (models/fingerprint.py), once the computations agree.

    Raises ValueError, with the largest difference, where they do not.
    """
    probe = model.probe_pass(needs=NEEDS)
    output = model(probe)
    _compare(model, output, _by_hf_attention(model, probe), "transformers' own attention")
    if model.known is None:
        config = json_hash({"model_type": model.hf_model.config.model_type, "shape": shape_hash(model.config)})
        weights = weights_hash(model, cast(Any, model.around_layer))
    else:
        decoder = _as_our_decoder(model, model.known)
        _compare(model, output, decoder(probe), "our decoder")
        config, weights = shape_hash(model.known), weights_hash(decoder, cast(Any, decoder.around_layer))
    return {"config": config} | ({} if weights is None else {"weights": weights})


def _compare(model: TransformersModel, output: TargetOutput, expected: TargetOutput, by: str) -> None:
    pairs = {name: (getattr(output, name), getattr(expected, name)) for name in ("pre_norm", "post_norm")}
    assert output.last_kv is not None and expected.last_kv is not None
    (keys, values), (expected_keys, expected_values) = output.last_kv, expected.last_kv
    pairs |= {"last keys": (keys, expected_keys), "values": (values, expected_values)}
    distances = {name: distance(*pair) for name, pair in pairs.items() if pair[1] is not None}
    worst = max(distances, key=lambda name: distances[name])
    # The layers' roundings add up like the steps of a random walk.
    if not distances[worst] < TOLERANCES[model.embed_tokens.weight.dtype] * len(model.layers) ** 0.5:
        raise ValueError(
            f"target.loader: a pass of {type(model.hf_model).__name__} differs from {by}, most in its {worst}, by "
            f"{distances[worst]:.3g} of their norm; take target.loader=longdraft where it knows the model, or another "
            "target"
        )


@torch.no_grad()
def _by_hf_attention(model: TransformersModel, probe: Any) -> TargetOutput:
    """The probe as transformers computes it, piece by piece."""
    outputs = []
    model.hf_model.set_attn_implementation(model.hf_attention)
    try:
        for start, stop in pairwise(probe.borders):
            tokens = slice(start, stop)
            outputs.append(
                model.hf_model.get_decoder()(
                    input_ids=probe.tokens_BT[:, tokens],
                    position_ids=probe.positions_BT[:, tokens],
                    past_key_values=DynamicCache(),  # the configuration's own would drop what is outside a window
                )
            )
    finally:
        model.hf_model.set_attn_implementation(ATTENTION)
    layers = [output.past_key_values.layers[-1] for output in outputs]
    k_BTKd, v_BTKd = (
        torch.cat([getattr(layer, name).transpose(1, 2) for layer in layers], 1) for name in ("keys", "values")
    )
    post_norm_BTD = torch.cat([output.last_hidden_state for output in outputs], 1)
    return TargetOutput(post_norm=post_norm_BTD, last_kv=(k_BTKd, v_BTKd))


def _as_our_decoder(model: TransformersModel, config: DecoderConfig) -> Decoder:
    """Our decoder with the model's weights; a layer has its weights inside `around_layer` only."""
    with torch.device("meta"):
        decoder = Decoder(config).to(model.embed_tokens.weight.dtype).requires_grad_(False).eval()
    decoder.embed_tokens.weight = model.embed_tokens.weight
    decoder.lm_head.weight = model.lm_head.weight
    table, theirs = places(config, loaded=True), dict(model.hf_model.named_parameters())
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
