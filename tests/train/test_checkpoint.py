"""Which checkpoint a run goes on from, what stays in its folder, and that no two runs share one. A flipped bit in any
file is named, and the checkpoint is neither trained on nor exported. Killed runs: test_elastic.py, test_faults.py."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from longdraft.launch import cli
from longdraft.models.draft_folder import load_draft
from longdraft.models.files import locked
from longdraft.train import checkpoint
from longdraft.train.checkpoint import DIGESTS, FORMAT, unseal
from longdraft.train.config_file import load_config
from longdraft.train.loop import train

STEPS = (10, 20)  # of the runs' checkpoints


def flip(file: Path, place: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def folder(run: Path, step: int) -> Path:
    return checkpoint.checkpoint_folder(run) / f"step_{step:06d}"


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A run of one rank, 20 steps, to be damaged."""
    return shutil.copytree(runs / "bf16-1-1", tmp_path / "run")


@pytest.fixture
def go_on(train_command, config_file):
    """(run, override, ...) -> status and output of the command that made it."""

    def call(run, *overrides):
        return train_command(run / "config.yaml", f"train.run_dir={run}", *overrides)

    return call


@pytest.mark.parametrize("name", ["fp32-1-1", "bf16-2-2", "longspec-fp32-2-3"])
def test_every_file_has_its_digest(runs, name):
    found = checkpoint.newest(runs / name)
    assert found is not None
    files = {path.name: path for path in found[0].iterdir()}
    assert files.keys() - {checkpoint.STATE} == found[1][DIGESTS].keys()
    for file, digest in found[1][DIGESTS].items():
        assert hashlib.sha256(files[file].read_bytes()).hexdigest() == digest, file


def test_a_run_goes_back_before_a_flipped_bit(runs, run, go_on):
    """It ends with the bytes that it would have ended with."""
    file = folder(run, 20) / "optimizer-00000.safetensors"
    flip(file)
    status, said = go_on(run)
    assert status == 0
    assert f"{folder(run, 20)} is damaged ({file.name} is not as it was saved) and is skipped" in said
    assert "step 10 to 20" in said
    expected = folder(runs / "bf16-1-1", 20) / checkpoint.WEIGHTS
    assert (folder(run, 20) / checkpoint.WEIGHTS).read_bytes() == expected.read_bytes()


def test_a_run_without_a_sound_checkpoint_says_so(run, go_on):
    for step in STEPS:
        flip(folder(run, step) / "optimizer-00000.safetensors")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = go_on(run)
    assert status == 2 and said.count("is not as it was saved") == 2
    assert f"train.run_dir: every checkpoint in {run} is damaged; restore one" in said and "Traceback" not in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_export_goes_back_before_a_flipped_bit(run, capsys, tmp_path):
    flip(folder(run, 20) / checkpoint.WEIGHTS, 0.9)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "former")]) == 0
    printed = capsys.readouterr().out
    assert f"{folder(run, 20)} is damaged (draft.safetensors is not as it was saved) and is skipped" in printed
    assert f"Exported step 10 of {run}" in printed
    weights = load_draft(tmp_path / "former").state_dict()
    for name, weight in load_file(folder(run, 10) / checkpoint.WEIGHTS).items():
        assert weights[name].equal(weight), name
    flip(folder(run, 10) / checkpoint.WEIGHTS, 0.9)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "none")]) == 2
    assert f"every checkpoint in {run} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_every_bit_of_a_state_file_counts(runs):
    """Whatever can still be read has all the values that were saved: names of fields, digests and the file's own digest
    included."""
    text = (folder(runs / "bf16-1-1", 20) / checkpoint.STATE).read_bytes()
    saved = unseal(text)
    assert saved["format"] == FORMAT
    for place in range(len(text)):
        for bit in {place % 8, 5}:  # bit 5 changes the case of a letter
            damaged = bytearray(text)
            damaged[place] ^= 1 << bit
            with suppress(ValueError):
                assert unseal(bytes(damaged)) == saved, damaged[place - 20 : place + 20]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{}", b"[]", b'{"step": "7"}', b'{"sha256": 7}', b'{"sha256": {}}'])
def test_what_is_no_state_file_is_none(content):
    with pytest.raises(ValueError, match=r"^state\.json "):
        unseal(content)


def test_a_run_goes_on_where_its_rows_were_moved(run, go_on):
    shutil.rmtree(folder(run, 20))
    rows = load_config(run / "config.yaml").data.path
    shutil.copytree(rows, run / "rows")
    shutil.copytree(rows, run / "others")
    shutil.rmtree(run / "others" / "train")
    shutil.copytree(run / "others" / "heldout", run / "others" / "train")
    for place, status, told in ((run / "others", 2, "data.path: "), (run / "rows", 0, "step 10 to 20")):
        assert (found := go_on(run, f"data.path={place}"))[0] == status
        assert told in found[1], found[1]


def test_steps_of_more_than_six_digits_are_found(tmp_path):
    for name in ("step_1000000", "step_999999", "step_0000020", "step_000030-copy", "tmp-step_000040"):
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoint.STATE).touch()
    found = [path.name for path in checkpoint.finished_folders(tmp_path)]
    assert found == ["step_0000020", "step_999999", "step_1000000"]


ALONE = SimpleNamespace(rank=0, world_size=1, from_first=lambda work: work(), gather=lambda value: [value])


def test_a_run_that_never_opened_leaves_nothing_to_continue(config_file, tmp_path):
    """A typo in the first command must not get in the way of the corrected one."""
    config = load_config(config_file, ["data.path=nowhere", f"train.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="nowhere"):
        train(config, ALONE, None)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "run" / "config.yaml").exists()
    with locked(tmp_path / "run" / "lock", "train.run_dir", "busy"):  # and it released the lock
        pass


def test_two_runs_do_not_share_a_folder(config_file, tmp_path):
    config = load_config(config_file, [f"train.run_dir={tmp_path}"])
    with (
        locked(tmp_path / "lock", "train.run_dir", "busy"),
        pytest.raises(ValueError, match=r"^train\.run_dir: another process trains in"),
    ):
        train(config, ALONE, None)  # pyright: ignore[reportArgumentType]


def test_a_folder_that_cannot_be_written_is_named(config_file, tmp_path):
    """On all ranks, since `from_first` raises the first rank's error on the others."""
    (tmp_path / "file").touch()
    for run in (tmp_path / "file", tmp_path / "file" / "run"):
        config = load_config(config_file, [f"train.run_dir={run}"])
        with pytest.raises(ValueError, match=rf"^train\.run_dir: {run} cannot be written"):
            train(config, ALONE, None)  # pyright: ignore[reportArgumentType]


def test_only_the_newest_are_kept_and_no_frozen_weight_is_in_them(runs):
    checkpoints = sorted(path for path in (runs / "bf16-1-1" / "checkpoints").iterdir() if path.is_dir())
    assert [path.name for path in checkpoints] == ["step_000010", "step_000020"]
    draft_parameters = 3 * (32 * 32 + 2 * 32)
    total = sum(path.stat().st_size for path in checkpoints[0].iterdir())
    assert total < draft_parameters * 24 + 60_000, f"{total} bytes"


def test_a_finished_run_says_so_and_does_nothing(runs, losses):
    run = runs / "fp32-1-1"
    assert f"Training is done already: 20 steps, checkpoint in {run}" in (runs / "output.txt").read_text()
    assert len(losses(run)) == 20


def test_saved_config_is_the_resolved_one(runs, config_file):
    config = load_config(runs / "bf16-1-3" / "config.yaml")
    expected = ["train.zero_stage=3", "train.precision=bf16", f"train.run_dir={runs / 'bf16-1-3'}"]
    assert config == load_config(config_file, [*expected, "draft.out_norm_init=target"])
    found = checkpoint.newest(runs / "bf16-1-3")
    assert found is not None and checkpoint.saved_config(runs / "bf16-1-3", found[1]) == config
    assert json.loads((found[0] / checkpoint.STATE).read_text())["extra"]["heldout"]["positions"] > 0
