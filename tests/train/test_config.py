"""The config: every file of configs/ loads and makes a valid DeepSpeed dict; every mistake has a message that helps."""

from pathlib import Path

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from longdraft.train.config import accumulation, config_from_dict, deepspeed_dict, load_config, to_dict, to_yaml
from longdraft.train.state import check_same_run

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOKENSWIFT = sorted((CONFIGS / "tokenswift").glob("*.yaml"))


@pytest.mark.parametrize("path", [CONFIGS / "quickstart.yaml", *TOKENSWIFT], ids=lambda path: path.stem)
def test_every_file_loads_and_makes_a_valid_deepspeed_dict(path):
    config = load_config(path)
    derived = DeepSpeedConfig(deepspeed_dict(config, world_size=1))
    assert derived.train_batch_size == config.train.global_batch
    assert derived.zero_optimization_stage == config.train.zero_stage
    assert derived.bfloat16_config.enabled == (config.train.precision == "bf16")
    assert derived.gradient_clipping == config.optimizer.clip


@pytest.mark.parametrize("path", TOKENSWIFT, ids=lambda path: path.stem)
def test_table_9(path):
    config = load_config(path)
    train, optimizer = config.train, config.optimizer
    assert (train.global_batch, train.micro_batch, accumulation(config, 4), train.steps) == (120, 3, 10, 200)
    assert (optimizer.peak_lr, optimizer.warmup_steps, optimizer.betas) == (5e-3, 50, (0.9, 0.999))
    assert (optimizer.weight_decay, optimizer.clip, train.precision) == (0.1, 1.0, "bf16")
    assert (config.data.seq_len, config.draft.n_heads, config.draft.kind) == (8192, 3, "linear_chain")
    assert (config.draft.init_std, config.draft.out_norm_init) == (0.02, "ones")


def test_there_is_one_file_for_each_target_of_the_paper():
    names = {path.stem for path in TOKENSWIFT}
    assert names == {"llama3.1-8b", "yarn-llama2-7b-128k", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b"}


def test_deepspeed_dict_is_derived(config_file):
    config = load_config(config_file, ["train.zero_stage=3", "train.precision=bf16", "optimizer.clip=0.5"])
    derived = deepspeed_dict(config, world_size=2)
    assert derived["train_batch_size"] == 8 and derived["train_micro_batch_size_per_gpu"] == 2
    assert derived["gradient_accumulation_steps"] == 2 and derived["zero_optimization"] == {"stage": 3}
    assert derived["bf16"] == {"enabled": True} and derived["gradient_clipping"] == 0.5


def test_overrides_and_round_trips(config_file, tmp_path):
    config = load_config(config_file, ["train.steps=7", "optimizer.betas=[0.9, 0.95]", "target.gguf_file=a.gguf"])
    assert (config.train.steps, config.optimizer.betas, config.target.gguf_file) == (7, (0.9, 0.95), "a.gguf")
    assert load_config(config_file, ["optimizer.peak_lr=1e-3"]).optimizer.peak_lr == 1e-3  # text to YAML 1.1
    assert config_from_dict(to_dict(config)) == config
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "again.yaml") == config


MISTAKES = {
    "train.stepz=3": r"train\.stepz: unknown key; did you mean train\.steps\?",
    "trian.steps=3": r"trian: unknown key; did you mean train\?",
    "optimizer.lr=1": r"optimizer\.lr: unknown key; did you mean optimizer\.\w+\? \(known: peak_lr",
    "train.steps=many": r"train\.steps: expected int, got 'many'",
    "train.steps=1.5": r"train\.steps: expected int, got 1\.5",
    "train.steps=true": r"train\.steps: expected int, got True",
    "train.deterministic=1": r"train\.deterministic: expected bool, got 1",
    "target.path=3": r"target\.path: expected str, got 3",
    "optimizer.peak_lr=fast": r"optimizer\.peak_lr: expected float, got 'fast'",
    "optimizer.betas=[0.9]": r"optimizer\.betas: expected a list of 2 values",
    "train=3": r"train: expected a section of fields, got 3",
    "train.steps": r"override: 'train\.steps' has not the form section\.field=value",
    "--steps=3": r"override: '--steps=3' has not the form",
    "train.precision=fp16": r"train\.precision: 'fp16' is unknown; choose one of fp32, bf16",
    "train.zero_stage=0": r"train\.zero_stage: 0 is unknown; choose one of 1, 2, 3",
    "train.steps=0": r"train\.steps: 0 is not positive; give a value above 0",
    "train.seed=-1": r"train\.seed: -1 is out of range",
    "optimizer.warmup_steps=20": r"optimizer\.warmup_steps: 20 must be at least 0 and below train\.steps = 20",
    "optimizer.weight_decay=-1": r"optimizer\.weight_decay: -1\.0 is negative",
    "optimizer.betas=[0.9,1.0]": r"optimizer\.betas: \[0\.9, 1\.0\] must lie in \[0, 1\)",
    "draft.kind=relu_chain": r"draft\.kind: 'relu_chain' is unknown; choose one of linear_chain, silu_chain",
    "draft.kind=silu_chain": r"draft\.out_norm_init: silu_chain has no norms",
    "draft.method=eagle": r"draft\.method: 'eagle' is unknown; choose one of tokenswift",
    "draft.n_heads=0": r"draft\.n_heads: 0",
    "draft.n_heads=23": r"data\.seq_len: 24 tokens leave no label for draft\.n_heads = 23",
    "log.wandb=on-line": r"log\.wandb: 'on-line' is unknown; choose one of auto, online, offline, disabled",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_are_named(config_file, override):
    with pytest.raises(ValueError, match=MISTAKES[override]):
        load_config(config_file, [override])


def test_missing_things_are_named(config_file, tmp_path):
    with pytest.raises(ValueError, match=r"config: no file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    text = config_file.read_text()
    (tmp_path / "a.yaml").write_text("\n".join(line for line in text.splitlines() if not line.startswith("data:")))
    with pytest.raises(ValueError, match="data: the section is missing"):
        load_config(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(text.replace("precision: fp32, ", ""))
    with pytest.raises(ValueError, match=r"train\.precision: the value is missing"):
        load_config(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=r"config: .*c\.yaml cannot be read"):
        load_config(tmp_path / "c.yaml")


def test_a_batch_that_does_not_divide_is_named(config_file):
    config = load_config(config_file, ["train.global_batch=6"])
    assert accumulation(config, 3) == 1
    with pytest.raises(ValueError, match=r"train\.global_batch: 6 rows do not divide into 2 ranks x micro_batch 2"):
        accumulation(config, 2)


def test_a_run_goes_on_only_with_what_gives_the_same_result(config_file):
    old = load_config(config_file)
    check_same_run(old, load_config(config_file, ["train.save_every=3", "heldout.every=2", "log.wandb=offline"]))
    for override in ("train.steps=30", "train.seed=1", "optimizer.peak_lr=0.1", "draft.init_std=0", "data.path=x"):
        name = override.split("=")[0]
        with pytest.raises(
            ValueError, match=rf"{name}: .* began with .*; set it back, or start anew with train\.run_dir"
        ):
            check_same_run(old, load_config(config_file, [override]))
