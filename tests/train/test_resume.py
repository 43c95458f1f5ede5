"""Which checkpoint a run goes on from, what stays in its folder, and that no two runs share one. Killed runs:
test_elastic.py and test_faults.py."""

import json
from types import SimpleNamespace

import pytest
import torch

from longdraft.models.files import locked
from longdraft.train import checkpoint
from longdraft.train.config_file import load_config
from longdraft.train.loop import train
from longdraft.train.tracking import read_metrics


def test_steps_of_more_than_six_digits_are_found(tmp_path):
    for name in ("step_1000000", "step_999999", "step_0000020", "step_12", "step_000030-copy", "tmp-step_000040"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.STATE).touch()
    found = [path.name for path in checkpoint.finished_folders(tmp_path)]
    assert found == ["step_0000020", "step_999999", "step_1000000"]


ALONE = SimpleNamespace(
    first=True,
    rank=0,
    world_size=1,
    device=torch.device("cpu"),
    sum=list,
    barrier=lambda: None,
    from_first=lambda work: work(),
)


def test_a_run_that_never_opened_leaves_nothing_to_continue(config_file, tmp_path):
    """A typo in the first command must not get in the way of the corrected one."""
    config = load_config(config_file, ["data.path=nowhere", f"train.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="nowhere"):
        train(config, ALONE)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "run" / "config.yaml").exists()
    with locked(tmp_path / "run" / "lock", "train.run_dir", "busy"):  # and it released the lock
        pass


def test_two_runs_do_not_share_a_folder(config_file, tmp_path):
    config = load_config(config_file, [f"train.run_dir={tmp_path}"])
    with (
        locked(tmp_path / "lock", "train.run_dir", "busy"),
        pytest.raises(ValueError, match=r"^train\.run_dir: another process trains in"),
    ):
        train(config, ALONE)  # pyright: ignore[reportArgumentType]


def test_a_folder_that_cannot_be_written_is_named(config_file, tmp_path):
    """On all ranks, since `from_first` raises the first rank's error on the others."""
    (tmp_path / "file").touch()
    for run, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        config = load_config(config_file, [f"train.run_dir={run}"])
        with pytest.raises(ValueError, match=rf"^train\.run_dir: {run} cannot be written: {reason}"):
            train(config, ALONE)  # pyright: ignore[reportArgumentType]


def test_only_the_newest_are_kept_and_no_frozen_weight_is_in_them(runs):
    checkpoints = sorted(path for path in (runs / "bf16-1-1" / "checkpoints").iterdir() if path.is_dir())
    assert [path.name for path in checkpoints] == ["step_000010", "step_000020"]
    draft_parameters = 3 * (32 * 32 + 2 * 32)
    total = sum(path.stat().st_size for path in checkpoints[0].iterdir())
    assert total < draft_parameters * 24 + 60_000, f"{total} bytes"


def test_a_finished_run_says_so_and_does_nothing(runs):
    run = runs / "fp32-1-1"
    assert f"Training is done already: 20 steps, checkpoint in {run}" in (runs / "output.txt").read_text()
    assert len([record for record in read_metrics(run) if "loss" in record]) == 20


def test_saved_config_is_the_resolved_one(runs, config_file):
    config = load_config(runs / "bf16-1-3" / "config.yaml")
    expected = ["train.zero_stage=3", "train.precision=bf16", f"train.run_dir={runs / 'bf16-1-3'}"]
    assert config == load_config(config_file, [*expected, "draft.out_norm_init=target"])
    found = checkpoint.newest(runs / "bf16-1-3")
    assert found is not None and checkpoint.saved_config(runs / "bf16-1-3", found[1]) == config
    assert json.loads((found[0] / checkpoint.STATE).read_text())["extra"]["heldout"]["positions"] > 0
