"""Stopped at two ranks and resumed at one, and the other way: the same rows and losses, by real processes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.train import state
from longdraft.train.tracking import read_metrics

STEPS, SAVED = 6, 3
CASES = {
    "fp32-1": ["train.zero_stage=1"],
    "fp32-2": ["train.zero_stage=2"],
    "fp32-3": ["train.zero_stage=3"],
    "offload-2": ["train.zero_stage=2", "train.offload_optimizer=true"],
    "bf16-1": ["train.zero_stage=1", "train.precision=bf16"],
}
# Matrices that decay, norms and biases that do not.
DRAFT = ["draft.method=longspec", "draft.window=6", "draft.noise=3", "draft.final_norm=true"]
PLAN = [f"train.steps={STEPS}", f"train.save_every={SAVED}", "train.keep_checkpoints=3", "optimizer.weight_decay=1.0",
    f"heldout.every={STEPS}", "heldout.rows=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, start_ranks, finish_ranks) -> Path:
    """{case}-{ranks}: unbroken; {case}-{ranks}-{other}: saved by `ranks`, then gone on with by `other`; said-{other}:
    what was printed; few-{rank}: how an engine fails."""
    folder = tmp_path_factory.mktemp("elastic [x+1]")  # what a pattern would take for another name

    def train(name: str, case: str) -> dict:
        return {"train": [*DRAFT, *PLAN, *CASES[case], f"train.run_dir={folder / name}"]}

    started = {}
    for n_ranks, other in ((1, 2), (2, 1)):
        actions = [train(f"{case}-{n_ranks}", case) for case in CASES]
        actions += [{"done": str(folder / f"done-{n_ranks}")}, {"wait": str(folder / f"done-{other}")}]
        for case in CASES:
            name = f"{case}-{other}-{n_ranks}"
            unbroken, last = str(folder / f"{case}-{other}"), f"step_{STEPS:06d}"
            actions += [{"copy": [unbroken, str(folder / name)], "without": last}, train(name, case)]
        if n_ranks == 2:
            actions.append({"few": CASES["fp32-1"], "out": str(folder / "few")})
        started[n_ranks] = start_ranks(n_ranks, actions, "ranks_faults.py")
    for n_ranks, processes in started.items():
        (folder / f"said-{n_ranks}").write_text(finish_ranks(processes))
    return folder


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = state.newest(run)
    assert found is not None and found[1]["step"] == STEPS
    return load_file(found[0] / state.WEIGHTS)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("case", CASES)
def test_losses_go_on_as_if_unbroken(folder, case, before, after):
    """fp32: as an unbroken run's to rounding, and so do the weights, weight decay and AdamW's count of steps included;
    bf16: as closely as runs of one and of two ranks agree."""
    broken, unbroken = folder / f"{case}-{before}-{after}", folder / f"{case}-{before}"
    got, expected = losses(broken), losses(unbroken)
    assert list(got) == list(expected) == list(range(1, STEPS + 1)), "a step was lost or repeated"
    bf16 = case.startswith("bf16")
    for step, loss in expected.items():
        tolerance = 0 if step <= SAVED else 5e-3 if bf16 else 1e-5
        assert got[step] == pytest.approx(loss, rel=tolerance, abs=0), f"step {step}"
    if not bf16:
        for name, weight in weights(unbroken).items():
            error = ((weights(broken)[name] - weight).norm() / weight.norm()).item()
            assert error <= 1e-5, f"{name}: relative error {error}"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_it_says_so_and_leaves_nothing(folder, before, after):
    said = (folder / f"said-{after}").read_text()
    for case in CASES:
        checkpoints = folder / f"{case}-{before}-{after}" / "checkpoints"
        assert f"{checkpoints}/step_{SAVED:06d} was saved by {before} ranks; it is converted for {after}" in said
        names = sorted(path.name for path in checkpoints.iterdir())
        assert names == [f"step_{SAVED:06d}", f"step_{STEPS:06d}"], names
        found = state.newest(folder / f"{case}-{before}-{after}")
        assert found is not None and found[1]["world_size"] == after
        # Every rank's files are there, as in a checkpoint of a run that was never converted.
        unbroken = state.newest(folder / f"{case}-{after}")
        assert unbroken is not None and found[1]["files"].keys() == unbroken[1]["files"].keys()


def test_what_cannot_be_shared_out_is_refused_by_name(folder):
    message = "among 2 ranks some would hold no part of the draft's small parameters; go on with fewer ranks"
    for rank in range(2):
        assert message in (folder / f"few-{rank}").read_text()
