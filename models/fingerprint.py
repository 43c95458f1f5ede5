"""Hashes that tell whether a draft, a prepared data set and a target belong together.

A draft fits targets with the same configuration and tokenizer, data those with the same tokenizer. The hash of the
weights distinguishes targets that share both, so it tells which of them a draft was trained with.
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

# Fields added after drafts had been exported: at their defaults they are omitted, so that old hashes stay the same.
LATER_FIELDS = (
    "experts", "activation", "embedding_scale", "post_norms", "attention_sinks", "window_rope", "norm_offset",
    "query_factor", "joined", "gated", "delta", "shared_expert_size",
)  # fmt: skip
# State of a fast tokenizer that every padded call changes. It does not affect token ids.
CALL_STATE = ("truncation", "padding")
# fp16 is excluded: it cannot represent the small weights of a bf16 checkpoint.
SAMPLED_ROWS, SAMPLED_DTYPES = 8, (torch.float32, torch.bfloat16)


def json_hash(value: Any) -> str:
    """SHA-256 (hex) of JSON values, independent of key order."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) of what turns text into token ids: the fast tokenizer's serialised state, or the vocabulary.

    Truncation and padding are omitted as call-time state, and the chat template because it makes text, not ids.
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
    """SHA-256 (hex) of what a target computes. Excludes `max_positions`, which users may set."""
    shape = asdict(replace(config, max_positions=config.rope.max_positions))
    for field in fields(config):
        if field.name in LATER_FIELDS and shape[field.name] == field.default:
            del shape[field.name]
    return json_hash(shape)


def without_yarn(config: DecoderConfig) -> DecoderConfig:
    """The configuration without YaRN, which model cards advise adding to RoPE for long texts."""
    rope = config.rope
    if rope.type != "yarn" or "rope_theta" not in rope.parameters:
        return config
    length = rope.parameters.get("original_max_position_embeddings") or rope.max_positions
    before = {"rope_type": "default", "rope_theta": rope.parameters["rope_theta"]}
    return replace(config, rope=replace(rope, max_positions=length, parameters=before))


def fingerprint(config: DecoderConfig, tokenizer: Any) -> dict[str, str]:
    """The target's hashes, as a draft folder records them."""
    return {"config": shape_hash(config), "tokenizer": "none" if tokenizer is None else tokenizer_hash(tokenizer)}


def weights_hash(
    decoder: Decoder, whole: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext
) -> str | None:
    """SHA-256 (hex) of a few rows of each weight outside the layers and in the first, middle and last layer.

    Rows are rounded to bf16, so that a checkpoint gives the same hash in bf16 and in fp32, and from safetensors and a
    GGUF file of the same values. None if a weight has another dtype or holds no data (sharded targets between passes).

    Args:
        whole: context manager entered while a layer is read, for weights that are kept elsewhere.
    """
    last = len(decoder.layers) - 1
    state, layers = hashlib.sha256(), [decoder.layers[i] for i in sorted({0, last // 2, last})]
    outside = [(module, nullcontext()) for module in (decoder.embed_tokens, decoder.norm, decoder.lm_head)]
    for module, around in [*outside, *((layer, whole(layer)) for layer in layers)]:
        with around:
            for name, weight in module.named_parameters():
                if weight.dtype not in SAMPLED_DTYPES or not weight.numel() or weight.is_meta:
                    return None
                state.update(f"{name} {list(weight.shape)}".encode())
                state.update(_sample(weight.detach()))
    return state.hexdigest()


def _sample(weight: Tensor) -> bytes:
    """The bytes of evenly spaced rows of a matrix (or of a stack of them), first and last included; all of a vector."""
    if weight.dim() > 1:
        weight = weight.flatten(0, -2)
        n = len(weight)
        weight = weight[sorted({i * (n - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)})]
    return weight.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes()
