"""What breaks while training ends in a clear message, and the run goes on to the bytes of an unbroken one. Two real
ranks, real signals, a real limit on what can be written; once the command itself."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from longdraft.data_prep.shards import Row, ShardSet
from longdraft.train import checkpoint
from longdraft.train.config_file import load_config
from longdraft.train.loop import train
from longdraft.train.ranks import TIMEOUT, Ranks, TrainingError
from longdraft.train.setup import open_run, open_target
from longdraft.train.tracking import read_metrics

STEPS, SAVE_EVERY = 30, 5
# Four passes a step, each of tens of milliseconds: a signal can hit one.
PLAN = [f"train.steps={STEPS}", "train.micro_batch=1", "train.global_batch=8", f"train.save_every={SAVE_EVERY}",
    "train.zero_stage=3", "train.keep_checkpoints=3", f"heldout.every={STEPS}", "heldout.rows=2",
]  # fmt: skip
OVERFLOWS = {"1": [], "3": [], "bf16": ["train.precision=bf16"]}
SHORT = [
    "train.steps=3", "optimizer.warmup_steps=1", "train.save_every=1", "train.keep_checkpoints=9", "heldout.every=3",
    "heldout.rows=2",
]  # fmt: skip


def write_shards(folder: Path, prepare) -> None:
    """Prepared rows in two shards a split, of which the second one of `train`, the second rank's to read, is damaged:
    one bit of a token in the middle is another, and the size stays."""
    for split in ("train", "heldout"):
        generator = np.random.Philox(key=np.array([1, len(split)], dtype=np.uint64))
        tokens = (generator.random_raw((18, 24)) % 97).astype(np.int32)
        rows = [Row(own, [0, 24], [1, 24], [f"{i}"], [0]) for i, own in enumerate(tokens)]
        prepare(folder / split, 24, rows[:9], rows[9:])
    file = folder / "train" / "shard-00001.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def wait_for_step(run_dir: Path, step: int, processes: Sequence[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 400
    while max([record["step"] for record in read_metrics(run_dir)], default=0) < step:
        for process in processes:
            assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def listen(processes: Sequence[subprocess.Popen]) -> list[Callable[[], str]]:
    """Read what the ranks print as they print it, since a full pipe would block them. Each function returned waits for
    one rank to end."""
    said = [ThreadPoolExecutor(1).submit(process.stdout.read) for process in processes if process.stdout]
    return [one.result for one in said]


def newest_step(run_dir: Path) -> int:
    found = checkpoint.newest(run_dir)
    assert found is not None
    return found[1]["step"]


def weights_file(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}" / checkpoint.WEIGHTS


@pytest.fixture(scope="module")
def story(tmp_path_factory, config_file, prepare, start_ranks) -> SimpleNamespace:
    """The run `broken` through every fault to its end, and beside it `unbroken`. `said` has what each process printed,
    `status` its exit status."""
    folder = tmp_path_factory.mktemp("faults")
    story = SimpleNamespace(folder=folder, broken=folder / "broken", said={}, status={})
    command = [*PLAN, f"train.run_dir={story.broken}"]
    write_shards(folder / "damaged", prepare)
    _first_ranks(story, command, start_ranks)
    _launched(story, command, config_file)
    _last_ranks(story, command, start_ranks)
    return story


def _first_ranks(story: SimpleNamespace, command: list[str], start_ranks) -> None:
    """Faults that do not end a process, and then kill -9 of the second rank."""
    folder = story.folder
    actions: list[dict] = [{"train": [*PLAN, f"train.run_dir={folder / 'unbroken'}"]}]
    for name, overrides in OVERFLOWS.items():
        stage = [f"train.zero_stage={name if name in '123' else 1}"]
        actions.append({"train": [*SHORT, *stage, *overrides, f"train.run_dir={folder / name}"], "overflow": 2})
    actions += [
        {"train": [*SHORT, f"train.run_dir={folder / 'too-many'}", "train.max_skipped=0"], "overflow": 2,
            "out": str(folder / "too-many-said")},
        # Two steps of two passes: looks before each, in its first pass, after it.
        {"train": [*SHORT, f"train.run_dir={folder / 'stopped'}"], "stop": 7},
        {"train": [*SHORT, f"train.run_dir={folder / 'damaged-run'}", f"data.path={folder / 'damaged'}"],
            "out": str(folder / "damaged-said")},
        {"train": command, "stop": 3},  # within the first step
        {"main": command},
    ]  # fmt: skip
    ranks = start_ranks(2, actions)
    said = listen(ranks)
    wait_for_step(story.broken, 7, ranks)
    ranks[1].kill()
    story.status["first"] = ranks[0].wait(timeout=100)  # far less than the collectives' own limit
    ranks[1].wait()
    story.said["first"] = said[0]()


def _launched(story: SimpleNamespace, command: list[str], config_file: Path) -> None:
    """The newest checkpoint is truncated. Then the command itself, until a SIGTERM."""
    found = checkpoint.newest(story.broken)
    assert found is not None
    file = next(found[0].glob("optimizer-*"))
    file.write_bytes(file.read_bytes()[:-1])
    written = read_metrics(story.broken)[-1]["step"]  # some of which will be written again
    launched = subprocess.Popen(
        [sys.executable, "-m", "longdraft.launch.cli", "train", str(config_file), *command, "--num-gpus", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = listen([launched])
    wait_for_step(story.broken, written + 3, [launched])
    launched.send_signal(signal.SIGTERM)
    story.status["launched"] = launched.wait(timeout=100)
    story.said["launched"] = said[0]()


def _last_ranks(story: SimpleNamespace, command: list[str], start_ranks) -> None:
    """A full disk for one rank, then for the other, then the end; and a run that cannot even begin."""
    folder = story.folder
    story.saved = newest_step(story.broken)
    kept = weights_file(story.broken, story.saved).read_bytes()
    actions = [
        {"limit": {"1": 20_000}},
        {"train": command, "out": str(folder / "full-1")},
        {"limit": {"0": 20_000}},
        {"train": command, "out": str(folder / "full-0")},
        {"limit": {}},
        {"copy": [str(story.broken), str(folder / "after-full")]},
        {"train": command},
        {"limit": {"0": 100}},
        {"main": [*SHORT, f"train.run_dir={folder / 'never'}"]},
    ]
    ranks = start_ranks(2, actions)
    said = listen(ranks)
    story.status["last"] = [rank.wait(timeout=280) for rank in ranks]
    story.said["last"], story.said["last-1"] = (one() for one in said)
    assert weights_file(folder / "after-full", story.saved).read_bytes() == kept


def test_the_run_ends_in_the_bytes_of_an_unbroken_one(story, losses):
    """After a wish to stop within a step, kill -9 of a rank, a truncated checkpoint, SIGTERM to the command and a full
    disk on either rank."""
    expected = weights_file(story.folder / "unbroken", STEPS).read_bytes()
    assert weights_file(story.broken, STEPS).read_bytes() == expected, story.said["last"]
    assert losses(story.broken) == losses(story.folder / "unbroken")


def test_a_wish_to_stop_is_heard_between_passes(story):
    """Rank 1 looks for the fourth time in the first step's third pass of four, and the last pass hears of it: nothing
    of the step is done."""
    assert f"Stopped after 0 of {STEPS} steps" in story.said["first"]
    assert "Stopped after 2 of 3 steps" in story.said["first"]  # between passes of the third step


def test_the_other_ranks_end_when_one_is_killed(story):
    """Without a launcher: whatever waits for the dead rank fails at once, and says so."""
    assert story.status["first"] == 1
    assert "rank 0: another rank failed or was killed" in story.said["first"]
    assert "the same command resumes from the newest checkpoint" in story.said["first"]


def test_the_command_stops_and_says_where(story):
    assert story.status["launched"] == 0
    step = re.search(rf"Stopped after (\d+) of {STEPS} steps", story.said["launched"])
    assert step is not None and int(step[1]) == story.saved < STEPS


@pytest.mark.parametrize("full", [0, 1])
def test_a_full_disk_ends_the_save_on_all_ranks(story, full):
    said = [(story.folder / f"full-{full}-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert said[0].startswith(f"rank {full}: ")
    left = checkpoint.finished_folders(story.folder / "after-full" / "checkpoints")
    assert int(left[-1].name[5:]) == story.saved


def test_a_run_that_cannot_write_at_all_ends_on_all_ranks(story):
    assert 0 not in story.status["last"], story.said["last"]
    assert "File too large" in story.said["last"] and "Traceback" not in story.said["last"]
    assert "rank 1: another rank failed or was killed" in story.said["last-1"]


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_step_whose_gradient_is_no_number_is_left_out(story, losses, name):
    run_dir = story.folder / name
    first, second, third = (weights_file(run_dir, step).read_bytes() for step in (1, 2, 3))
    assert first == second != third
    assert [record["skipped"] for record in read_metrics(run_dir) if "loss" in record] == [0, 1, 1]
    assert np.isfinite(losses(run_dir)).all()
    assert "The gradient of step 2 is not finite; the step is skipped" in story.said["first"]
    reference = load_file(weights_file(story.folder / "1", 3))
    tolerance = 0.1 if name == "bf16" else 1e-5  # and none of it carries over to the next step
    for key, weight in load_file(weights_file(run_dir, 3)).items():
        error = ((weight.float() - reference[key]).norm() / reference[key].norm()).item()
        assert error <= tolerance, f"{key}: relative error {error}"


def test_too_many_of_them_stop_the_run(story):
    for rank in range(2):
        said = (story.folder / f"too-many-said-{rank}").read_text()
        assert "step 2: losses or gradients that were not finite: 1, more than train.max_skipped = 0;" in said
    assert newest_step(story.folder / "too-many") == 1


def test_a_damaged_shard_is_named_with_its_checksums_on_all_ranks(story):
    rows = ShardSet(story.folder / "damaged" / "train")
    expected = rows.manifest["shards"][1]["sha256"]
    for rank in range(2):
        said = (story.folder / f"damaged-said-{rank}").read_text()
        assert "shard-00001.arrow has changed: its sha256 is " in said and f", not {expected}" in said
        assert "shard-00000" not in said


def test_weights_that_are_no_numbers_are_never_saved(config_file, alone, tmp_path):
    config = load_config(config_file, [*SHORT, f"train.run_dir={tmp_path}", "train.save_every=2", "train.steps=2"])
    target = open_target(config, alone)
    train(config, alone, target)
    opened = open_run(config, alone, target)
    next(opened.engine.draft.parameters()).data.view(-1)[0] = torch.inf
    with pytest.raises(TrainingError, match=r"^step 3: weights of the draft are not finite"):
        checkpoint.save(opened.engine, tmp_path, {"step": 3}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]


@dataclass(frozen=True)
class Divided(Ranks):
    """Another machine has other files."""

    def gather(self, value):
        return [value, {bool: lambda: False, dict: lambda: dict.fromkeys(value)}.get(type(value), lambda: value)()]


@pytest.mark.parametrize(("there", "field"), [(False, "train.run_dir"), (True, "data.path")])
def test_machines_with_other_files_do_not_train_together(config_file, alone, monkeypatch, tmp_path, there, field):
    config = load_config(config_file, [*SHORT, f"train.run_dir={tmp_path}"])
    divided = Divided(**vars(alone))
    with pytest.raises(ValueError, match=rf"^{field}: "):
        open_run(config, divided, open_target(config, alone)) if there else train(config, divided, None)  # pyright: ignore


def test_ranks_wait_for_one_another_as_long_as_it_may_take(alone):
    """This group's time-out holds for what the first rank alone prepares, and for everything else the ranks wait
    for."""
    group = alone.control or dist.group.WORLD
    assert group is not None
    assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT >= timedelta(minutes=60)
    assert alone.from_first(lambda: 7) == 7 and alone.gather("a") == ["a"]
    with pytest.raises(TrainingError, match=r"^rank 0: .*'nowhere'"):
        alone.from_first(lambda: Path("nowhere").read_bytes())
