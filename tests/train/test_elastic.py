"""Runs stopped at one number of ranks and resumed at another: the same rows and losses, in real processes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.train import checkpoint, saving
from longdraft.train.tracking import read_metrics

STEPS = 6
# Matrices that decay, norms that do not.
CASES = {
    "fp32-1": ["train.zero_stage=1"],
    "longspec-2": ["train.zero_stage=2", "draft.method=longspec", "draft.window=6", "draft.draft_vocab_size=80"],
    "fp32-3": ["train.zero_stage=3"],
    "offload-2": ["train.zero_stage=2", "train.offload_optimizer=true"],
    "bf16-1": ["train.zero_stage=1", "train.precision=bf16"],
    "muon-2": ["train.zero_stage=2", "optimizer.name=adamuon"],
    "bf16-muon-1": ["train.zero_stage=1", "train.precision=bf16", "optimizer.name=adamuon"],
}
PLAN = [f"train.steps={STEPS}", "train.save_every=2", "train.keep_checkpoints=9", "optimizer.weight_decay=1.0",
    f"heldout.every={STEPS}", "heldout.rows=2",
]  # fmt: skip
# Where a run resumes: the step, the number of ranks that saved it, and that of those that go on. Three ranks do not
# divide a step's four passes.
BREAKS = {"once": (2, 2, 1), "again": (4, 1, 2), "more": (2, 2, 3), "fewer": (4, 3, 2)}
OLD = {"once": "unbroken", "again": "once", "more": "unbroken", "fewer": "more"}
UNEVEN = ("fp32-1", "longspec-2", "fp32-3", "muon-2")  # cases that are also resumed there
BROKEN = [(case, name) for name in BREAKS for case in (CASES if name in ("once", "again") else UNEVEN)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, start_ranks, finish_ranks) -> Path:
    """{case}-unbroken: two ranks; {case}-{break}: resumed from the old run's checkpoint; said-{ranks}: what was
    printed; few-{rank}: how an engine fails."""
    folder = tmp_path_factory.mktemp("elastic [x+1]")  # a name that is also a pattern

    def train(name: str, case: str) -> list[dict]:
        return [{"train": [*PLAN, *CASES[case], f"train.run_dir={folder / name}"]},
                {"done": str(folder / f"{name} done")}]  # fmt: skip

    def go_on(case: str, name: str) -> list[dict]:
        """Resume with the checkpoints of the old run up to the break."""
        old = OLD[name]
        behind = [f"step_{step:06d}" for step in range(BREAKS[name][0] + 2, STEPS + 1, 2)]
        copied = {"copy": [str(folder / f"{case}-{old}"), str(folder / f"{case}-{name}")], "without": behind}
        return [{"wait": str(folder / f"{case}-{old} done")}, copied, *train(f"{case}-{name}", case)]

    actions: dict[int, list[dict]] = {1: [], 2: [{"few": CASES["fp32-1"], "out": str(folder / "few")}], 3: []}
    for case in CASES:
        actions[2] += train(f"{case}-unbroken", case)
    for case, name in BROKEN:
        actions[BREAKS[name][2]] += go_on(case, name)
    started = {n_ranks: start_ranks(n_ranks, own, "ranks_faults.py") for n_ranks, own in actions.items()}
    for n_ranks, processes in started.items():
        (folder / f"said-{n_ranks}").write_text(finish_ranks(processes))
    return folder


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run) if "loss" in record}


def weights(run: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.newest(run)
    assert found is not None and found[1]["step"] == STEPS
    return load_file(found[0] / checkpoint.WEIGHTS)


@pytest.mark.parametrize(("case", "name"), BROKEN)
def test_losses_go_on_as_if_unbroken(folder, case, name):
    """fp32: equal to an unbroken run's up to rounding, and so are the weights, weight decay and AdamW's count of steps
    included. (The gradient of the bias of LongSpec's keys is almost nothing but rounding, which AdamW scales up.) bf16:
    as close as runs of one and of two ranks are."""
    broken, unbroken = folder / f"{case}-{name}", folder / f"{case}-unbroken"
    got, expected = losses(broken), losses(unbroken)
    assert list(got) == list(expected) == list(range(1, STEPS + 1)), "a step was lost or repeated"
    bf16 = case.startswith("bf16")
    for step, loss in expected.items():
        tolerance = 0 if step <= BREAKS["once"][0] else 5e-3 if bf16 else 1e-5
        assert got[step] == pytest.approx(loss, rel=tolerance, abs=0), f"step {step}"
    if case in ("fp32-1", "fp32-3", "offload-2", "muon-2"):
        for key, weight in weights(unbroken).items():
            error = ((weights(broken)[key] - weight).norm() / weight.norm()).item()
            assert error <= 1e-5, f"{key}: relative error {error}"


@pytest.mark.parametrize("name", BREAKS)
def test_it_says_so_and_leaves_nothing(folder, name):
    step, before, after = BREAKS[name]
    said = (folder / f"said-{after}").read_text()
    for case in (case for case, other in BROKEN if other == name):
        checkpoints = folder / f"{case}-{name}" / "checkpoints"
        assert f"{checkpoints}/step_{step:06d} was saved by {before} ranks; it is converted for {after}" in said
        names = sorted(path.name for path in checkpoints.iterdir())  # nor DeepSpeed's script beside them
        assert names == [f"step_{step:06d}" for step in range(2, STEPS + 1, 2)], names
        found = checkpoint.newest(folder / f"{case}-{name}")
        assert found is not None and found[1]["world_size"] == after
    # Every rank's files are there, as in a checkpoint of a run that was never converted.
    files = [checkpoint.newest(folder / f"fp32-3-{run}") for run in ("unbroken", "again")]
    assert files[0] is not None and files[1] is not None and files[0][1]["files"] == files[1][1]["files"]


def test_what_cannot_be_shared_out_is_refused_by_name(folder):
    message = "among 2 ranks some would hold no part of the draft's small parameters; go on with fewer ranks"
    for rank in range(2):
        assert message in (folder / f"few-{rank}").read_text()


@pytest.mark.parametrize(("saved_by", "threads"), [(1, 3), (2, 5)])
def test_threads_are_kept_by_as_many_ranks_alone(tmp_path, monkeypatch, saved_by, threads):
    """Another number of ranks has its own share of threads, and rounds sums differently anyway."""
    now = [5]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    save_file({"weight": torch.ones(2)}, tmp_path / checkpoint.WEIGHTS)
    one = SimpleNamespace(world_size=1, device=torch.device("cpu"), log=print, from_first=lambda work: work())
    engine = SimpleNamespace(ranks=one, read=lambda folder: None, weights=lambda: {"weight": torch.ones(2)})
    saving.load(engine, tmp_path, {"world_size": saved_by, "threads": 3, "step": 0})  # pyright: ignore[reportArgumentType]
    assert now[-1] == threads
