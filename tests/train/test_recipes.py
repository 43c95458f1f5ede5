"""LongSpec's recipes against Appendix E of its paper (arXiv 2502.17421)."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from longdraft.models.draft_folder import load_draft
from longdraft.models.hf import read_target_config
from longdraft.train.config_file import load_config, load_stages
from longdraft.train.estimate import memory, report
from longdraft.train.methods.build import same_shape

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "longspec"
PUBLISHED = json.loads(Path(__file__).with_name("published_targets.json").read_text())
# Longest rows, and how far Anchor-Offset positions go: never beyond the target's own.
PAPER = {
    "vicuna-7b": (16384, 15000),
    "vicuna-13b": (16384, 15000),
    "longchat-7b": (32768, 30000),  # the authors' rule; the recipe says why
    "longchat-13b": (16384, 15000),
    "llama3.1-8b": (32768, 30000),
    "qwq-32b": (32768, 30000),
}


# Later targets, trained like the paper's targets of their size.
LATER = dict.fromkeys(
    ("qwen3-8b", "qwen3.5-9b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma-3-12b", "devstral-small-2-24b"), (32768, 30000)
)
SHARED_OUT = ("qwq-32b", "qwen3-30b-a3b", "gpt-oss-20b", "devstral-small-2-24b")  # from the first stage on


def test_there_is_one_file_for_each_target():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*PAPER, *LATER, "smollm2", "smollm2-gpu"}


@pytest.mark.parametrize("name", [*PAPER, *LATER])
def test_appendix_e(name):
    long_rows, far = (PAPER | LATER)[name]
    short, *others = (stage.config for stage in load_stages(CONFIGS / f"{name}.yaml"))
    assert (short.data.seq_len, short.data.positions, short.data.max_position, short.data.sinks) == (
        1024, "anchor_offset", far, 4,
    )  # fmt: skip
    assert (short.train.global_batch, short.optimizer.peak_lr) == (2048, 5e-4)
    stage = 3 if name in SHARED_OUT else 1
    assert (short.target.zero_stage, short.train.zero_stage) == (3 if stage == 3 else 0, stage)
    assert len(others) == 2
    for config in others:
        assert (config.data.seq_len, config.data.positions, config.train.global_batch) == (long_rows, "plain", 256)
        assert (config.optimizer.peak_lr, config.target.zero_stage, config.train.zero_stage) == (5e-6, 3, 3)
    for config in (short, *others):
        assert (config.optimizer.betas, config.optimizer.weight_decay, config.optimizer.clip) == ((0.9, 0.95), 0.1, 1.0)
        assert (config.train.epochs, config.train.precision, config.draft.method) == (1.0, "bf16", "longspec")
        assert config.train.n_passes(8) * 8 * config.train.micro_batch == config.train.global_batch
        steps = config.resolved(n_rows=config.train.global_batch * 200)
        assert (steps.train.steps, steps.optimizer.warmup_steps) == (200, 20)


# Positions of each target; of any other one 131072.
POSITIONS = {"vicuna-7b": 16384, "vicuna-13b": 16384, "longchat-13b": 16384, "longchat-7b": 32768, "qwq-32b": 32768}
POSITIONS |= {"qwen3-8b": 40960, "qwen3-30b-a3b": 40960, "qwen3.5-9b": 262144, "devstral-small-2-24b": 393216}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_says_what_the_command_estimates(name, tmp_path):
    """GPU-hours; and GiB per GPU where a recipe says them, of which a tenth is left for the allocator's
    fragmentation."""
    path, text = CONFIGS.parent / f"{name}.yaml", (CONFIGS.parent / f"{name}.yaml").read_text()
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    stages = load_stages(path, [f"target.path={tmp_path}", f"train.run_dir={tmp_path / 'run'}"])
    counted = re.findall(r"\n([\d.]+) GPU-hours for (?:200 steps|a billion tokens)", report(stages, 8, gpu=True))
    (said,) = re.findall(r"`longdraft train --estimate --num-gpus 8` counts (.*) GPU-hours", text)
    assert re.findall(r"[\d.]+", said) == counted and len(counted) == len(stages)
    target = read_target_config(tmp_path, max_positions=stages[0].config.target.max_positions)
    assert target.max_positions == POSITIONS.get(path.stem, 131072)
    said = re.search(r"at most (.*) GiB per GPU", text)
    assert said is not None or (path.parent != CONFIGS and path.stem not in LATER)
    for stage, number in zip(stages, re.findall(r"\d+", said[1]), strict=True) if said else ():
        peak = memory(stage.config, target, n_ranks=8, gpu=True).peak
        assert peak / 2**30 == pytest.approx(float(number), abs=0.5) and peak < 0.9 * 80e9
        assert path.parent != CONFIGS or stage.config.train.micro_batch * stage.config.data.seq_len == 32768


# Billions of parameters, as the model cards have them: gpt-oss's 20.9, Gemma's 12.2 without the 0.4 that read images,
# Qwen3.5's as its GGUF files have them.
@pytest.mark.parametrize(("name", "billions"), [
    ("vicuna-7b", 6.74), ("llama3.1-8b", 8.03), ("qwq-32b", 32.76), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5),
    ("gpt-oss-20b", 20.9), ("gemma-3-12b", 11.77), ("qwen3.5-9b", 8.95),
])  # fmt: skip
def test_targets_have_as_many_parameters_as_published(name, billions, tmp_path):
    """In bf16, two bytes each."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[f"longspec/{name}"]["config"]))
    config = load_stages(CONFIGS / f"{name}.yaml")[0].config
    kept = memory(config, read_target_config(tmp_path), 1, gpu=True).kept["target's weights"]
    assert kept == pytest.approx(2e9 * billions, rel=0.002)


def test_smollm2_goes_through_all_stages():
    stages = load_stages(CONFIGS / "smollm2.yaml")
    assert [stage.name for stage in stages] == ["short", "long", "sft", "mixed", "more", "further", "again", "onward"]
    assert [stage.config.data.seq_len for stage in stages] == [1024, 4096, 2048, 1024, 1024, 1024, 1024, 1024]
    shape = read_target_config("smollm2-135m")
    for before, stage in pairwise(stages):
        assert stage.config.draft.start_from == str(before.draft)
        assert same_shape(*(one.config.draft.network(shape) for one in (before, stage)))


@pytest.mark.parametrize("method", ["tokenswift", "longspec"])
def test_a_gpu_trains_the_shipped_drafts_further(method):
    """In passes that keep it busy."""
    config = load_config(CONFIGS.parent / method / "smollm2-gpu.yaml")
    shipped, ours = load_draft(str(config.draft.start_from)), config.draft.network(read_target_config("smollm2-135m"))
    assert config.draft.start_from == f"smollm2-135m-{method}" and config.train.n_passes(1) == 1
    assert same_shape(shipped.config, ours) and shipped.config.draft_vocab_size == ours.draft_vocab_size
    assert config.train.pass_rows * config.data.seq_len >= 16_384
