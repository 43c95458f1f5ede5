"""The shards of one folder, made by several calls, as on several machines, and put together by `merge`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft.data_prep.prepare import merge, prepare, work_folder
from longdraft.data_prep.settings import PrepareConfig, same_way
from longdraft.data_prep.tasks import Machine
from longdraft.launch.prepare import main


@pytest.fixture
def config(tmp_path, make_corpus):
    make_corpus(tmp_path / "corpus", 100)
    sources = same_way([str(tmp_path / "corpus")])
    return PrepareConfig(sources, tmp_path / "whole", 64, heldout_share=0.2, shard_bytes=4000)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", ["one folder", "a folder each"])
def test_shares_make_the_bytes_of_one_call(config, tiny_tokenizer, tmp_path, where, capsys):
    prepare(config, tiny_tokenizer, "hash")
    expected = files_of(config.out)
    outs = [tmp_path / (f"machine{i}" if where == "a folder each" else "shared") for i in (1, 2, 3)]
    for i, out in enumerate(outs, start=1):
        assert prepare(replace(config, out=out), tiny_tokenizer, "hash", machine=Machine(i, 3)) is None
        assert not (out / "manifest.json").exists()
    assert "shards, 2/3 -> " in capsys.readouterr().out
    if where == "a folder each":
        with pytest.raises(
            ValueError, match=r"\d+ of \d+ shards of .* are not there \(first: train-00000\); put the folders"
        ):
            merge(outs[1])
        for out in outs[1:]:
            shutil.copytree(out, outs[0], dirs_exist_ok=True)
    times = {path: path.stat().st_mtime_ns for path in outs[0].rglob("*.arrow")}
    manifest = merge(outs[0])
    assert {path: path.stat().st_mtime_ns for path in outs[0].rglob("*.arrow")} == times, (
        "merge wrote more than manifests"
    )
    assert files_of(outs[0]) == expected
    assert merge(outs[0]) == manifest
    assert capsys.readouterr().out.count("Already merged: ") == 1


def test_shares_of_two_plans_are_not_put_together(config, tiny_tokenizer, bos_tokenizer, tmp_path):
    other = replace(config, out=tmp_path / "other")
    prepare(config, tiny_tokenizer, "hash", machine=Machine(1, 2))
    prepare(other, bos_tokenizer, "another", machine=Machine(2, 2))
    shutil.copytree(other.out / "train", config.out / "train", dirs_exist_ok=True)
    shutil.copytree(other.out / "heldout", config.out / "heldout", dirs_exist_ok=True)
    shutil.copytree(other.out / "progress", config.out / "progress", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"\d+ of \d+ shards of .* are of another plan .* \(first: train-00001\)"):
        merge(config.out)
    made = prepare(config, tiny_tokenizer, "hash")
    assert made == prepare(replace(config, out=tmp_path / "whole"), tiny_tokenizer, "hash")


def test_another_cut_of_the_same_sources_is_another_plan(config, tiny_tokenizer, monkeypatch):
    first = prepare(replace(config, shard_bytes=None), tiny_tokenizer, "hash", machine=Machine(1, 4))
    assert first is None
    monkeypatch.setattr("longdraft.data_prep.plan.SHARD_TEXT_BYTES", (4000, 8000))
    with pytest.raises(ValueError, match="shards hold other documents"):
        prepare(replace(config, shard_bytes=None), tiny_tokenizer, "hash")


def test_a_share_that_was_lost_is_made_by_a_call_for_all(config, tiny_tokenizer):
    prepare(config, tiny_tokenizer, "hash", machine=Machine(2, 2))
    prepare(config, tiny_tokenizer, "hash")
    found = files_of(config.out)
    shutil.rmtree(config.out)
    prepare(config, tiny_tokenizer, "hash")
    assert files_of(config.out) == found


def test_records_of_another_version_are_named_and_left_alone(config, tiny_tokenizer):
    prepare(config, tiny_tokenizer, "hash", machine=Machine(1, 2))
    record = next((config.out / "progress").glob("*.json"))
    found = json.loads(record.read_text())
    record.write_text(json.dumps({"address": found["address"], "shard": found["shards"][0]}))
    before = files_of(config.out)
    for call in (lambda: prepare(config, tiny_tokenizer, "hash"), lambda: merge(config.out)):
        with pytest.raises(ValueError, match=rf"{record.name} was written by another version.*finish .* that version"):
            call()
    assert files_of(config.out) == before


def test_shares_run_side_by_side_and_a_whole_call_waits_for_none(config, tiny_tokenizer):
    config.out.mkdir()
    with work_folder(config.out, {"address": ""}).locked(Machine(1, 2)):
        prepare(config, tiny_tokenizer, "hash", machine=Machine(2, 2))
        with pytest.raises(ValueError, match="another process is preparing"):
            prepare(config, tiny_tokenizer, "hash", machine=Machine(1, 2))
        with pytest.raises(ValueError, match="another process is preparing"):
            prepare(config, tiny_tokenizer, "hash")
        with pytest.raises(ValueError, match="another process is preparing"):
            merge(config.out)
    with pytest.raises(ValueError, match="seed is 0 there and 1 here"):
        prepare(replace(config, seed=1), tiny_tokenizer, "hash", machine=Machine(1, 2))
    with pytest.raises(ValueError, match="overwrite would take the other shards' work away"):
        prepare(replace(config, overwrite=True), tiny_tokenizer, "hash", machine=Machine(1, 2))


def test_on_the_command_line(config, tmp_path, capsys):
    argv = f"--source {tmp_path}/corpus --target smollm2-135m --out {tmp_path}/out --seq-len 64 --workers 1".split()
    for i in (1, 2):
        main([*argv, "--shard", f"{i}/2"])
    main(["--merge", "--out", f"{tmp_path}/out"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("Merged: ")
    for wrong, said in (("3/2", r"shard is 3/2, valid: 1/n to n/n"), ("1", "the form i/n"), ("a/b", "the form i/n")):
        with pytest.raises(SystemExit):
            main([*argv, "--shard", wrong])
        assert said in capsys.readouterr().err
    for argv, said in (
        (["--merge"], "required: --out"),
        (["--merge", "--out", str(tmp_path / "corpus")], "was not begun by prepare"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert said in capsys.readouterr().err


def test_the_address_tells_content_from_content(config, tiny_tokenizer, bos_tokenizer, tmp_path, capsys):
    config = replace(config, out=tmp_path / "sets" / "corpus-{address}")
    first = prepare(config, tiny_tokenizer, "hash")
    assert prepare(replace(config, workers=2), tiny_tokenizer, "hash") == first
    assert "Already prepared" in capsys.readouterr().out.splitlines()[-1]
    other = prepare(config, bos_tokenizer, "another hash")
    (tmp_path / "corpus" / "new.txt").write_text("new")
    grown = prepare(config, tiny_tokenizer, "hash")
    addresses = {manifest["address"] for manifest in (first, other, grown)}
    found = sorted(path.name for path in (tmp_path / "sets").iterdir())
    assert found == sorted(f"corpus-{address[:12]}" for address in addresses) and len(found) == 3
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "corpus", moved / "corpus")
    again = prepare(replace(config, sources=same_way([str(moved / "corpus")])), tiny_tokenizer, "hash")
    assert again["address"] == grown["address"], "where the sources lie is no part of what they are"
    assert json.loads((tmp_path / "sets" / f"corpus-{grown['address'][:12]}" / "plan.json").read_text())["address"]
