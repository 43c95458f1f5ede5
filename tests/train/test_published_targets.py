"""Recipes with their target's published config.json, made small, one for each form of target: it takes a step, is
exported, and decodes beyond the length before scaling. What every recipe estimates: test_recipes.py.

The fields in published_targets.json are looked up, each with its source. All but the sizes are kept: RoPE with its
scaling, positions, ties, biases and the ratio of query heads to key and value heads.
"""

import json
from math import gcd
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from longdraft.infer.sampling import SamplingParams
from longdraft.launch import arguments, cli
from longdraft.launch.runtime import Drafting
from longdraft.models.hf import load_transformers, read_target_config
from longdraft.train.config_file import load_stages

VOCAB, HEAD_DIM, NEW = 97, 8, 6
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PUBLISHED = json.loads(Path(__file__).with_name("published_targets.json").read_text())
# By recipe; of one target, whose config.json may say two things, with the other one.
CASES = {
    "longspec/vicuna-7b": {}, "longspec/longchat-7b": {"max_position_embeddings": 32768}, "longspec/llama3.1-8b": {},
    "longspec/qwq-32b": {}, "longspec/qwen3-30b-a3b": {}, "longspec/gemma-3-12b": {},
    "tokenswift/yarn-llama2-7b-128k": {}, "tokenswift/qwen2.5-7b": {}, "tokenswift/qwen3-8b": {},
    "tokenswift/gpt-oss-20b": {}, "longspec/qwen3.5-9b": {}, "longspec/devstral-small-2-24b": {},
}  # fmt: skip
# The recipes' own fields, apart from sizes.
FEW = [
    "data.seq_len=24", "train.steps=1", "train.global_batch=2", "train.micro_batch=1", "optimizer.warmup_steps=0",
    "heldout.rows=1", "heldout.choices=4", "log.wandb=disabled",
]  # fmt: skip
BLOCK = ["draft.window=8"]


def shrunken(published: dict) -> dict:
    """The same fields for a model of 2 layers, with few experts where it has any, in plain bf16."""
    if "text_config" in published:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 16} if "depth" in published["vision_config"] else {}
        sizes = {"text_config": shrunken(published["text_config"]), "image_token_index": VOCAB - 1}
        return published | sizes | {"vision_config": published["vision_config"] | vision}
    published = {key: value for key, value in published.items() if key != "quantization_config"}
    heads, kv_heads = published["num_attention_heads"], published["num_key_value_heads"]
    shared = gcd(heads, kv_heads)
    heads, kv_heads = (2, 2) if heads == kv_heads else (heads // shared, kv_heads // shared)
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * HEAD_DIM}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": VOCAB}
    others = {
        "head_dim": HEAD_DIM, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "query_pre_attn_scalar": HEAD_DIM, "sliding_window_pattern": 2,
        "layer_types": published.get("layer_types", [])[-2:],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    }  # fmt: skip
    return published | sizes | {key: value for key, value in others.items() if key in published}


@pytest.fixture
def target(request, tmp_path) -> Path:
    """A folder with such a config.json, in its published form, and weights."""
    folder = tmp_path / "target"
    folder.mkdir()
    config = json.dumps(shrunken(PUBLISHED[request.param]["config"] | CASES[request.param]))
    (folder / "config.json").write_text(config)
    torch.manual_seed(1)
    whole, network = AutoConfig.from_pretrained(folder), AutoModelForCausalLM
    if whole.model_type == "mistral3":  # no class for its text alone; the default of the whole is not the text's
        whole.tie_word_embeddings, network = False, AutoModelForImageTextToText
    model = network.from_config(whole, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # logits far apart
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)  # transformers would write it in another form
    return folder


def test_there_is_one_for_every_recipe_of_a_published_target():
    recipes = {f"{path.parent.name}/{path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "data"}
    assert {name for name in recipes if "smollm2" not in name} == set(PUBLISHED) and len(PUBLISHED) == 22
    for name, entry in PUBLISHED.items():
        (path,) = {stage.config.target.path for stage in load_stages(CONFIGS / f"{name}.yaml")}
        assert entry["source"] == f"https://huggingface.co/{path}/blob/main/config.json" and entry["found"]


@pytest.mark.parametrize(("name", "target"), [(name, name) for name in CASES], indirect=["target"])
def test_from_the_recipe_to_decoding(name, target, data_folder, train_command, tmp_path, capsys):
    recipe = CONFIGS / f"{name}.yaml"
    allowed = load_stages(recipe)[0].config.target.max_positions
    config = read_target_config(target, max_positions=allowed)

    places = [f"target.path={target}", f"data.path={data_folder}", f"train.run_dir={tmp_path / 'run'}"]
    block = BLOCK if recipe.parent.name == "longspec" else []
    status, printed = train_command(recipe, *places, *FEW, *block)
    assert status == 0, printed
    if block:
        run, draft = tmp_path / "run" / "3-sft", tmp_path / "run" / "3-sft" / "draft"
    else:
        run, draft = tmp_path / "run", tmp_path / "draft"
        assert cli.main(["export", str(run), "--out", str(draft)]) == 0
    assert (draft / "model.safetensors").is_file()

    # Serving needs no further options.
    options = ["--draft", str(draft), "--dtype", "fp32", "--device", "cpu"]
    asked = Drafting(arguments.generate().parse_args(options))
    opened = asked.open_target()
    assert opened.model.config == config
    said = f", with {allowed} positions, as in its draft's training" if allowed else ""
    assert f"in fp32 on cpu{said}\n" in capsys.readouterr().err
    published = PUBLISHED[name]["config"]
    scaling = published.get("rope_scaling") or published.get("text_config", {}).get("rope_parameters") or {}
    before = scaling.get("original_max_position_embeddings", config.rope.max_positions if scaling else 2048)
    prompt = torch.randint(VOCAB, (min(before, 8192) + 2,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    (engine,) = asked.open_engines(opened).values()
    (found,) = engine.generate([prompt], params)
    # Compare with transformers' own model of this folder, at the place where each token was chosen.
    theirs = load_transformers(target, torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + found.tokens]), logits_to_keep=NEW + 1).logits
    assert len(found.tokens) == NEW and logits[0, :-1].argmax(-1).tolist() == found.tokens
