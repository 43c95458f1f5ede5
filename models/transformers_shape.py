"""What a model of transformers is: its layers, and the shape that drafts and caches read where our decoder does not
know its family. Not here: its passes (transformers_model.py).
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.rope import LENGTH_DEPENDENT, ROPE_TYPES, RopeConfig

# Of transformers' layer_types, those whose layers are attention over the keys of earlier tokens.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
NOT_SERVED = "is not served by target.loader=transformers; take another target"


def find_layers(model: Any) -> nn.ModuleList:
    """The layers of a `...ForCausalLM`.

    Raises: ValueError where not all of them are attention, or where transformers makes one rotary table for all
        sequences of a pass, of the longest one: pieces and trees have lengths of their own.
    """
    text, name = model.config.get_text_config(), type(model).__name__
    kinds = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    if kinds:
        raise ValueError(f"target.loader: {name} has layers of {', '.join(sorted(kinds))}; it {NOT_SERVED}")
    for one in _rope_parameters(text).values():
        if one.get("rope_type") in LENGTH_DEPENDENT:
            raise ValueError(
                f"target.loader: {name} has rope_type {one['rope_type']}, whose table depends on the length; it "
                f"{NOT_SERVED}, or target.loader=longdraft where that knows this one"
            )
    n_layers = getattr(text, "num_hidden_layers", 0)
    for part in model.get_decoder().modules():
        if isinstance(part, nn.ModuleList) and len(part) == n_layers:
            return part
    raise ValueError(f"target.loader: {name} has no list of {n_layers} layers; it {NOT_SERVED}")


def foreign_config(
    model: Any, heads: tuple[int, int, int], windows: Sequence[int | None], max_positions: int | None
) -> DecoderConfig:
    """Fields of our configuration for a model of an unknown family; its feed-forward's width is what a draft's is.

    Args:
        heads: query heads, key heads and their width. windows: of each layer. max_positions: where the model's own
            configuration says none.
    Raises: ValueError where neither says how many positions it takes.
    """
    text, (n_heads, n_kv_heads, head_dim) = model.config.get_text_config(), heads
    vocab_size, width = model.get_output_embeddings().weight.shape
    positions = getattr(text, "max_position_embeddings", None) or max_positions
    if positions is None:
        raise ValueError(
            f"target.max_positions: the configuration of {type(model).__name__} does not say how many it takes; set it"
        )
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * width,
        n_layers=len(windows),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=next((getattr(text, name) for name in EPSILONS if getattr(text, name, None)), 1e-6),
        max_positions=positions,
        rope=_rope(text, head_dim, positions),
        sliding_windows=tuple(windows) if any(windows) else None,
    )


def _rope_parameters(text: Any) -> dict[str, dict[str, Any]]:
    """transformers' `rope_parameters` by the kind of layer, where it has one for each."""
    found = getattr(text, "rope_parameters", None) or {}
    return found if all(isinstance(one, dict) for one in found.values()) else {"all": found}


def _rope(text: Any, head_dim: int, positions: int) -> RopeConfig:
    """The last layer's; plain, and not what the keys have, where it is of a kind that models/rope.py does not know."""
    kinds, parameters = getattr(text, "layer_types", None) or ["all"], _rope_parameters(text)
    own = parameters.get(kinds[-1]) or next(iter(parameters.values()), {})
    if own.get("rope_type") in ROPE_TYPES and own.get("partial_rotary_factor") in (None, 1.0):
        return RopeConfig(head_dim, positions, own)
    return RopeConfig(head_dim, positions)
