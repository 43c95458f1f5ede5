"""What our configuration takes from a Hugging Face one, and what is refused."""

import json

import pytest
import torch
from transformers import (
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


def test_unknown_layer_types_are_refused(sizes):
    config = Qwen3Config(**sizes)
    config.sliding_window, config.layer_types = 8, ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="chunked_attention"):
        decoder_config(config)
    with pytest.raises(ValueError, match="gpt2"):
        decoder_config(GPT2Config())


def test_longchat_condense_ratio_is_linear_scaling(sizes):
    """The first LongChat releases have `rope_condense_ratio`, the later ones linear `rope_scaling`."""
    old = decoder_config(LlamaConfig(**sizes, rope_condense_ratio=8))
    new = decoder_config(LlamaConfig(**sizes, rope_scaling={"type": "linear", "factor": 8.0}))
    assert old.rope.type == new.rope.type == "linear" and old.rope.parameters["factor"] == 8.0
    assert old.max_positions == new.max_positions == 512


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_sequence_length": "16k"}, "max_positions: '16k'"),
        ({"max_sequence_length": 0}, "max_positions: 0"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor: 0.5"),
        ({"rope_scaling": LINEAR | {"factor": float("nan")}}, "factor: nan"),
        ({"rope_scaling": LINEAR | {"factor": "four"}}, "factor: 'four'"),
    ],
)
def test_a_scaling_without_a_number_is_refused(sizes, values, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(LlamaConfig(**sizes | {"rope_scaling": LINEAR} | values))


def test_sliding_windows_follow_the_family(sizes):
    assert decoder_config(MistralConfig(**sizes)).sliding_windows == (4096, 4096)
    # A window that holds every text is none, as in Phi-3-mini-128k: it would refuse partial caches.
    whole, longer = (decoder_config(MistralConfig(**sizes, sliding_window=64), length) for length in (None, 65))
    assert whole.windows == (None, None) and longer.windows == (64, 64) and shape_hash(whole) == shape_hash(longer)
    assert decoder_config(MistralConfig(**sizes, sliding_window=None)).sliding_windows is None
    with pytest.raises(ValueError, match="sliding_windows"):
        decoder_config(MistralConfig(**sizes, sliding_window=0))
    assert decoder_config(Qwen2Config(**sizes)).sliding_windows is None
    used = Qwen2Config(**sizes, use_sliding_window=True, sliding_window=32, max_window_layers=1)
    assert decoder_config(used).sliding_windows == (None, 32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attn_output_gate", False, "attn_output_gate is false"),
        ("output_gate_type", "sigmoid", "output_gate_type is 'sigmoid'"),
        ("layer_types", ["sliding_attention", "full_attention"] * 16, "layer_types has sliding_attention"),
        ("layer_types", ["full_attention", "linear_attention"] * 16, "the last layer must have attention"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_options_of_hybrids_that_change_the_result_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        decoder_config(Qwen3_5TextConfig(**{field: value}))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.5])
def test_a_share_of_rope_that_is_no_even_number_is_refused(share):
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": share}
    config = Qwen3_5TextConfig(rope_parameters=rope, head_dim=126)
    with pytest.raises(ValueError, match=f"partial_rotary_factor: {share} rotates"):
        decoder_config(config)


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
YARN = {
    "rope_type": "yarn", "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
TO_256K = YARN | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
TO_384K = YARN | {"rope_theta": 1e8, "factor": 48.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(("fields", "positions", "billions", "growth"), [
    (WIDE | {"model_type": "mistral", "max_position_embeddings": 131072, "rope_theta": 1e9, "sliding_window": None},
     131072, 23.57, None),  # Mistral-Small-3.2-24B-Instruct-2506
    (WIDE | {"model_type": "ministral3", "max_position_embeddings": 393216, "rope_parameters": TO_384K},
     393216, 23.57, (0.1, 8192)),  # Devstral-Small-2-24B-Instruct-2512
    (DENSE | {"model_type": "ministral3", "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26,
              "max_position_embeddings": 262144, "tie_word_embeddings": True, "rope_parameters": TO_256K},
     262144, 3.43, (0.1, 16384)),  # Ministral-3-3B-Instruct-2512
], ids=["mistral-small-3.2", "devstral-small-2", "ministral-3-3b"])  # fmt: skip
def test_mistrals_that_read_images_are_read_as_published(tmp_path, fields, positions, billions, growth):
    """The parameters that the model cards count, without the encoder of images."""
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": fields}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_target_config(tmp_path)
    assert config.max_positions == positions and config.rope.query_growth == growth
    assert config.tie_embeddings == fields.get("tie_word_embeddings", False)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.005)


QWEN = {
    "num_hidden_layers": 36, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(("whole", "tied", "billions"), [
    (QWEN | {  # Qwen2.5-VL-3B-Instruct, whose text has no configuration of its own
        "model_type": "qwen2_5_vl", "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
        "num_key_value_heads": 2, "max_position_embeddings": 128000, "sliding_window": 32768,
        "tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }, True, 3.086),
    ({  # Qwen3-VL-8B-Instruct, whose text says nothing of the LM head
        "model_type": "qwen3_vl", "tie_word_embeddings": False, "text_config": QWEN | {
            "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    }, False, 8.191),
], ids=["qwen2.5-vl-3b", "qwen3-vl-8b"])  # fmt: skip
def test_qwens_that_read_images_are_read_as_published(tmp_path, whole, tied, billions):
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = read_target_config(tmp_path)
    assert config.tie_embeddings == tied and config.sliding_windows is None and config.rope.type == "default"
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(config).parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.005)
