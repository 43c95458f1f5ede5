"""Two machines that share no files, or were given different configs: four real ranks, two in each of two folders."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longdraft.data_prep.shards import Row
from longdraft.train.config_file import Stage, load_config
from longdraft.train.setup import check_same

SHORT = ["train.steps=2", "optimizer.warmup_steps=1", "heldout.every=2", "heldout.rows=2"]
# What only the second machine is given, and the field that is then named, on all ranks. With other rows in a step or
# other validations, the ranks would wait for each other; with another rate, each would train its own share by it.
OTHERWISE = {
    "optimizer.peak_lr=1e-3": "optimizer.peak_lr: 0.005 on rank 0, but 0.001 on rank 2",
    "heldout.every=1": "heldout.every: 2 on rank 0, but 1 on rank 2",
    "draft.method=longspec": "draft.method: 'tokenswift' on rank 0, but 'longspec' on rank 2",
}


@pytest.fixture
def machines(tmp_path, target_folder, prepare) -> list[Path]:
    """Two folders with a target, rows in four shards and an earlier run each."""
    tokens = (np.arange(8 * 24).reshape(8, 24) * 7 % 97).astype(np.int32)
    shards = [[Row(row, [0, 24], [1, 24], [f"{i}"], [0])] for i, row in enumerate(tokens)]
    for split in ("train", "heldout"):
        prepare(tmp_path / "one" / "data" / split, 24, *shards)
    shutil.copytree(target_folder, tmp_path / "one" / "target")
    (tmp_path / "one" / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "one" / "run" / "lock").touch()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    return [tmp_path / "one", tmp_path / "two"]


def said_by(ranks: Sequence) -> list[str]:
    """What each rank printed; all must have failed."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        said = [output for output, _ in pool.map(lambda rank: rank.communicate(timeout=100), ranks)]
    assert all(rank.returncode in (1, 2) for rank in ranks), said
    return said


HERE = [*SHORT, "target.path=target", "data.path=data", "train.run_dir=run"]


def test_what_machines_do_not_share_is_named(machines, start_ranks, finish_ranks, tmp_path):
    actions: list[dict] = [{"stages": HERE, "there": [], "out": str(tmp_path / "said")}]
    actions += [{"stages": HERE, "there": [one], "out": str(tmp_path / one)} for one in OTHERWISE]
    finish_ranks(start_ranks(4, actions, machines=machines))
    for rank in range(4):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said == "train.run_dir: not every machine sees the first one's run; use shared storage"
        for one, expected in OTHERWISE.items():
            assert (tmp_path / f"{one}-{rank}").read_text().startswith(expected)


def test_other_stages_are_named(config_file):
    config = load_config(config_file)
    divided: Any = SimpleNamespace(gather=lambda own: [own, own[1:]])
    with pytest.raises(ValueError, match=r"^stages: they are not the same on rank 0 and on rank 1; "):
        check_same([Stage("short", config), Stage("long", config)], divided)


def test_each_machine_checks_all_of_its_rows(machines, start_ranks):
    """The shard of the second machine that is damaged would be that of a fourth local rank."""
    shutil.rmtree(machines[1] / "run")
    (machines[1] / "run").symlink_to(machines[0] / "run")
    file = machines[1] / "data" / "train" / "shard-00003.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = said_by(start_ranks(4, [{"main": HERE}], machines=machines))
    assert all("shard-00003.arrow has changed: its sha256 is " in one for one in said[::2]), said
    assert said[1::2] == ["", ""]  # each machine says it once


def test_a_machine_without_the_target_is_told_from_the_others(machines, start_ranks):
    """Its ranks stop before the others know of it; those lose them, and each says so."""
    (machines[1] / "target" / "config.json").unlink()
    said = said_by(start_ranks(4, [{"main": HERE}], machines=machines))
    for rank in range(2):
        assert said[rank].startswith(f"launch/train.py: error: rank {rank}: another rank failed or was killed (")
    assert said[2].startswith("launch/train.py: error: target ")
    assert [one.count("\n") for one in said] == [1, 1, 1, 0], said
