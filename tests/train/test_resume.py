"""Killed or stopped at any step, a run goes on to the same bytes. Real processes under DeepSpeed's own launcher."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from longdraft.train import state
from longdraft.train.config import load_config
from longdraft.train.launcher import RANK_MARK
from longdraft.train.tracking import read_metrics

STEPS = 40
# Many small passes: a step takes tens of milliseconds, so that it can be hit.
SLOW = [f"train.steps={STEPS}", "train.micro_batch=1", "train.global_batch=16", "train.save_every=6", "train.zero_stage=2"]
COMMAND = [sys.executable, "-m", "longdraft.launch.cli", "train"]


class Launched:
    """`longdraft train` with 2 ranks."""

    def __init__(self, config_file: Path, run_dir: Path):
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [*COMMAND, str(config_file), *SLOW, f"train.run_dir={run_dir}", "--num-gpus", "2"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while max([record["step"] for record in read_metrics(self.run_dir)], default=0) < step:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.005)

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any(a.startswith(RANK_MARK) for a in child.cmdline())]

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=120)[0]
        return self.process.returncode, output


def final_bytes(run_dir: Path) -> bytes:
    found = state.newest(run_dir)
    assert found is not None and found[1]["step"] == STEPS
    return (found[0] / state.WEIGHTS).read_bytes()


def test_kill_and_stop_and_resume_give_the_same_bytes(config_file, train_in_ranks, tmp_path):
    train_in_ranks(2, [[*SLOW, f"train.run_dir={tmp_path / 'unbroken'}"]])

    broken = tmp_path / "broken"
    killed_at = random.SystemRandom().randrange(7, 16)
    first = Launched(config_file, broken)
    first.wait_for_step(killed_at)
    ranks = first.ranks()
    assert len(ranks) == 2
    for rank in ranks:
        rank.kill()
    status, output = first.end()
    found = state.newest(broken)
    assert status != 0 and found is not None and found[1]["step"] >= 6, f"killed at {killed_at}: {output}"

    second = Launched(config_file, broken)
    second.wait_for_step(random.SystemRandom().randrange(22, 30))
    second.process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    status, output = second.end()
    assert status == 0 and time.monotonic() - begin < 30, output
    found = state.newest(broken)
    assert found is not None and 22 <= found[1]["step"] < STEPS
    assert f"Stopped after {found[1]['step']} of {STEPS} steps" in output
    assert f"step {found[1]['step']} to {STEPS}" not in output.split("Stopped after")[0]

    train_in_ranks(2, [[*SLOW, f"train.run_dir={broken}"]])
    assert final_bytes(broken) == final_bytes(tmp_path / "unbroken"), f"killed at step {killed_at}"
    losses = [
        [(record["step"], record["loss"]) for record in read_metrics(tmp_path / run) if "loss" in record]
        for run in ("unbroken", "broken")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


@pytest.fixture(scope="module")
def finished(tmp_path_factory, train_in_ranks) -> Path:
    """A run of one rank in 20 steps, checkpoints at 10 and 20, stages 1 and 3 with bf16 resumed from 10."""
    folder = tmp_path_factory.mktemp("finished")
    variants = {name: [f"train.zero_stage={name[-1]}", "train.precision=bf16"] for name in ("bf16-1", "bf16-3")}
    train_in_ranks(1, [[f"train.run_dir={folder / name}", *overrides] for name, overrides in variants.items()])
    for name in variants:
        shutil.copytree(folder / name, folder / f"{name}-again")
        shutil.rmtree(folder / f"{name}-again" / "checkpoints" / "step_000020")
    train_in_ranks(1, [[f"train.run_dir={folder / name}-again", *overrides] for name, overrides in variants.items()])
    return folder


@pytest.mark.parametrize("name", ["bf16-1", "bf16-3"])
def test_bf16_masters_survive_the_checkpoint(finished, name):
    ends = [finished / run / "checkpoints" / "step_000020" / state.WEIGHTS for run in (name, f"{name}-again")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_half_written_and_damaged_checkpoints_are_never_chosen(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished / "bf16-1", run)
    checkpoints = run / "checkpoints"
    (checkpoints / "step_000020").rename(checkpoints / "tmp-step_000020")
    found = state.newest(run)
    assert found is not None and found[1]["step"] == 10

    (checkpoints / "tmp-step_000020").rename(checkpoints / "step_000020")
    file = next((checkpoints / "step_000020").glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    found = state.newest(run)
    assert found is not None and found[1]["step"] == 10
    assert file.name in capsys.readouterr().out
    (checkpoints / "step_000010" / state.STATE).unlink()
    assert state.newest(run) is None


def test_only_the_newest_are_kept_and_no_frozen_weight_is_in_them(finished):
    checkpoints = sorted(path for path in (finished / "bf16-1" / "checkpoints").iterdir() if path.is_dir())
    assert [path.name for path in checkpoints] == ["step_000010", "step_000020"]
    draft_parameters = 3 * (32 * 32 + 2 * 32)
    total = sum(path.stat().st_size for path in checkpoints[0].iterdir())
    assert total < draft_parameters * 24 + 60_000, f"{total} bytes"


def test_a_finished_run_says_so_and_does_nothing(finished, config_file, train_in_ranks):
    run = finished / "bf16-1"
    before = (run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*"))
    output = subprocess.run(
        [sys.executable, "-m", "longdraft.launch.train", str(config_file), f"train.run_dir={run}", "train.precision=bf16"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"Training is done already: 20 steps, checkpoint in {run}" in output.stdout
    assert before == ((run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*")))


def test_another_number_of_ranks_is_refused_by_name(finished, config_file):
    class Engine:
        class ranks:  # noqa: N801
            world_size = 2

    folder, saved = state.newest(finished / "bf16-1") or (None, None)
    assert folder is not None and saved is not None
    with pytest.raises(ValueError, match="was saved by 1 ranks and cannot be resumed by 2; start 1 ranks"):
        state.load(Engine, folder, saved)  # pyright: ignore[reportArgumentType]


def test_saved_config_is_the_resolved_one(finished, config_file):
    config = load_config(finished / "bf16-3" / "config.yaml")
    expected = ["train.zero_stage=3", "train.precision=bf16", f"train.run_dir={finished / 'bf16-3'}"]
    assert config == load_config(config_file, expected)
    found = state.newest(finished / "bf16-3")
    assert found is not None and state.saved_config(finished / "bf16-3", found[1]) == config
    assert json.loads((found[0] / state.STATE).read_text())["extra"]["heldout"]["positions"] > 0
