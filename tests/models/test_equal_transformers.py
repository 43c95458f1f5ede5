"""Our decoder against transformers': every family and RoPE type, in fp32, loaded from what transformers saved.

Tolerance: 1e-5 of the tensor's largest magnitude.
"""

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CwmConfig,
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longdraft.models.decoder import Decoder
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import load_target, load_through_transformers, refresh, target_from_transformers
from longdraft.models.hf_config import decoder_config
from longdraft.models.hf_weights import places
from longdraft.models.passes import Pass
from longdraft.models.rope import ROPE_TYPES, RopeConfig

SHAPE = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.25,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
}  # fmt: skip
# Ministral 3's as published, except for the lengths and twice the growth.
GROWING = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.2}
GEMMA_ROPES = {"full_attention": ROPES["linear"], "sliding_attention": ROPES["default"]}
GPT_OSS = SHAPE | {"sliding_window": 7, "rope_parameters": {  # as published, except for the lengths
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
}}  # fmt: skip
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
LINEAR = SHAPE | {
    "initializer_range": 0.05,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "rope_parameters": PARTIAL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 12,
}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 20}
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
FAMILIES = {
    "llama-mha": LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama-gqa-tied": LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "llama-biases-wide-heads": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, head_dim=12),
    "mistral": MistralConfig(**SHAPE, sliding_window=None, head_dim=16),
    "mistral-sliding": MistralConfig(**SHAPE, sliding_window=7),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-sliding": Qwen2Config(**SHAPE, **SLIDING),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3-bias-tied-sliding": Qwen3Config(
        **SHAPE | {"tie_word_embeddings": True}, head_dim=16, attention_bias=True, **SLIDING
    ),
} | {f"llama-{name}": LlamaConfig(**SHAPE, rope_parameters=dict(rope)) for name, rope in ROPES.items()}
FAMILIES |= {
    "qwen3-yarn": Qwen3Config(**SHAPE, head_dim=8, rope_parameters=dict(ROPES["yarn"])),
    "qwen2-dynamic": Qwen2Config(**SHAPE, rope_parameters=dict(ROPES["dynamic"])),
    "ministral3": Ministral3Config(**SHAPE, head_dim=16, rope_parameters=GROWING),
    "seed-oss": SeedOssConfig(**SHAPE, head_dim=16),
    "seed-oss-all-biases": SeedOssConfig(**SHAPE, head_dim=8, attention_out_bias=True, mlp_bias=True),
    "cwm": CwmConfig(**SHAPE, head_dim=8, sliding_window=7, rope_parameters=dict(ROPES["llama3"])),
    "phi3": Phi3Config(**SHAPE),
    "phi3-longrope-sliding": Phi3Config(
        **SHAPE | {"num_key_value_heads": 6}, rope_parameters=dict(ROPES["longrope"]), sliding_window=7,
        original_max_position_embeddings=40,
    ),
    "phi3-partial-longrope": Phi3Config(
        **SHAPE | {"num_key_value_heads": 6}, original_max_position_embeddings=40,
        rope_parameters=ROPES["longrope"] | {
            "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0],
        },
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2),
    "mixtral-sliding": MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=3, sliding_window=7),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-some-layers": Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[0], attention_bias=True),
    "gemma3": Gemma3TextConfig(
        **SHAPE | {"tie_word_embeddings": True}, head_dim=16, query_pre_attn_scalar=24, sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], rope_parameters=GEMMA_ROPES,
    ),
    "gemma3-last-slides": Gemma3TextConfig(
        **SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attention_bias=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=GEMMA_ROPES,
    ),
    "gpt-oss": GptOssConfig(**GPT_OSS, head_dim=16, num_local_experts=5, num_experts_per_tok=2),
    "gpt-oss-full": GptOssConfig(
        **GPT_OSS, head_dim=8, num_local_experts=4, num_experts_per_tok=4, layer_types=["full_attention"] * 3,
        swiglu_limit=0.5,
    ),
    "qwen3-moe-every-other": Qwen3MoeConfig(**SHAPE, **EXPERTS, decoder_sparse_step=2),
    "qwen3.5": Qwen3_5TextConfig(**LINEAR),
    "qwen3.5-tied-yarn": Qwen3_5TextConfig(
        **LINEAR | {"tie_word_embeddings": True, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
        | {"rope_parameters": PARTIAL | ROPES["yarn"]},
        attention_bias=True,
    ),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**{k: v for k, v in LINEAR.items() if k != "intermediate_size"}, **SHARED),
    "qwen3-next": Qwen3NextConfig(**LINEAR, **SHARED, mlp_only_layers=[1], norm_topk_prob=False),
}  # fmt: skip


def theirs_of(config, **save) -> AutoModelForCausalLM:
    """A transformers model with random weights, norms and biases away from their trivial values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            parameter.data.normal_(0.0, 0.25)
        if name.endswith("A_log"):  # outputs near zero, which their norm would magnify, are rare where memory lasts
            parameter.data.normal_(-3.0, 1.0)
        if name.endswith("sinks"):
            parameter.data.normal_(1.0, 1.0)
        if "norm" in name or name.endswith("bias"):
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def saved(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def tokens(rows: int, columns: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def pair(request, tmp_path):
    theirs = theirs_of(FAMILIES[request.param])
    return request.param, theirs, load_target(saved(theirs, tmp_path), dtype=torch.float32).model


def capture_pre_norm(theirs) -> list[Tensor]:
    """Captures the input of transformers' final norm; its own hidden_states end with the normed ones."""
    seen: list[Tensor] = []
    theirs.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("length", [13, 100])  # 100 is beyond every original length here
def test_one_forward(pair, length, error):
    _, theirs, ours = pair
    pre_norm = capture_pre_norm(theirs)
    ids = tokens(2, length)
    cache = DynamicCache(config=theirs.config)
    expected = theirs(ids, past_key_values=cache, output_hidden_states=True)
    everything = frozenset({"logits", "pre_norm", "post_norm", "last_kv"})
    with_cache = load_cache(ours, ids)
    for out in (ours(Pass(ids, needs=everything)), ours(Pass(ids, cache=with_cache, needs=everything))):
        assert error(out.logits, expected.logits) < 1e-5
        assert error(out.pre_norm, pre_norm[0]) < 1e-5
        assert error(out.post_norm, expected.hidden_states[-1]) < 1e-5
        keys, values = (x.transpose(1, 2) for x in out.last_kv)
        stored = cache.layers[-1]
        seen = stored.keys.shape[2]  # transformers keeps only the window's last rows of a sliding layer
        assert error(keys[:, :, -seen:], in_our_order(ours, stored.keys)) < 1e-5
        assert error(values[:, :, -seen:], stored.values) < 1e-5
    for i, layer in enumerate(layer for layer in cache.layers if hasattr(layer, "keys")):
        seen = layer.keys.shape[2]
        kept = with_cache.keys[i, :, length - seen : length].transpose(1, 2)
        assert error(kept, in_our_order(ours, layer.keys)) < 1e-5
        assert error(with_cache.values[i, :, length - seen : length].transpose(1, 2), layer.values) < 1e-5


def in_our_order(ours, keys: Tensor) -> Tensor:
    """Keys of transformers as ours have them: where RoPE rotates a part of a head, each half of ours has half of it."""
    rotated = ours.config.rope.rotated
    still = (keys.shape[-1] - rotated) // 2
    first, second, *others = keys.split([rotated // 2, rotated // 2, still, still], -1)
    return torch.cat([first, others[0], second, others[1]], -1)


def load_cache(ours, ids: Tensor):
    cache = ours.new_cache(len(ids), ids.shape[1] + 8)
    cache.reset(prompt_lengths=[ids.shape[1]] * len(ids))
    return cache


@torch.no_grad()
def test_token_by_token(pair, error):
    """A prompt in one pass, then one token per pass across the original lengths (16, 40, 64), and pieces between them.

    In fp32 transformers rounds as much as we do (Mixtral: 1e-5, ours 7e-6), so on some processors only its fp64 is as
    near as 1e-5; where tables of RoPE are fp32 by definition (longrope), only its fp32 is."""
    _, theirs, ours = pair
    references = theirs, copy.deepcopy(theirs).double()
    references[1].config._experts_implementation = "eager"  # grouped products have no fp64
    sizes = [11, *[1] * 7, 20, *[1] * 5, 19, *[1] * 6]
    ids, length = tokens(1, sum(sizes)), sum(sizes)
    caches, ours_cache = [DynamicCache(config=theirs.config) for _ in references], ours.new_cache(1, length)
    ours_cache.reset(prompt_lengths=sizes[:1])
    for piece in ids.split(sizes, 1):
        expected = [one(piece, past_key_values=cache).logits for one, cache in zip(references, caches, strict=True)]
        out = ours(Pass(piece, cache=ours_cache)).logits
        ours_cache.commit(None, torch.tensor([piece.shape[1]]))
        errors = [error(out.to(logits.dtype), logits) for logits in expected]
        assert min(errors) < 1e-5 and max(errors) < 2e-5, f"at length {int(ours_cache.lengths[0])}"
    theirs_keys = caches[0].layers[-1].keys
    seen = theirs_keys.shape[2]
    assert error(ours_cache.keys[-1, :, length - seen :].transpose(1, 2), in_our_order(ours, theirs_keys)) < 1e-5
    for i, layer in enumerate(layer for layer in caches[0].layers if not hasattr(layer, "keys")):
        assert error(ours_cache.delta.memory[i], layer.recurrent_states[0]) < 1e-5
        assert error(ours_cache.delta.inputs[i].mT, layer.conv_states[0][:, :, -3:]) < 1e-5


@torch.no_grad()
def test_anchor_offset_positions_keep_the_sinks(tmp_path, error):
    """Positions with a jump (LongSpec) leave every earlier row visible. transformers takes such a jump for the border
    of a packed sequence, unless it is given an explicit causal mask."""
    theirs = theirs_of(FAMILIES["llama-default"])
    ours = load_target(saved(theirs, tmp_path), dtype=torch.float32).model
    ids, length, sinks = tokens(2, 30), 30, 4
    jumps = [torch.cat((torch.arange(sinks), torch.arange(sinks, length) + offset)) for offset in (0, 17)]
    positions = torch.stack(jumps)
    minus_infinity = torch.full((length, length), float("-inf")).triu(1)
    mask = minus_infinity.expand(2, 1, length, length)
    expected = theirs(ids, position_ids=positions, attention_mask=mask).logits
    assert error(ours(Pass(ids, positions_BT=positions)).logits, expected) < 1e-5
    cut = theirs(ids[1:], position_ids=positions[1:], use_cache=False).logits
    assert error(cut[0], expected[1]) > 1e-2, "transformers keeps the sinks by itself now: simplify this test"
    cache = load_cache(ours, ids)
    assert error(ours(Pass(ids, positions_BT=positions, cache=cache)).logits, expected) < 1e-5


def test_hybrids_have_as_many_weights_as_published():
    """Qwen3-Next-80B-A3B's checkpoint to the last one, without the layer that proposes tokens."""
    with torch.device("meta"):
        published = Decoder(decoder_config(Qwen3NextConfig()))
    assert sum(weight.numel() for weight in published.parameters()) == 79_674_391_296


def test_rope_types_are_those_of_transformers():
    """A RoPE type that transformers adds shows up here, to be supported or refused by name."""
    known = set(ROPE_INIT_FUNCTIONS) | {"default"}
    assert set(ROPES) == set(ROPE_TYPES) <= known
    for name in known - set(ROPE_TYPES):
        with pytest.raises(ValueError, match=name):
            RopeConfig(8, 64, {"rope_type": name, "rope_theta": 10000.0})


VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
OF_PARTS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
# Those that read images: the class, its configuration, its text model's; and whether the LM head is tied.
READERS = {
    "gemma3": (
        Gemma3ForConditionalGeneration, Gemma3Config,
        FAMILIES["gemma3"].to_dict() | {"model_type": "gemma3_text"}, VISION | {"image_size": 28}, True,
    ),
    "mistral-small": (
        Mistral3ForConditionalGeneration, Mistral3Config, FAMILIES["mistral"].to_dict(),
        VISION | {"model_type": "pixtral", "head_dim": 8}, False,
    ),
    "ministral3-tied": (
        Mistral3ForConditionalGeneration, Mistral3Config,
        FAMILIES["ministral3"].to_dict() | {"tie_word_embeddings": True},
        VISION | {"model_type": "pixtral", "head_dim": 8}, True,
    ),
    "qwen2.5-vl": (
        Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, SHAPE | {"rope_parameters": OF_PARTS}, QWEN_VISION, False,
    ),
    "qwen3-vl-tied": (
        Qwen3VLForConditionalGeneration, Qwen3VLConfig, SHAPE | {"head_dim": 8, "rope_parameters": OF_PARTS},
        QWEN_VISION | {"deepstack_visual_indexes": [0]}, True,
    ),
    "qwen3-vl-moe": (
        Qwen3VLMoeForConditionalGeneration, Qwen3VLMoeConfig,
        SHAPE | EXPERTS | {"moe_intermediate_size": 20, "head_dim": 8, "rope_parameters": OF_PARTS},
        QWEN_VISION | {"deepstack_visual_indexes": [0]}, False,
    ),
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", READERS)
def test_a_model_that_reads_images_too_is_its_text(tmp_path, error, name):
    """As transformers saves it, by the names of its modules, by those of old checkpoints, as it is in memory, and by
    transformers' own class."""
    network, config_of, text, vision, tied = READERS[name]
    torch.manual_seed(0)
    # Mistral's whole configuration says true for every model.
    whole_tied = tied or config_of is Mistral3Config
    theirs = network(config_of(text_config=text, vision_config=vision, tie_word_embeddings=tied)).eval()
    theirs.config.tie_word_embeddings = whole_tied
    folder, ids = saved(theirs, tmp_path / "saved"), tokens(2, 20)
    expected = theirs(ids).logits
    modules = {key: x.clone() for key, x in theirs.state_dict().items() if not (tied and key == "lm_head.weight")}
    assert "model.language_model.norm.weight" in modules and any("vis" in key for key in modules)
    old = {  # experts as in Qwen3-VL's published files
        key.replace("model.language_model.", "language_model.model.").removeprefix("model."): (
            x.mT.contiguous() if ".experts." in key else x
        )
        for key, x in modules.items()
    }
    for kind, tensors in (("modules", modules), ("old", old)):
        shutil.copytree(folder, tmp_path / kind)
        save_file(tensors, tmp_path / kind / "model.safetensors", {"format": "pt"})
    targets = [load_target(tmp_path / kind, dtype=torch.float32) for kind in ("saved", "modules", "old")]
    through = load_through_transformers(folder, torch.float32)
    assert error(through.model(Pass(ids)).logits, expected) < 1e-5
    assert through.fingerprint["config"] == targets[0].fingerprint["config"]
    target = target_from_transformers(theirs)
    for parameter in theirs.model.language_model.parameters():
        parameter.add_(0.01)
    refresh(target, theirs)
    assert error(target.model(Pass(ids)).logits, theirs(ids).logits) < 1e-5
    for loaded in targets:
        assert error(loaded.model(Pass(ids)).logits, expected) < 1e-5
        assert weights_hash(loaded.model) == weights_hash(targets[0].model)
        assert loaded.model.config.tie_embeddings == tied


def test_longspec_reads_keys_of_the_last_layers_rope():
    for name, base in (("gemma3", 10000.0), ("gemma3-last-slides", 5000.0)):
        assert LongSpecConfig.for_target(decoder_config(FAMILIES[name])).rope["rope_theta"] == base


def test_a_shared_parameter_is_gathered_once(tmp_path):
    """Under ZeRO-3, entering `whole` gathers a parameter from all ranks, and all experts of a layer share one."""
    folder = saved(theirs_of(FAMILIES["qwen3-moe"]), tmp_path)
    gathered: list[nn.Parameter] = []

    @contextmanager
    def whole(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        gathered.append(parameter)
        yield parameter

    ours = load_target(folder, dtype=torch.float32, whole=whole).model
    assert len(gathered) == len(list(ours.parameters())) < len(places(ours.config))
    one_by_one = load_target(folder, dtype=torch.float32).model
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), one_by_one.parameters(), strict=True))


@pytest.mark.parametrize(
    "name",
    ["layers.0.linear_attn.in_proj_qkvz", "layers.0.linear_attn.in_proj_ba", "layers.1.self_attn.q_proj"],
)
def test_a_tensor_that_cannot_be_cut_is_named(tmp_path, name):
    file = saved(theirs_of(FAMILIES["qwen3-next"]), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.{name}.weight"] = (cut := tensors[f"model.{name}.weight"][:-1]).clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.{name}\.weight has shape \[{len(cut)}, 48\]"):
        load_target(tmp_path)
