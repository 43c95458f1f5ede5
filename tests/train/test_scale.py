"""Several ranks train as one does: where they share the target's weights or the tokens of a row, and where the passes
do not divide among them, so that some have none at all."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train.checkpoint import WEIGHTS
from longdraft.train.tracking import read_metrics

# The steps that are compared: those of the runs, or up to their first checkpoint where later ones do nothing else.
N_STEPS = {"acceptance": 20, "longspec-fp32-1-1": 8, "poisoned": 3}
SHARDED, SHARED, THREES = "target.zero_stage=3", "train.sequence_parallel=2", "train.micro_batch=3"  # 3, 3 and 2 rows
# By the number of ranks: the run of one rank (`runs`) that each equals, and what is otherwise.
CASES = {
    2: [
        ("longspec-anchored", [SHARDED, "train.zero_stage=3"]), ("fp32-1-1", [SHARDED]),
        ("longspec-anchored", [SHARED]), ("fp32-1-1", [SHARED, "train.zero_stage=2"]),
        ("acceptance", [SHARED, "train.zero_stage=3"]), ("acceptance", [SHARDED]), ("mix", [SHARED]),
        ("longspec-anchored", [SHARED, SHARDED]), ("longspec", [THREES, SHARDED, "train.zero_stage=3"]),
    ],
    3: [
        ("fp32-1-1", []), ("longspec-fp32-1-1", ["train.zero_stage=3"]),
        ("longspec-anchored", [SHARDED, "train.zero_stage=3"]), ("poisoned", []),
    ],
    4: [
        ("fp32-1-1", [THREES, SHARED]),
        ("longspec-anchored", [SHARED, "train.zero_stage=3", "train.micro_batch=2"]),  # two ranks share no row
    ],
    8: [
        ("fp32-1-1", []), ("fp32-1-1", [SHARED, SHARDED, "train.zero_stage=2", "train.micro_batch=1"]),
        ("longspec", ["train.micro_batch=1"]), ("longspec", ["train.zero_stage=3"]),
        ("longspec-anchored", [SHARED, SHARDED, "train.zero_stage=3"]), ("acceptance", [SHARED]), ("mix", [SHARDED]),
        ("poisoned", [SHARED]),
    ],
}  # fmt: skip
NIGHTLY = 8
NAMES = [
    pytest.param(f"{n_ranks}-{number}-{like}", marks=[pytest.mark.nightly(of="train")] if n_ranks == NIGHTLY else [])
    for n_ranks, cases in CASES.items()
    for number, (like, _) in enumerate(cases)
]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory, start_ranks, finish_ranks, runs) -> Callable[[str], Path]:
    """(one of NAMES) -> its run; the runs of a number of ranks are trained at the first question for one."""
    folder = tmp_path_factory.mktemp("scaled")

    @cache
    def train(n_ranks: int) -> None:
        actions = [
            {"train": [f"train.run_dir={folder / f'{n_ranks}-{i}-{like}'}", *others],
                "config": str(runs / like / "config.yaml"), "until": N_STEPS.get(like, 10)}
            for i, (like, others) in enumerate(CASES[n_ranks])
        ]  # fmt: skip
        finish_ranks(start_ranks(n_ranks, actions))

    def trained(name: str) -> Path:
        train(int(name.split("-")[0]))
        return folder / name

    return trained


@pytest.mark.parametrize("name", NAMES)
def test_ranks_train_as_one(runs, scaled, name):
    """Losses of every step, what is skipped, weights and the evaluation."""
    n_ranks, number, like = name.split("-", 2)
    alone, together, n_steps = runs / like, scaled(name), N_STEPS.get(like, 10)
    bound = 1e-5 if like == "longspec" or (n_ranks == "3" and like != "longspec-anchored") else 1e-4
    records, found = ([record for record in read_metrics(run) if "loss" in record] for run in (alone, together))
    assert len(found) == n_steps
    records = records[:n_steps]
    torch.testing.assert_close([r["loss"] for r in found], [r["loss"] for r in records], rtol=1e-5, atol=0)
    assert [record["skipped"] for record in found] == [record["skipped"] for record in records]
    assert records[-1]["skipped"] == (like == "poisoned")
    expected, got = (load_file(run / "checkpoints" / f"step_{n_steps:06d}" / WEIGHTS) for run in (alone, together))
    assert expected.keys() == got.keys()
    for weight, tensor in expected.items():
        if weight != "token_ids":
            error = ((got[weight] - tensor).norm() / tensor.norm().clamp(min=1e-12)).item()
            assert error <= bound, f"{weight}: relative error {error}"
    (one,), (other,) = (
        [record for record in read_metrics(run) if record["step"] == n_steps and "heldout_loss" in record]
        for run in (alone, together)
    )
    keys = {key for key in one if key.startswith("heldout_")} - {"heldout_s"}
    assert {"heldout_loss", "heldout_part_loss", "heldout_rank_rates", "heldout_choice_rates"} < keys <= other.keys()
    if SHARED in CASES[int(n_ranks)][int(number)][1]:  # such ranks compare the target's choice at other places
        keys -= {"heldout_choice_rates", "heldout_overlaps"}
    for key in keys:
        torch.testing.assert_close(other[key], one[key], rtol=1e-4, atol=1e-6)
