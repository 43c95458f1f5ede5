"""TransformersModel against the model itself, for families that our decoder knows and others; what is refused."""

from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models import transformers_model
from longdraft.models.hf import load_through_transformers, load_transformers
from longdraft.models.passes import Pass
from longdraft.models.transformers_model import TransformersModel, attend, check_against

VOCAB = 97
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SCALED = dict(attention_multiplier=0.2, logits_scaling=8.0, embedding_multiplier=3.0, residual_multiplier=0.5)
# Each with the options in which it differs from a Llama.
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": SCALED,
    "stablelm": {},
    "gemma": {"head_dim": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "cohere": {"logit_scale": 1.0},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
}
# Families whose keys a draft's block can read: rotated over whole heads, first half with second.
ROTATE = {"llama", "qwen3", "mistral", "qwen3_moe", "olmo2", "olmo3", "granite", "gemma", "gemma3_text", "gpt_oss"}
OF_LAYERS = {"head_dim": 8, "hidden_size_per_layer_input": 8}  # the final norm is not the last module
REFUSED = {
    "mamba": ({"conv_kernel": 2, "state_size": 4}, "layers of linear_attention"),
    "gemma3n_text": (OF_LAYERS | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCAB}, "not a multiple"),
    "gemma4_text": (OF_LAYERS, "heads differ in number or width"),
    "deepseek_v3": ({}, "different widths"),
    "gemma2": ({"head_dim": 8}, "soft cap"),
    "phi": ({}, "not a multiple of its LM head"),
    "falcon": ({}, "layers that pass no keys"),
    "phimoe": ({"sliding_window": 6}, "sliding_window in its mask"),
    "qwen2_moe": ({"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, "sliding_window in its"),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "depends on the length"),
}  # fmt: skip
ALL = frozenset({"logits", "pre_norm", "post_norm", "last_kv", "queries"})
BORDERS, TOKENS = [0, 11, 12, 20], torch.arange(20)[None] * 31 % VOCAB
POSITIONS = torch.cat([torch.arange(11), torch.tensor([0]), torch.arange(8) + 40])[None]


def make(kind: str, **options):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | options)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(kind) -> a folder with a model of FAMILIES."""
    made = {}

    def save(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make(kind, **FAMILIES[kind]).save_pretrained(made[kind])
        return made[kind]

    return save


@pytest.mark.parametrize("kind", FAMILIES)
@torch.no_grad()
def test_packed_pieces_are_what_the_model_gives_for_each_alone(folder, kind):
    target, model = (
        load_through_transformers(folder(kind), torch.float32),
        load_transformers(folder(kind), torch.float32),
    )
    given = {"positions_BT": POSITIONS, "borders": BORDERS}
    output = target.model(Pass(TOKENS, needs=ALL, **given))
    assert output.pre_norm is not None and output.post_norm is not None
    torch.testing.assert_close(target.model.norm(output.pre_norm), output.post_norm, rtol=1e-6, atol=1e-6)
    for start, stop in pairwise(BORDERS):
        piece = slice(start, stop)
        alone = model(input_ids=TOKENS[:, piece], position_ids=POSITIONS[:, piece])
        layer = alone.past_key_values.layers[-1]
        torch.testing.assert_close(output.logits[:, piece], alone.logits, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(output.last_kv, (layer.keys, layer.values), strict=True):
            kept = theirs.shape[2]  # the cache of a window keeps the last ones
            torch.testing.assert_close(ours[:, piece][:, -kept:], theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert target.model.rotates == (kind in ROTATE)


def test_roundings_of_many_layers_in_bf16_are_not_taken_for_another_formula(tmp_path):
    make("qwen3", head_dim=16, num_hidden_layers=40).save_pretrained(tmp_path)
    assert load_through_transformers(tmp_path).fingerprint == load_through_transformers(tmp_path).fingerprint


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_served_is_named(kind):
    options, what = REFUSED[kind]
    with pytest.raises(ValueError, match=f"target.loader: .*{what}"):
        TransformersModel(make(kind, **options))


def test_a_checkpoint_that_lacks_weights_is_refused(folder, tmp_path):
    model = make("olmo2")
    weights = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"lacks weights.*model.layers.1.mlp.up_proj.weight"):
        load_through_transformers(tmp_path, torch.float32)


def test_attention_that_is_not_transformers_own_is_refused(folder, monkeypatch):
    target = load_through_transformers(folder("llama"), torch.float32)
    monkeypatch.setattr(transformers_model, "attend", lambda q, *others: attend(q * 1.1, *others))
    with pytest.raises(ValueError, match="differ from transformers' own"):
        check_against(target.model)


def test_a_prompt_of_several_passes_is_decoded_and_reused_by_the_next(folder):
    """The engine keeps such prompts, and asks the model whether its weights were written since."""
    target, params = load_through_transformers(folder("llama"), torch.float32), SamplingParams(max_new_tokens=8)
    prompts = [list(range(3, 33)), [*range(3, 25), 7, 8, 9]]
    alone = [Engine(target, prefill_chunk=8, keep_prompts=False).generate([one], params)[0].tokens for one in prompts]
    engine = Engine(target, prefill_chunk=8, slots=1)
    assert [engine.generate([one], params)[0].tokens for one in prompts] == alone
