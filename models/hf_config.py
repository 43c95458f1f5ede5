"""Converts a Hugging Face configuration to a DecoderConfig."""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from longdraft.models.decoder_config import DecoderConfig, DeltaConfig, ExpertsConfig
from longdraft.models.rope import RopeConfig

# Those that read images, whose text model is a part: Gemma 3; Qwen2.5-VL, Qwen3-VL and Qwen3.5; Mistral Small 3.1 and
# 3.2, Ministral 3 and Devstral Small 2.
WITH_IMAGES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3")
# Texts have the same position in all three parts of Qwen's RoPE. Ministral 3's queries grow with their position
# (models/rope.py).
LAYERS_OF = {
    "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "ministral3": "mistral",
}  # fmt: skip
# By model_type: Llama 2 and 3, Vicuna, LongChat, YaRN-Llama and SmolLM2; Mistral; Qwen2, 2.5 and QwQ; Qwen3; Qwen3-MoE;
# Mixtral; Gemma 3 and Qwen3.5; gpt-oss; Seed-OSS; Code World Model; Phi 3, 3.5, 4 and 4-mini; Qwen3-Next.
SUPPORTED = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "gpt_oss", "seed_oss", "cwm", "phi3",
    "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", *LAYERS_OF, *WITH_IMAGES,
)  # fmt: skip
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # with layers of linear attention


def decoder_config(hf_config: PretrainedConfig, max_positions: int | None = None) -> DecoderConfig:
    """Our configuration for a Hugging Face one.

    Args:
        max_positions: how many positions the decoder takes; None: as the configuration says.
    Raises: ValueError, with the field and the supported values, for what our decoder does not support, and for less
        than one position.
    """
    model_type = hf_config.model_type
    if model_type not in SUPPORTED:
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}; others may work through "
            "transformers (in training target.loader=transformers, in generate and serve --loader transformers)"
        )
    if model_type in WITH_IMAGES:
        config = decoder_config(hf_config.get_text_config(), max_positions)
        # Mistral's whole configuration says true for every model; its text's is right.
        tied = config.tie_embeddings if model_type == "mistral3" else bool(hf_config.tie_word_embeddings)
        return replace(config, tie_embeddings=tied)
    model_type = _family(hf_config)
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    if model_type == "gemma3_text":
        field, activation, of_family = "hidden_activation", "gelu_pytorch_tanh", _gemma(hf_config, head_dim)
    else:
        field, activation, rope = "hidden_act", "silu", _rope_config(hf_config, head_dim)
        of_family = {"rope": rope, "max_positions": _positions(hf_config, rope)}
    experts = _experts(hf_config)
    if model_type in LINEAR:
        of_family |= _hybrid(hf_config, experts is not None)
    if (given := getattr(hf_config, field, activation)) != activation:
        raise ValueError(f"{field} is {given!r}; only {activation!r} is supported")
    bias = bool(getattr(hf_config, "attention_bias", False))
    o_bias = bias and model_type in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", *LINEAR)
    config = DecoderConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=_intermediate_size(hf_config),
        n_layers=hf_config.num_hidden_layers,
        n_heads=heads,
        n_kv_heads=hf_config.num_key_value_heads or heads,
        head_dim=head_dim,
        rms_norm_eps=hf_config.rms_norm_eps,
        attention_bias=model_type == "qwen2" or (bias and model_type not in ("mistral", "mixtral", "cwm")),
        o_bias=hf_config.attention_out_bias if model_type == "seed_oss" else o_bias,
        mlp_bias=bool(getattr(hf_config, "mlp_bias", False)) and model_type in ("llama", "seed_oss", "cwm"),
        qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text", *LINEAR),
        tie_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),  # Qwen-VL's text has no such field
        sliding_windows=_sliding_windows(hf_config),
        experts=experts,
        attention_sinks=model_type == "gpt_oss",
        joined=model_type == "phi3",
        **of_family,
    )
    return config if max_positions is None else replace(config, max_positions=max_positions)


def _family(hf_config: PretrainedConfig) -> str:
    """The model_type whose layers these are."""
    return LAYERS_OF.get(hf_config.model_type, hf_config.model_type)


def _gemma(hf_config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """The fields in which Gemma 3 differs from Llama.

    Our attention divides scores by the root of the head's width, Gemma by the root of `query_pre_attn_scalar`.

    Raises ValueError for options of Gemma 3's configuration that none of its published models uses.
    """
    for field in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if value := getattr(hf_config, field, None):
            raise ValueError(f"{field} is {value!r}; only models without it are supported")
    rope, window_rope = (
        RopeConfig(head_dim, hf_config.max_position_embeddings, dict(hf_config.rope_parameters[layers]))
        for layers in ("full_attention", "sliding_attention")
    )
    return {
        "rope": rope,
        "window_rope": window_rope,
        "max_positions": rope.max_positions,  # already scaled; the length before scaling is not given
        "activation": "gelu_tanh",
        "embedding_scale": hf_config.hidden_size**0.5,
        "post_norms": True,
        "norm_offset": 1.0,
        "query_factor": (head_dim / hf_config.query_pre_attn_scalar) ** 0.5,
    }


def _intermediate_size(hf_config: PretrainedConfig) -> int:
    """The width of a feed-forward without experts. Qwen3.5-MoE has none; a block's is then as wide as a token's experts
    together."""
    if hf_config.model_type != "qwen3_5_moe_text":
        return hf_config.intermediate_size
    of_experts = hf_config.num_experts_per_tok * hf_config.moe_intermediate_size
    return of_experts + hf_config.shared_expert_intermediate_size


def _hybrid(hf_config: PretrainedConfig, has_experts: bool) -> dict[str, Any]:
    """The fields in which Qwen3-Next and Qwen3.5 differ from Qwen3.

    Raises ValueError for options that transformers does not read and vLLM does, unless both compute the same.
    """
    if not getattr(hf_config, "attn_output_gate", True):
        raise ValueError("attn_output_gate is false; only true is supported")
    if (gate := getattr(hf_config, "output_gate_type", None)) not in (None, "silu", "swish"):
        raise ValueError(f"output_gate_type is {gate!r}; only 'silu' and 'swish' are supported")
    _check_layer_types(hf_config, hf_config.layer_types, {"linear_attention", "full_attention"})
    return {
        "delta": _delta(hf_config),
        "gated": True,
        "norm_offset": 1.0,
        "shared_expert_size": hf_config.shared_expert_intermediate_size if has_experts else None,
    }


def _delta(hf_config: PretrainedConfig) -> DeltaConfig | None:
    """The layers with linear attention; None if there are none."""
    linear = tuple(i for i, kind in enumerate(hf_config.layer_types) if kind == "linear_attention")
    if not linear:
        return None
    heads = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
    return DeltaConfig(
        linear, *heads, hf_config.linear_key_head_dim, hf_config.linear_value_head_dim, hf_config.linear_conv_kernel_dim
    )


def _experts(hf_config: PretrainedConfig) -> ExpertsConfig | None:
    """The experts, read from the configuration as transformers' own model classes do; None for a dense model."""
    model_type = _family(hf_config)
    if model_type in ("mixtral", "gpt_oss"):
        shape = hf_config.num_local_experts, hf_config.num_experts_per_tok, hf_config.intermediate_size
        gate = (hf_config.swiglu_alpha, hf_config.swiglu_limit) if model_type == "gpt_oss" else None
        return ExpertsConfig(*shape, normalised=True, bias=gate is not None, clamped_gate=gate)
    if model_type not in ("qwen3_moe", "qwen3_5_moe_text", "qwen3_next") or not hf_config.num_experts:
        return None
    shape = hf_config.num_experts, hf_config.num_experts_per_tok, hf_config.moe_intermediate_size
    if model_type == "qwen3_5_moe_text":  # experts in all layers, and no option
        return ExpertsConfig(*shape, normalised=True)
    normalised = bool(getattr(hf_config, "norm_topk_prob", True))  # Qwen3-VL's has no such field
    step, mlp_only = hf_config.decoder_sparse_step, hf_config.mlp_only_layers
    dense = tuple(i for i in range(hf_config.num_hidden_layers) if i in mlp_only or (i + 1) % step)
    return ExpertsConfig(*shape, normalised=normalised, dense_layers=dense)


def _rope_config(hf_config: PretrainedConfig, head_dim: int) -> RopeConfig:
    """RoPE of all layers. LongChat's first releases have `rope_condense_ratio` for linear scaling."""
    parameters = dict(hf_config.rope_parameters)
    share = parameters.get("partial_rotary_factor")
    if share not in (None, 1.0) and hf_config.model_type not in ("phi3", *LINEAR):
        raise ValueError(f"partial_rotary_factor is {share!r}; it is not supported for {hf_config.model_type}")
    ratio = getattr(hf_config, "rope_condense_ratio", None) or 1
    if ratio != 1 and parameters["rope_type"] == "default":
        parameters |= {"rope_type": "linear", "factor": float(ratio)}
    return RopeConfig(head_dim, hf_config.max_position_embeddings, parameters)


def _positions(hf_config: PretrainedConfig, rope: RopeConfig) -> int:
    """How many positions the model takes: `max_sequence_length` if given, else factor * length before scaling.

    As transformers reads them, the length before scaling is `original_max_position_embeddings` or, without that field,
    `max_position_embeddings`. With that field, `max_position_embeddings` may be scaled already (DeepSeek) or not
    (Qwen3); the result is never less. For "llama3" and "longrope" it is always scaled already, and the factor is not a
    ratio of lengths.
    """
    length, parameters = rope.max_positions, rope.parameters
    if rope.type in ("default", "llama3", "longrope"):
        return length
    given = getattr(hf_config, "max_sequence_length", None)
    if given is not None:
        return given
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings") or length
    if factor is None:  # YaRN's is then max_position_embeddings / original
        return length
    if not isinstance(factor, (int, float)) or not factor >= 1:
        raise ValueError(f"factor: {factor!r}; rope_parameters in config.json must give a number of at least 1")
    return max(length, int(original * factor))


def _sliding_windows(hf_config: PretrainedConfig) -> tuple[int | None, ...] | None:
    """The window of each layer, read as transformers' own model classes do; None when no layer has one."""
    window, layers = getattr(hf_config, "sliding_window", None), hf_config.num_hidden_layers
    if window is None or _family(hf_config) in ("llama", *LINEAR):
        return None
    of_all = _family(hf_config) in ("mistral", "mixtral", "qwen3_moe", "phi3")
    types = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * layers
    _check_layer_types(hf_config, types, {"sliding_attention"} if of_all else {"sliding_attention", "full_attention"})
    windows = tuple(window if layer_type == "sliding_attention" else None for layer_type in types)
    return windows if any(one is not None for one in windows) else None


def _check_layer_types(hf_config: PretrainedConfig, types: Sequence[str], known: Set[str]) -> None:
    """Raise ValueError for layers of other types than these."""
    if unknown := set(types) - known:
        raise ValueError(f"layer_types has {', '.join(sorted(unknown))}, not supported for {hf_config.model_type}")
