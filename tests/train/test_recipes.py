"""LongSpec's recipes against Appendix E of its paper (arXiv 2502.17421)."""

from pathlib import Path

import pytest

from longdraft.train.config import accumulation, resolved
from longdraft.train.curriculum import load_stages

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "longspec"
# Longest rows, and how far Anchor-Offset positions go: never beyond the target's own.
PAPER = {
    "vicuna-7b": (16384, 15000),
    "vicuna-13b": (16384, 15000),
    "longchat-7b": (32768, 15000),
    "longchat-13b": (16384, 15000),
    "llama3.1-8b": (32768, 30000),
    "qwq-32b": (32768, 30000),
}


def test_there_is_one_file_for_each_target_of_the_paper():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*PAPER, "smollm2"}


@pytest.mark.parametrize("name", PAPER)
def test_appendix_e(name):
    long_rows, far = PAPER[name]
    short, *others = (stage.config for stage in load_stages(CONFIGS / f"{name}.yaml"))
    assert (short.data.seq_len, short.data.positions, short.data.max_position, short.data.sinks) == (
        1024, "anchor_offset", far, 4,
    )  # fmt: skip
    assert (short.train.global_batch, short.optimizer.peak_lr) == (2048, 5e-4)
    stage = 3 if name == "qwq-32b" else 1
    assert (short.target.zero_stage, short.train.zero_stage) == (3 if stage == 3 else 0, stage)
    assert len(others) == 2
    for config in others:
        assert (config.data.seq_len, config.data.positions, config.train.global_batch) == (long_rows, "plain", 256)
        assert (config.optimizer.peak_lr, config.target.zero_stage, config.train.zero_stage) == (5e-6, 3, 3)
    for config in (short, *others):
        assert (config.optimizer.betas, config.optimizer.weight_decay, config.optimizer.clip) == ((0.9, 0.95), 0.1, 1.0)
        assert (config.train.epochs, config.train.precision, config.draft.method) == (1.0, "bf16", "longspec")
        assert accumulation(config, 8) * 8 * config.train.micro_batch == config.train.global_batch
        steps = resolved(config, n_rows=config.train.global_batch * 200)
        assert (steps.train.steps, steps.optimizer.warmup_steps) == (200, 20)


def test_smollm2_goes_through_all_stages():
    stages = load_stages(CONFIGS / "smollm2.yaml")
    assert [stage.name for stage in stages] == ["short", "long", "sft"]
    assert [stage.config.data.seq_len for stage in stages] == [1024, 4096, 2048]
    assert stages[1].config.draft.start_from == str(stages[0].draft)
