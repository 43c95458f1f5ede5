"""What our configuration takes from a Hugging Face one, and what is refused."""

import json

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longdraft.models.decoder import Decoder
from longdraft.models.fingerprint import shape_hash
from longdraft.models.hf import read_target_config
from longdraft.models.hf_config import decoder_config


def test_longchat_condense_ratio_is_linear_scaling(sizes):
    """The first LongChat releases have `rope_condense_ratio`, the later ones linear `rope_scaling`."""
    old = decoder_config(LlamaConfig(**sizes, rope_condense_ratio=8))
    new = decoder_config(LlamaConfig(**sizes, rope_scaling={"type": "linear", "factor": 8.0}))
    assert old.rope.type == new.rope.type == "linear" and old.rope.parameters["factor"] == 8.0
    assert old.max_positions == new.max_positions == 512


SLIDING = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
LINEAR, YARN = {"type": "linear", "factor": 4.0}, {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("length", "scaling", "others", "positions"),
    [
        (4096, None, {}, 4096),
        (4096, None, {"max_sequence_length": 16384}, 4096),  # no scaling, so the field is ignored
        (4096, LINEAR, {"max_sequence_length": 16384}, 16384),
        (4096, LINEAR, {}, 16384),
        (2048, {"type": "linear", "factor": 2.5}, {}, 5120),
        (16384, LINEAR | {"original_max_position_embeddings": 4096}, {}, 16384),
        (4096, {"type": "dynamic", "factor": 2.0}, {}, 8192),
        (131072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, {}, 131072),
        (40960, YARN | {"original_max_position_embeddings": 32768}, {}, 131072),
        (32768, YARN, {}, 131072),  # then transformers also takes max_position_embeddings for the original length
        (131072, YARN | {"original_max_position_embeddings": 4096}, {}, 131072),
        (131072, LLAMA3 | {"original_max_position_embeddings": 8192}, {}, 131072),
        (131072, LONGROPE | {"original_max_position_embeddings": 4096}, {}, 131072),
    ],
)
def test_positions_are_what_the_scaling_gives(sizes, length, scaling, others, positions):
    shape = sizes | {"max_position_embeddings": length}
    config = decoder_config(LlamaConfig(**shape, rope_scaling=scaling, **others))
    assert config.max_positions == positions
    assert config.rope.max_positions == length  # the length that transformers computes the frequencies with


def test_sliding_windows_follow_the_family(sizes):
    assert decoder_config(MistralConfig(**sizes)).sliding_windows == (4096, 4096)
    # A window that holds every text is none, as in Phi-3-mini-128k: it would refuse partial caches.
    whole, longer = (decoder_config(MistralConfig(**sizes, sliding_window=64), length) for length in (None, 65))
    assert whole.windows == (None, None) and longer.windows == (64, 64) and shape_hash(whole) == shape_hash(longer)
    assert decoder_config(MistralConfig(**sizes, sliding_window=None)).sliding_windows is None
    assert decoder_config(Qwen2Config(**sizes)).sliding_windows is None
    assert decoder_config(Qwen2Config(**sizes, **SLIDING)).sliding_windows == (None, 32)


HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(("family", "fields", "message"), [
    (GPT2Config, {}, "gpt2.*supported: llama, mistral, qwen2, qwen3"),
    (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (LlamaConfig, {"rope_parameters": HALF}, r"partial_rotary_factor is 0\.5"),
    (LlamaConfig, {"rope_scaling": LINEAR, "max_sequence_length": "16k"}, "max_positions: '16k'"),
    (LlamaConfig, {"rope_scaling": LINEAR, "max_sequence_length": 0}, "max_positions: 0"),
    (LlamaConfig, {"rope_scaling": LINEAR | {"factor": 0.5}}, r"factor: 0\.5"),
    (LlamaConfig, {"rope_scaling": LINEAR | {"factor": float("nan")}}, "factor: nan"),
    (LlamaConfig, {"rope_scaling": LINEAR | {"factor": "four"}}, "factor: 'four'"),
    (MistralConfig, {"sliding_window": 0}, "sliding_windows"),
    (Qwen3Config, SLIDING | {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    # What no published Gemma says.
    (Gemma3TextConfig, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (Gemma3TextConfig, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (Gemma3TextConfig, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (Gemma3TextConfig, {"hidden_activation": "silu"}, "hidden_activation"),
    (Qwen3_5TextConfig, {"attn_output_gate": False}, "attn_output_gate is false"),
    (Qwen3_5TextConfig, {"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
    (Qwen3_5TextConfig, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has sliding_attention"),
    (Qwen3_5TextConfig, {"layer_types": ["full_attention", "linear_attention"]}, "the last layer must have attention"),
    (Qwen3_5TextConfig, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    *(
        (Qwen3_5TextConfig, {"head_dim": 126, "rope_parameters": HALF | {"partial_rotary_factor": share}},
         f"partial_rotary_factor: {share} rotates")
        for share in (0.0, 0.01, 0.3, 1.5)
    ),
], ids=str)  # fmt: skip
def test_what_is_not_supported_is_named(sizes, family, fields, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(family(**sizes | fields))


def test_fields_that_a_familys_class_does_not_read_change_nothing():
    """Qwen3-Coder's config.json has a shared expert of width 0, though Qwen3-MoE has none."""
    plain, given = Qwen3MoeConfig(), Qwen3MoeConfig(shared_expert_intermediate_size=0)
    assert decoder_config(given) == decoder_config(plain)
    others = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False}
    assert decoder_config(Qwen3_5MoeTextConfig(**others)) == decoder_config(Qwen3_5MoeTextConfig())


@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_models_configuration_says_whether_embeddings_are_tied(tied):
    config = Qwen3_5Config(text_config={"tie_word_embeddings": not tied}, tie_word_embeddings=tied)
    assert decoder_config(config).tie_embeddings == tied


# Fields of the text models in the published configurations; of all other fields transformers' defaults stand there.
DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072}
WIDE = DENSE | {"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40}
GROWING = {
    "rope_type": "yarn", "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
TO_256K = GROWING | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
TO_384K = GROWING | {"rope_theta": 1e8, "factor": 48.0, "original_max_position_embeddings": 8192}
MISTRAL = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
QWEN = {
    "num_hidden_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
# By name: config.json, positions, whether the LM head is tied, billions of parameters, growth of the queries.
PUBLISHED = {
    "Mistral-Small-3.2-24B-Instruct-2506": (MISTRAL | {"text_config": WIDE | {
        "model_type": "mistral", "max_position_embeddings": 131072, "rope_theta": 1e9, "sliding_window": None,
    }}, 131072, False, 23.57, None),
    "Devstral-Small-2-24B-Instruct-2512": (MISTRAL | {"text_config": WIDE | {
        "model_type": "ministral3", "max_position_embeddings": 393216, "rope_parameters": TO_384K,
    }}, 393216, False, 23.57, (0.1, 8192)),
    "Ministral-3-3B-Instruct-2512": (MISTRAL | {"text_config": DENSE | {
        "model_type": "ministral3", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26,
        "max_position_embeddings": 262144, "tie_word_embeddings": True, "rope_parameters": TO_256K,
    }}, 262144, True, 3.43, (0.1, 16384)),
    "Qwen2.5-VL-3B-Instruct": (QWEN | {  # whose text has no configuration of its own
        "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
        "num_key_value_heads": 2, "max_position_embeddings": 128000, "sliding_window": 32768,
        "tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }, 128000, True, 3.086, None),
    "Qwen3-VL-8B-Instruct": ({  # whose text says nothing of the LM head
        "model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": QWEN | {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    }, 262144, False, 8.191, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_that_read_images_are_read_as_published(tmp_path, name):
    """The parameters that the model cards count, without the encoder of images."""
    whole, positions, tied, billions, growth = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_target_config(tmp_path)
    assert (config.max_positions, config.tie_embeddings, config.rope.query_growth) == (positions, tied, growth)
    assert config.sliding_windows is None and config.rope.type == ("yarn" if growth else "default")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.005)
