"""Runs that former versions wrote: the finished one is exported and starts another run, the killed one of format 2 is
refused, that of format 3 goes on."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from longdraft.launch import cli
from longdraft.models.draft_folder import load_draft
from longdraft.train import checkpoint

RUNS = Path(__file__).with_name("former_runs")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of the runs, as the working folder: the paths in their configs are relative."""
    shutil.copytree(RUNS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_finished_run_is_exported_and_starts_another(folder, train_command):
    assert cli.main(["export", "finished"]) == 0
    saved = folder / "finished" / "checkpoints" / "step_000004"
    exported = load_draft(folder / "finished" / "draft").state_dict()
    for name, weight in load_file(saved / checkpoint.WEIGHTS).items():
        assert exported[name].equal(weight), name

    still = ["train.run_dir=next", "train.steps=1", "optimizer.peak_lr=1e-30", "optimizer.warmup_steps=0"]
    status, printed = train_command("run.yaml", "--from-draft", "finished/draft", *still)
    assert status == 0, printed
    found = checkpoint.newest("next")
    assert found is not None
    begun = load_file(found[0] / checkpoint.WEIGHTS)
    assert len(begun) == 9 and all(begun[name].equal(weight) for name, weight in exported.items())


def test_a_finished_run_is_done(folder, train_command):
    status, printed = train_command("run.yaml")
    assert status == 0 and "Training is done already: 4 steps" in printed


def test_a_killed_run_is_refused_by_name(folder, train_command):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, printed = train_command("run.yaml", "train.run_dir=killed")
    assert status == 2 and "train.run_dir: killed/checkpoints/step_000002 was saved by an older version" in printed
    assert {path: path.read_bytes() for path in before} == before


def test_a_killed_run_of_this_format_goes_on(folder, train_command):
    """Format 3: safetensors by the names of parameters."""
    saved = load_file(folder / "killed-3" / "checkpoints" / "step_000002" / "optimizer-00000.safetensors")
    status, printed = train_command("run.yaml", "train.run_dir=killed-3")
    assert status == 0 and "step 2 to 4" in printed, printed
    found = checkpoint.newest("killed-3")
    assert found is not None and found[1]["step"] == found[1]["optimizer_steps"] == 4
    moved = load_file(found[0] / "optimizer-00000.safetensors")
    assert saved.keys() == moved.keys() and not any(saved[name].equal(tensor) for name, tensor in moved.items())
