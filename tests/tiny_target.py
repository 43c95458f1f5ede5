"""A tiny random target, built in a few milliseconds."""

from typing import Any

import torch
from transformers import LlamaConfig

from longdraft.models.decoder_config import DecoderConfig, ExpertsConfig
from longdraft.models.fingerprint import fingerprint
from longdraft.models.hf import build_decoder
from longdraft.models.rope import RopeConfig
from longdraft.models.target import Target


def make_tiny_target(
    *,
    vocab_size: int = 97,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    n_layers: int = 2,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 8,
    max_positions: int = 256,
    dtype: torch.dtype = torch.float32,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    rope: dict | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    experts: ExpertsConfig | None = None,
    eos_token_ids: tuple[int, ...] = (),
    std: float = 0.25,
    seed: int = 0,
    **others: Any,
) -> Target:
    """A target with random weights, a fixed seed and no tokenizer; `std` is wide, so that logits are far apart."""
    parameters = rope or {"rope_type": "default", "rope_theta": 10000.0}
    config = DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_positions=max_positions,
        rope=RopeConfig(head_dim, max_positions, parameters),
        attention_bias=attention_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=tie_embeddings,
        sliding_windows=sliding_windows,
        experts=experts,
        **others,
    )
    decoder = build_decoder(config, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        centre = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(centre, std, generator=generator)
    hf_config = LlamaConfig(vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=n_heads)
    return Target(decoder.to(dtype), None, f"tiny-{seed}", hf_config, fingerprint(config, None), eos_token_ids)
