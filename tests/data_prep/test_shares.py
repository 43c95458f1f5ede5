"""The shards of one folder, made by several calls, as on several machines, and put together by `merge`."""

import json
import shutil
from pathlib import Path

import pytest

from longdraft.data_prep.prepare import merge, prepare
from longdraft.data_prep.recipe import PrepareConfig, changed, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.tasks import Machine
from longdraft.launch.prepare import main
from longdraft.models.fingerprint import tokenizer_hash


@pytest.fixture
def config(tmp_path, make_corpus):
    make_corpus(tmp_path / "corpus", 30)
    sources = same_way([str(tmp_path / "corpus")])
    return PrepareConfig(sources=sources, out=tmp_path / "whole", seq_len=64, heldout_share=0.2, shard_bytes=8000)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_shares_made_apart_are_put_together(config, tiny_tokenizer, tmp_path, capsys):
    prepare(config, tiny_tokenizer, "hash")
    expected = files_of(config.out)
    outs = [tmp_path / f"machine{i}" for i in (1, 2, 3)]
    for i, out in enumerate(outs, start=1):
        assert prepare(changed(config, out=out), tiny_tokenizer, "hash", machine=Machine(i, 3)) is None
        assert not (out / "manifest.json").exists()
    assert "shards, 2/3 -> " in capsys.readouterr().out
    with pytest.raises(ValueError, match="train-00000"):
        merge(outs[1])
    for out in outs[1:]:
        shutil.copytree(out, outs[0], dirs_exist_ok=True)
    times = {path: path.stat().st_mtime_ns for path in outs[0].rglob("*.arrow")}
    manifest = merge(outs[0])
    assert {path: path.stat().st_mtime_ns for path in outs[0].rglob("*.arrow")} == times
    assert files_of(outs[0]) == expected
    assert merge(outs[0]) == manifest
    assert capsys.readouterr().out.count("Already merged: ") == 1


def test_shares_of_two_plans_are_not_put_together(config, tiny_tokenizer, bos_tokenizer, tmp_path):
    other = changed(config, out=tmp_path / "other")
    prepare(config, tiny_tokenizer, "hash", machine=Machine(1, 2))
    prepare(other, bos_tokenizer, "another", machine=Machine(2, 2))
    shutil.copytree(other.out / "train", config.out / "train", dirs_exist_ok=True)
    shutil.copytree(other.out / "heldout", config.out / "heldout", dirs_exist_ok=True)
    shutil.copytree(other.out / "progress", config.out / "progress", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="train-00001"):
        merge(config.out)
    made = prepare(config, tiny_tokenizer, "hash")
    assert made == prepare(changed(config, out=tmp_path / "whole"), tiny_tokenizer, "hash")


def test_another_cut_of_the_same_sources_is_another_plan(config, tiny_tokenizer, monkeypatch):
    first = prepare(changed(config, shard_bytes=None), tiny_tokenizer, "hash", machine=Machine(1, 4))
    assert first is None
    monkeypatch.setattr("longdraft.data_prep.prepare.SHARD_TEXT_BYTES", (4000, 8000))
    with pytest.raises(ValueError, match="units"):
        prepare(changed(config, shard_bytes=None), tiny_tokenizer, "hash")


def test_on_the_command_line(tmp_path, make_corpus, read_back, smollm2, capsys):
    """For a real target: a share, all that is left, found finished, and with other settings refused."""
    corpus, out = make_corpus(tmp_path / "corpus", 20), tmp_path / "new" / "out"
    argv = f"--source {tmp_path}/corpus --target smollm2-135m --out {out} --seq-len 128 --heldout-share 0.2 --workers 1"
    for more in (["--shard", "2/2"], []):
        main([*argv.split(), *more])
    assert f"documents) -> {out}\n" in capsys.readouterr().out
    train, heldout = ShardSet(out / "train"), ShardSet(out / "heldout")
    assert read_back(train, smollm2) | read_back(heldout, smollm2) == corpus
    assert train.manifest["tokenizer_sha256"] == tokenizer_hash(smollm2)
    assert train.manifest["vocab_size"] == 49152
    main(["--merge", "--out", str(out), "--max-bad-share", "0"])
    assert capsys.readouterr().out.startswith("Already merged: ")
    mistakes = [
        ([*argv.split(), "--seed", "1"], "seed is 0"),
        (["--merge", "--out", f"{tmp_path}/corpus"], "plan.json"),
    ]
    mistakes += [([*argv.split(), "--shard", wrong], "--shard") for wrong in ("3/2", "1", "a/b")]
    mistakes.append((["--source", "stdlib", "--target", "none", "--out", "x", "--seq-len", "1"], "error: seq_len: "))
    for wrong, named in mistakes:
        with pytest.raises(SystemExit) as stop:
            main(wrong)
        assert stop.value.code == 2 and named in capsys.readouterr().err


def test_the_address_tells_content_from_content(config, tiny_tokenizer, bos_tokenizer, tmp_path, capsys):
    config = changed(config, out=tmp_path / "sets" / "corpus-{address}")
    first = prepare(config, tiny_tokenizer, "hash")
    assert prepare(changed(config, workers=2), tiny_tokenizer, "hash") == first
    assert "Already prepared" in capsys.readouterr().out.splitlines()[-1]
    other = prepare(config, bos_tokenizer, "another hash")
    (tmp_path / "corpus" / "new.txt").write_text("new")
    grown = prepare(config, tiny_tokenizer, "hash")
    addresses = {manifest["address"] for manifest in (first, other, grown)}
    found = sorted(path.name for path in (tmp_path / "sets").iterdir())
    assert found == sorted(f"corpus-{address[:12]}" for address in addresses) and len(found) == 3
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "corpus", moved / "corpus")
    again = prepare(changed(config, sources=same_way([str(moved / "corpus")])), tiny_tokenizer, "hash")
    assert again["address"] == grown["address"], "where the sources lie is no part of what they are"
    assert json.loads((tmp_path / "sets" / f"corpus-{grown['address'][:12]}" / "plan.json").read_text())["address"]
