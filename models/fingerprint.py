"""Hashes that tell whether a draft, a prepared data set and a target belong together.

Configuration and tokenizer decide what can work together: two models of one shape and one tokenizer agree there. The
hash of the weights tells which of several such models a draft was trained with.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig

# Left out of a fingerprint where a model has none of it: drafts were exported before these fields were there.
LATER_FIELDS = (
    "experts", "activation", "embedding_scale", "post_norms", "attention_sinks", "window_rope", "norm_offset",
    "query_factor",
)  # fmt: skip
# Call-time state of a fast tokenizer: it changes with every padded call and says nothing about token ids.
CALL_STATE = ("truncation", "padding")
# fp16 is not among the dtypes: it cannot hold the small weights of a checkpoint in bf16.
SAMPLED_ROWS, SAMPLED_DTYPES = 8, (torch.float32, torch.bfloat16)


def json_hash(value: Any) -> str:
    """SHA-256 (hex) of JSON values, independent of key order."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) of what turns text into token ids: the fast tokenizer's serialised state, or the vocabulary.

    Left out: truncation and padding (call-time state), and the chat template, which makes text, not ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = {"vocab": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    else:
        state = json.loads(backend.to_str())
        for key in CALL_STATE:
            state.pop(key, None)
    return json_hash({"state": state, "added": {str(i): str(t) for i, t in tokenizer.added_tokens_decoder.items()}})


def shape_hash(config: DecoderConfig) -> str:
    """SHA-256 (hex) of what a target computes, whatever number of positions it is allowed."""
    shape = asdict(replace(config, max_positions=config.rope.max_positions))
    for field in fields(config):  # hashes of before there were these stay
        if field.name in LATER_FIELDS and shape[field.name] == field.default:
            del shape[field.name]
    return json_hash(shape)


def fingerprint(config: DecoderConfig, tokenizer: Any) -> dict[str, str]:
    """What a draft folder records of its target."""
    return {
        "config": shape_hash(config),
        "tokenizer": "none" if tokenizer is None else tokenizer_hash(tokenizer),
    }


def weights_hash(
    decoder: Decoder, whole: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
) -> str | None:
    """SHA-256 (hex) of a few rows of every weight outside the layers and in the first, the middle and the last one.

    Rounded to bf16, so that a checkpoint gives the same in bf16 and in fp32, from safetensors or from a GGUF file of
    the same values. None where a weight is in another precision or, as a sharded target's between its passes, not here.

    Args:
        whole: entered around the reading of a layer, for weights that are elsewhere.
    """
    state, layers = hashlib.sha256(), [decoder.layers[i] for i in sampled_layers(len(decoder.layers))]
    parts = [(part, nullcontext()) for part in (decoder.embed_tokens, decoder.norm, decoder.lm_head)]
    for part, around in [*parts, *((layer, whole(layer)) for layer in layers)]:
        with around:
            for name, weight in part.named_parameters():
                if weight.dtype not in SAMPLED_DTYPES or not weight.numel() or weight.is_meta:
                    return None
                state.update(f"{name} {list(weight.shape)}".encode())
                state.update(_sample(weight.detach()))
    return state.hexdigest()


def sampled_layers(count: int) -> list[int]:
    """Which of so many layers `weights_hash` reads."""
    return sorted({0, (count - 1) // 2, count - 1})


def _sample(weight: Tensor) -> bytes:
    """Rows of a matrix, or of many, that are evenly spaced, the first and the last among them; a vector as it is."""
    if weight.dim() > 1:
        weight = weight.flatten(0, -2)
        n = len(weight)
        weight = weight[sorted({i * (n - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)})]
    return weight.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes()
