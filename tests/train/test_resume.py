"""A run that is killed or stopped at any step goes on to the same bytes. Real processes, once under DeepSpeed's
launcher."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longdraft.train import checkpoint
from longdraft.train.config_file import load_config
from longdraft.train.loop import train
from longdraft.train.saving import locked_run
from longdraft.train.tracking import read_metrics

STEPS = 40  # of the runs' `unbroken`


def wait_for_step(run_dir: Path, step: int, processes: Sequence[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 200
    while max([record["step"] for record in read_metrics(run_dir)], default=0) < step:
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def final_bytes(run_dir: Path) -> bytes:
    found = checkpoint.newest(run_dir)
    assert found is not None and found[1]["step"] == STEPS
    return (found[0] / checkpoint.WEIGHTS).read_bytes()


def test_kill_and_stop_and_resume_give_the_same_bytes(runs, config_file, start_ranks, finish_ranks, tmp_path):
    """kill -9 of both ranks, then SIGTERM to `longdraft train`, each at a random step, then to the end."""
    broken = tmp_path / "broken"
    overrides = [*_slow(runs), f"train.run_dir={broken}"]
    killed_at = random.SystemRandom().randrange(7, 16)
    ranks = start_ranks(2, [{"train": overrides}])
    wait_for_step(broken, killed_at, ranks)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.communicate()
    found = checkpoint.newest(broken)
    assert found is not None and 6 <= found[1]["step"] < 22, f"killed at {killed_at}"

    launched = subprocess.Popen(
        [sys.executable, "-m", "longdraft.launch.cli", "train", str(config_file), *overrides, "--num-gpus", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_step(broken, random.SystemRandom().randrange(22, 30), [launched])
    launched.send_signal(signal.SIGTERM)
    output = launched.communicate(timeout=200)[0]
    assert launched.returncode == 0, output
    assert f"step {found[1]['step']} to {STEPS}" in output, "it did not go on from the newest checkpoint"
    found = checkpoint.newest(broken)
    assert found is not None and 22 <= found[1]["step"] < STEPS
    assert f"Stopped after {found[1]['step']} of {STEPS} steps" in output

    finish_ranks(start_ranks(2, [{"train": overrides}]))
    assert final_bytes(broken) == final_bytes(runs / "unbroken"), f"killed at step {killed_at}"
    losses = [
        [(record["step"], record["loss"]) for record in read_metrics(run) if "loss" in record]
        for run in (runs / "unbroken", broken)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def _slow(runs: Path) -> list[str]:
    """The overrides that made `unbroken`."""
    train = load_config(runs / "unbroken" / "config.yaml").train
    names = ("steps", "micro_batch", "global_batch", "save_every", "zero_stage")
    return [f"train.{name}={getattr(train, name)}" for name in names]


@pytest.mark.parametrize("name", ["bf16-1-1", "bf16-1-3"])
def test_bf16_masters_survive_the_checkpoint(runs, name):
    ends = [runs / run / "checkpoints" / "step_000020" / checkpoint.WEIGHTS for run in (name, f"{name}-again")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_half_written_and_damaged_checkpoints_are_never_chosen(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs / "bf16-1-1", run)
    checkpoints = run / "checkpoints"
    (checkpoints / "step_000020").rename(checkpoints / "tmp-step_000020")
    found = checkpoint.newest(run)
    assert found is not None and found[1]["step"] == 10

    (checkpoints / "tmp-step_000020").rename(checkpoints / "step_000020")
    file = checkpoints / "step_000020" / "optimizer-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found = checkpoint.newest(run)
    assert found is not None and found[1]["step"] == 10
    assert file.name in capsys.readouterr().out
    (checkpoints / "step_000010" / checkpoint.STATE).unlink()
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged; restore one"):
        checkpoint.newest(run)


def test_a_junk_line_among_the_metrics_does_not_stop_a_run(runs, tmp_path, train_command):
    run = tmp_path / "run"
    shutil.copytree(runs / "bf16-1-1", run)
    shutil.rmtree(run / "checkpoints" / "step_000020")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:3], "junk\n", *lines[3:]]))
    status, said = train_command(run / "config.yaml", f"train.run_dir={run}")
    assert status == 0 and f"{metrics}: 1 lines " in said
    losses = [[(r["step"], r["loss"]) for r in read_metrics(of) if "loss" in r] for of in (run, runs / "bf16-1-1")]
    assert losses[0] == losses[1] and len(losses[0]) == 20


def test_steps_of_more_than_six_digits_are_found(tmp_path):
    for name in ("step_1000000", "step_999999", "step_0000020", "step_12", "step_000030-copy", "tmp-step_000040"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.STATE).touch()
    found = [path.name for path in checkpoint.finished_folders(tmp_path)]
    assert found == ["step_0000020", "step_999999", "step_1000000"]


def test_what_kills_left_goes_with_the_next_checkpoint(config_file, train_command, tmp_path, monkeypatch):
    """What is left of a checkpoint that was being written or removed. A removal never leaves a partial
    checkpoint under the name of a whole one."""
    folder = tmp_path / "checkpoints"
    for name in ("tmp-step_000003", "tmp-old-step_000001", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").touch()
    removed, rmtree = [], shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **given: removed.append(Path(path).name) or rmtree(path, **given)
    )
    steps = ["train.steps=3", "train.save_every=1", "train.keep_checkpoints=1", "optimizer.warmup_steps=0"]
    status, printed = train_command(config_file, f"train.run_dir={tmp_path}", *steps)
    assert status == 0, printed
    assert sorted(path.name for path in folder.iterdir()) == ["other", "step_000003"]
    assert {"tmp-old-step_000001", "tmp-old-step_000002"} <= set(removed)
    assert not {"step_000001", "step_000002"} & set(removed)


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
    with locked_run(tmp_path / "run", ALONE):  # and it released the lock
        pass


def test_two_runs_do_not_share_a_folder(tmp_path):
    with locked_run(tmp_path, ALONE):
        second = locked_run(tmp_path, ALONE)
        with pytest.raises(ValueError, match="another process trains in"):
            second.__enter__()


def test_a_folder_that_cannot_be_written_is_named(config_file, tmp_path):
    """On all ranks, since `from_first` raises the first rank's error on the others."""
    (tmp_path / "file").touch()
    for run, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        config = load_config(config_file, [f"train.run_dir={run}"])
        with pytest.raises(ValueError, match=rf"^train\.run_dir: {run} cannot be written: {reason}"):
            train(config, ALONE)  # pyright: ignore[reportArgumentType]


def test_old_checkpoints_go_and_the_last_stay(runs):
    """40 steps, saved every 6 steps and at the end; two checkpoints are kept."""
    checkpoints = [path for path in (runs / "unbroken" / "checkpoints").iterdir() if path.is_dir()]
    assert sorted(path.name for path in checkpoints) == ["step_000036", "step_000040"]


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
