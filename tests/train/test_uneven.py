"""Where a step's passes do not divide among the ranks, or some ranks have none at all, they train as one rank does."""

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train.checkpoint import WEIGHTS, newest
from longdraft.train.tracking import read_metrics

# As the runs that one rank made (`runs`): 8 rows a step in passes of 2; LongSpec's 4 rows, and 2 long ones.
HEADS = ["draft.out_norm_init=target"]
BLOCK = ["draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.final_norm=true", "optimizer.eps=1e-5"]
FEW = [*BLOCK, "train.steps=8", "train.global_batch=4", "heldout.every=8"]
LONG = [
    *BLOCK, "data.seq_len=312", "data.positions=anchor_offset", "data.max_position=2000", "data.sinks=2",
    "data.query_share=0.5", "draft.draft_vocab_size=80", "train.global_batch=2", "train.micro_batch=1",
    "heldout.every=20",
]  # fmt: skip
SHARDED = ["target.zero_stage=3", "train.zero_stage=3"]
THREES = "train.micro_batch=3"  # 3, 3 and 2 rows
# By the number of ranks: a run's name, the one that it equals, its overrides.
CASES = {
    2: {"block-sharded": ("longspec", [*BLOCK, THREES, "heldout.every=20", *SHARDED])},
    3: {
        "heads-1": ("fp32-1-1", HEADS),
        "block-3": ("longspec-fp32-1-1", [*FEW, "train.zero_stage=3"]),
        "long-sharded": ("longspec-anchored", [*LONG, *SHARDED]),
    },
    4: {"shared": ("fp32-1-1", [*HEADS, THREES, "train.sequence_parallel=2"])},
}
NAMES = [(n_ranks, name) for n_ranks, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory, start_ranks, finish_ranks, runs, long_folder, poisoned):
    """{ranks}-{case}: the cases' runs; poisoned-3: equal to poisoned of `runs`."""
    folder = tmp_path_factory.mktemp("uneven")
    for n_ranks, cases in CASES.items():
        actions = []
        for name, (like, overrides) in cases.items():
            data = [f"data.path={long_folder}"] if like == "longspec-anchored" else []
            actions.append({"train": [f"train.run_dir={folder / f'{n_ranks}-{name}'}", *overrides, *data]})
        if n_ranks == 3:
            run = [f"train.run_dir={folder / 'poisoned-3'}", *BLOCK, *poisoned, "train.zero_stage=3"]
            actions.append({"train": [*run, "heldout.every=20"]})
        finish_ranks(start_ranks(n_ranks, actions))
    return folder


def losses(run):
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def assert_weights_agree(run, reference, bound):
    expected, got = (load_file(newest(one)[0] / WEIGHTS) for one in (reference, run))  # pyright: ignore[reportOptionalSubscript]
    assert expected.keys() == got.keys()
    for name, weight in expected.items():
        if name != "token_ids":
            error = ((got[name] - weight).norm() / weight.norm().clamp(min=1e-3)).item()
            assert error <= bound, f"{name}: relative error {error}"


@pytest.mark.parametrize(("n_ranks", "name"), NAMES)
def test_they_train_as_one(runs, uneven, n_ranks, name):
    """Losses of every step, weights and evaluation, as closely as where the passes divide."""
    run, reference = uneven / f"{n_ranks}-{name}", runs / CASES[n_ranks][name][0]
    assert len(losses(reference)) == (8 if CASES[n_ranks][name][1][: len(FEW)] == FEW else 20)
    torch.testing.assert_close(losses(run), losses(reference), rtol=1e-5, atol=0)
    assert_weights_agree(run, reference, 1e-4 if "long" in name or name == "shared" else 1e-5)
    for key in ("heldout_loss", "heldout_rank_rates"):
        one, other = ([r[key] for r in read_metrics(of) if key in r][-1] for of in (reference, run))
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


def test_rows_without_a_number_are_left_out_alike(runs, uneven):
    """With their whole pass, whichever rank makes it; an empty pass has nothing to leave out."""
    one, three = ([r for r in read_metrics(run) if "loss" in r] for run in (runs / "poisoned", uneven / "poisoned-3"))
    assert [record["skipped"] for record in three] == [record["skipped"] for record in one]
    assert one[-1]["skipped"] == 1
    torch.testing.assert_close([r["loss"] for r in three], [r["loss"] for r in one], rtol=1e-5, atol=0)
    assert_weights_agree(uneven / "poisoned-3", runs / "poisoned", 1e-5)
