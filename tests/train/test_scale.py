"""What ranks share: the frozen target's weights, and the tokens of one row. Two ranks train as one does."""

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train.checkpoint import WEIGHTS, newest
from longdraft.train.tracking import read_metrics

LONG = 312  # tokens of a row of `long_folder`
# As the runs' `longspec-anchored`, and as `fp32-1-1`.
ANCHORED = [
    "draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.final_norm=true", "optimizer.eps=1e-5",
    "heldout.every=20", f"data.seq_len={LONG}", "data.positions=anchor_offset", "data.max_position=2000",
    "data.sinks=2", "data.query_share=0.5", "draft.draft_vocab_size=80", "train.global_batch=2", "train.micro_batch=1",
]  # fmt: skip
ACCEPTANCE = [
    *ANCHORED, "train.loss=acceptance", "train.kl_steps=12", "train.level_weights=[1,0.5,0.25]", "heldout.every=10",
]  # fmt: skip
HEADS = ["draft.out_norm_init=target"]
MIX = [*HEADS, "train.loss=mix", "train.text_weight=0.25"]
CASES = {
    "sharded-longspec": ("longspec-anchored", [*ANCHORED, "target.zero_stage=3", "train.zero_stage=3"]),
    "sharded-heads": ("fp32-1-1", [*HEADS, "target.zero_stage=3"]),
    "shared-longspec": ("longspec-anchored", [*ANCHORED, "train.sequence_parallel=2"]),
    "shared-heads": ("fp32-1-1", [*HEADS, "train.sequence_parallel=2", "train.zero_stage=2"]),
    "shared-acceptance": ("acceptance", [*ACCEPTANCE, "train.sequence_parallel=2", "train.zero_stage=3"]),
    "sharded-acceptance": ("acceptance", [*ACCEPTANCE, "target.zero_stage=3"]),
    "shared-mix": ("mix", [*MIX, "train.sequence_parallel=2"]),
    "both": ("longspec-anchored", [*ANCHORED, "target.zero_stage=3", "train.sequence_parallel=2"]),
}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory, start_ranks, finish_ranks, runs, long_folder):
    """A folder of the cases' runs on two ranks. `runs` is a dependency so that no more than two ranks run at a time."""
    folder = tmp_path_factory.mktemp("scaled")
    data = {"longspec-anchored": [f"data.path={long_folder}"], "acceptance": [f"data.path={long_folder}"]}
    actions = [
        {"train": [f"train.run_dir={folder / name}", *overrides, *data.get(like, [])]}
        for name, (like, overrides) in CASES.items()
    ]
    finish_ranks(start_ranks(2, actions))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_train_as_one(runs, scaled, name):
    alone, shared = runs / CASES[name][0], scaled / name
    losses, found = (
        [record["loss"] for record in read_metrics(run) if "loss" in record] for run in (alone, shared)
    )  # fmt: skip
    assert len(losses) == 20
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=0)
    expected, got = (load_file(newest(run)[0] / WEIGHTS) for run in (alone, shared))  # pyright: ignore[reportOptionalSubscript]
    assert expected.keys() == got.keys()
    for weight, tensor in expected.items():
        if weight != "token_ids":
            error = ((got[weight] - tensor).norm() / tensor.norm().clamp(min=1e-12)).item()
            assert error <= 1e-4, f"{weight}: relative error {error}"
    for key in ("heldout_loss", "heldout_rank_rates"):
        (one,), (other,) = (
            [record[key] for record in read_metrics(run) if key in record][-1:] for run in (alone, shared)
        )
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
