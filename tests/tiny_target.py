"""A tiny random target, built in a few milliseconds."""

from typing import Any

import torch
from transformers import LlamaConfig

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.fingerprint import fingerprint
from longdraft.models.hf import build_decoder
from longdraft.models.rope import RopeConfig
from longdraft.models.target import Target

SHAPE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
SHAPE |= {"head_dim": 8, "rms_norm_eps": 1e-6, "max_positions": 256}


def make_tiny_target(
    *,
    dtype: torch.dtype = torch.float32,
    rope: dict | None = None,
    eos_token_ids: tuple[int, ...] = (),
    std: float = 0.25,
    seed: int = 0,
    **fields: Any,
) -> Target:
    """A target with random weights, a fixed seed and no tokenizer; `std` is large, so that logits are far apart.

    fields: fields of DecoderConfig that replace SHAPE's. rope: RoPE parameters in transformers' format.
    """
    shape = SHAPE | fields
    parameters = rope or {"rope_type": "default", "rope_theta": 10000.0}
    config = DecoderConfig(**shape, rope=RopeConfig(shape["head_dim"], shape["max_positions"], parameters))
    decoder = build_decoder(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        centre = 1.0 if "norm" in name else -3.0 if "log_rate" in name else 0.0
        parameter.data.normal_(centre, std, generator=generator)
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, num_attention_heads=config.n_heads
    )
    return Target(decoder.to(dtype), None, f"tiny-{seed}", hf_config, fingerprint(config, None), eos_token_ids)
