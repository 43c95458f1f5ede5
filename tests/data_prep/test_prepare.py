import gzip
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep import prepare as prepare_module
from longdraft.data_prep import shard_task
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.models.schema import validate


@pytest.fixture
def corpus(tmp_path, make_corpus):
    folder = tmp_path / "corpus"
    return folder, make_corpus(folder, 60)


@pytest.fixture
def config(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SHARD_TEXT_BYTES", (20_000, 20_000))
    return PrepareConfig(sources=same_way([str(corpus[0])]), out=tmp_path / "out", seq_len=64, heldout_share=0.2)


def splits(config):
    return ShardSet(config.out / "train"), ShardSet(config.out / "heldout")


@pytest.mark.parametrize("fixture", ["tiny_tokenizer", "bos_tokenizer"])
def test_shards_give_the_sources_back_byte_for_byte(config, corpus, read_back, request, fixture):
    tokenizer = request.getfixturevalue(fixture)
    manifest = prepare(config, tokenizer, "hash")
    bos = [tokenizer.bos_token_id] if fixture == "bos_tokenizer" else []
    assert manifest["bos_token_ids"] == bos and read_back(config.out, tokenizer, bos) == corpus[1]
    assert 0.1 < manifest["splits"]["heldout"]["documents"] / len(corpus[1]) < 0.3
    for name, shards in zip(("train", "heldout"), splits(config), strict=True):
        shards.verify()
        counted = manifest["splits"][name]
        rows = [shards[i] for i in range(len(shards))]
        assert counted["rows"] == len(shards) > 1
        assert counted["tokens"] == sum(row["borders"][-1] for row in rows) == sum(row["loss"].sum() for row in rows)
        assert counted["pieces"] == sum(len(row["borders"]) - 1 for row in rows)
        assert (counted["bad"], counted["dropped"]) == ({}, {})
        assert all((row["tokens"][row["borders"][-1] :] == tokenizer.eos_token_id).all() for row in rows)


def test_manifest_says_what_was_made(config, tiny_tokenizer, capsys):
    manifest = prepare(config, tiny_tokenizer, "abc")
    assert manifest == json.loads((config.out / "manifest.json").read_text())
    split = splits(config)[0].manifest
    expected = {
        **{"tokenizer_sha256": "abc", "vocab_size": len(tiny_tokenizer), "seq_len": 64, "documents_mode": "pack"},
        **{"documents_end_with_eos": True, "eos_token_id": tiny_tokenizer.eos_token_id, "bos_token_ids": []},
        **{"heldout_share": 0.2, "seed": 0, "max_tokens": None},
    }
    assert split.items() >= expected.items() <= manifest.items()
    plan = json.loads((config.out / "plan.json").read_text())
    assert list(plan["sources"])[:2] == ["corpus/deep/file001.txt", "corpus/deep/file003.txt"]
    line = capsys.readouterr().out
    assert line.startswith(f"Prepared: {manifest['splits']['train']['rows']:,} train and")
    assert line.endswith(f"0 bad and 0 dropped documents) -> {config.out}\n")
    assert str(config.out.parent) not in (config.out / "manifest.json").read_text()


def test_second_call_is_a_no_op_that_says_so(config, tiny_tokenizer, capsys, monkeypatch):
    first = prepare(config, tiny_tokenizer, "hash")
    before = {path: path.stat().st_mtime_ns for path in config.out.rglob("*")}
    capsys.readouterr()
    monkeypatch.setattr(prepare_module, "make_shards_of", None)
    assert prepare(config.model_copy(update={"workers": 2}), tiny_tokenizer, "hash") == first
    assert capsys.readouterr().out.startswith("Already prepared: ")
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*")} == before


def test_other_settings_tokenizer_or_sources_are_named(config, corpus, tiny_tokenizer, bos_tokenizer):
    prepare(config, tiny_tokenizer, "hash")
    with pytest.raises(ValueError, match=r"seed is 0 .*seq_len is 64"):
        prepare(config.model_copy(update={"seq_len": 32, "seed": 1}), tiny_tokenizer, "hash")
    with pytest.raises(ValueError, match="tokenizer_sha256 is hash there and other here"):
        prepare(config, bos_tokenizer, "other")
    (corpus[0] / "file000.txt").write_text("changed")
    (corpus[0] / "file002.txt").unlink()
    (corpus[0] / "new.txt").write_text("new")
    with pytest.raises(ValueError, match=r"corpus/file000\.txt"):
        prepare(config, tiny_tokenizer, "hash")


def test_copies_of_a_document_are_on_one_side(tmp_path, tiny_tokenizer):
    texts = [f"text number {i}" for i in range(40)]
    for copy in ("one", "two"):
        (tmp_path / "in" / copy).mkdir(parents=True)
        for i, text in enumerate(texts):
            (tmp_path / "in" / copy / f"{i}.txt").write_text(text)
    (tmp_path / "in/three.jsonl").write_text("".join(json.dumps({"text": text, "x": 1}) + "\n" for text in texts))
    config = PrepareConfig(
        sources=same_way([str(tmp_path / "in")]), out=tmp_path / "out", seq_len=16, heldout_share=0.3
    )
    manifest = prepare(config, tiny_tokenizer, "hash")
    assert manifest["splits"]["heldout"]["documents"] % 3 == 0
    sides = [{name for i in range(len(split)) for name, _ in split.pieces(i)} for split in splits(config)]
    for i in range(40):
        copies = {f"in/one/{i}.txt", f"in/two/{i}.txt", f"in/three.jsonl:{i + 1}"}
        assert [len(copies & side) for side in sides] in ([3, 0], [0, 3])


@pytest.mark.parametrize(("mode", "max_tokens"), [("pack", 20_000), ("first", 5_000)])
def test_max_tokens_bounds_both_splits_together(config, corpus, tiny_tokenizer, joined, mode, max_tokens):
    limited = config.model_copy(update={"max_tokens": max_tokens, "documents": mode})
    manifest = prepare(limited, tiny_tokenizer, "hash")
    kept = sum(split["tokens"] for split in manifest["splits"].values())
    assert 0.7 * max_tokens < kept <= max_tokens
    if mode == "pack":  # documents from both kinds of files, all whole but for those that reach a task's budget
        n_tasks = len([*config.out.rglob("*.arrow")])
        assert kept > max_tokens - n_tasks
        ids = {name: [token for token, _ in pairs] for name, pairs in joined(limited.out).items()}
        assert 5 < sum(".txt" in name for name in ids) < len(ids)
        cut = [name for name in ids if ids[name][-1] != tiny_tokenizer.eos_token_id]
        assert 0 < len(cut) <= n_tasks
        for name, found in ids.items():
            text, whole = tiny_tokenizer.decode(found[: len(found) - (name not in cut)]), corpus[1][name].decode()
            assert whole.startswith(text.rstrip("\ufffd")) if name in cut else text == whole


def test_bad_documents_are_counted_and_named(config, corpus, tiny_tokenizer, capsys):
    (corpus[0] / "empty.txt").touch()
    (corpus[0] / "latin.txt").write_bytes("café".encode("latin-1"))
    with (corpus[0] / "lines.jsonl").open("a") as stream:
        stream.write('{"text": "cut off\n{"other": 1}\n')
    bad = {
        "empty": "empty.txt",
        "bad_utf8": "latin.txt",
        "bad_json": "lines.jsonl:61",
        "missing_field": "lines.jsonl:62",
    }
    manifest = prepare(config, tiny_tokenizer, "hash")
    shown = capsys.readouterr().out
    assert all(f"\n  1 {why}, first corpus/{name}" in shown for why, name in bad.items()) and "4 bad and" in shown
    examples = {why: text for split in manifest["splits"].values() for why, text in split["examples"].items()}
    assert {why: text.split()[0] for why, text in examples.items()} == {why: f"corpus/{bad[why]}" for why in bad}
    assert sum(split["documents"] for split in manifest["splits"].values()) == 120


@pytest.mark.parametrize(("field", "name"), [("text_field", "nope"), ("chat_field", "nope"), ("text_field", "")])
def test_a_missing_field_is_named_with_those_there(config, tmp_path, tiny_tokenizer, field, name):
    table = pa.Table.from_pylist([{"content": f"text {i}", "id": i} for i in range(30)])
    pq.write_table(table, tmp_path / "a.parquet")
    template = Path("plain") if field == "chat_field" else None
    one = config.model_copy(
        update={"sources": same_way([str(tmp_path / "a.parquet")], **{field: name}), "chat_template": template}
    )
    with pytest.raises(ValueError, match=rf"^a\.parquet:\d+ has no field '{name}' but .*'content', 'id'"):
        prepare(one, tiny_tokenizer, "hash")
    assert not one.out.exists()  # so that it can be prepared there with another field


def test_a_long_task_writes_several_shards(corpus, tmp_path, tiny_tokenizer, read_back, monkeypatch):
    """One compressed file is one task, whose shards end with the documents that reach a number of tokens."""
    with gzip.open(tmp_path / "lines.jsonl.gz", "wb") as stream:
        stream.write((corpus[0] / "lines.jsonl").read_bytes())
    monkeypatch.setattr(shard_task, "SHARD_TOKENS", 5000)
    sources = same_way([str(tmp_path / "lines.jsonl.gz")])
    config = PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=64, heldout_share=0)
    n_tokens = prepare(config, tiny_tokenizer, "hash")["splits"]["train"]["tokens"]
    names = [shard["file"] for shard in splits(config)[0].manifest["shards"]]
    assert names == ["shard-00000.arrow", *(f"shard-00000-{i:03d}.arrow" for i in range(1, len(names)))]
    assert n_tokens // 7000 < len(names) <= n_tokens // 5000 + 1
    found = {name.rpartition(":")[2]: text for name, text in read_back(config.out, tiny_tokenizer).items()}
    assert found == {name.rpartition(":")[2]: text for name, text in corpus[1].items() if ":" in name}


def test_empty_split_says_why(config, tmp_path, tiny_tokenizer):
    (tmp_path / "one.txt").write_text("a few words")
    one = config.model_copy(update={"sources": same_way([str(tmp_path / "one.txt")]), "heldout_share": 0.01})
    with pytest.raises(ValueError, match=r"no row for heldout; .*heldout_share"):
        prepare(one, tiny_tokenizer, "hash")
    with pytest.raises(ValueError, match=r"(?s)no row for train; .*1 shorter_than_seq_len"):
        prepare(one.model_copy(update={"documents": "first", "out": tmp_path / "first"}), tiny_tokenizer, "hash")
    # Other settings may use the folder.
    assert prepare(one.model_copy(update={"heldout_share": 0}), tiny_tokenizer, "hash")["splits"]["train"]["rows"] == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq_len", 1), ("seq_len", 10**12), ("documents", "truncate"), ("heldout_share", 1.0), ("max_tokens", 0),
        ("workers", 0), ("sources", {}), ("shard_bytes", 5),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(config, field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        validate(PrepareConfig, {**dict(config), field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "{a}"}, {"text_field": "a", "chat_field": "b"}, {"tokens_field": "ids"}, {"spans_field": "ids"},
        {"target_tokens_field": "ids"}, {"loss_field": "ids"},
        {"text_field": "a", "target_tokens_field": "b", "loss_field": "c"},
        {"path": ""}, {"weight": -1.0}, {"weight": float("nan")}, {"split": "train"}, {"pat": "x"},
        *({"prompt": text, "answer": "{a}"} for text in ("no field", "{a} {", "{a!r}", "{}", "{a.b}")),
    ],
)  # fmt: skip
def test_wrong_settings_of_a_source_are_named(config, fields):
    with pytest.raises(ValueError, match=rf"^sources\.one.*{next(iter(fields))}"):
        validate(PrepareConfig, {**dict(config), "sources": {"one": {"path": "p", **fields}}})


SCRIPT = """
import sys
from pathlib import Path
from longdraft.data_prep import prepare as module
from longdraft.data_prep.recipe import PrepareConfig, same_way

if __name__ == "__main__":
    source, out, tokenizer, workers = sys.argv[1:]
    module.SHARD_TEXT_BYTES = (1500, 1500)
    config = PrepareConfig(sources=same_way([source]), out=out, seq_len=64, workers=int(workers))
    module.prepare(config, Light(tokenizer), "hash")
"""


def start(tmp_path, light, tokenizer, workers):
    """Start a process over the corpus in a process group of its own, and return it after its third finished shard of
    the training split."""
    (tmp_path / "script.py").write_text(light + SCRIPT)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    arguments = [str(tmp_path / name) for name in ("script.py", "corpus", "out", "tokenizer.json")]
    process = subprocess.Popen(
        [sys.executable, *arguments, str(workers)], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    while len(list((tmp_path / "out" / "progress").glob("train-*.json"))) < 3:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("killed", ["a worker", "the parent"])
def test_kill_and_resume_loses_and_repeats_nothing(
    tmp_path, make_corpus, read_back, light, tiny_tokenizer, killed, monkeypatch, files_of
):
    monkeypatch.setattr(prepare_module, "SHARD_TEXT_BYTES", (1500, 1500))
    corpus = make_corpus(tmp_path / "corpus", 100)
    process = start(tmp_path, light, tiny_tokenizer, 2)
    workers = [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    assert len(workers) == 2
    if killed == "a worker":
        workers[0].kill()
        assert "a worker was killed (out of memory?)" in process.communicate()[1]
        assert process.returncode == 1
    else:
        process.kill()
        process.communicate()
    assert psutil.wait_procs(workers, timeout=20)[1] == [], "a worker outlived its parent"
    out = tmp_path / "out"
    assert not (out / "manifest.json").exists()
    # The worst that a kill can leave: a shard without its record, and half-written files.
    records = {path: json.loads(path.read_text())["outputs"] for path in sorted((out / "progress").glob("*.json"))}
    unrecorded = next(path for path, outputs in records.items() if outputs)
    (out / next(iter(records.pop(unrecorded)))).write_bytes(b"from before the record")
    unrecorded.unlink()
    (out / "train" / ".shard-00009.arrow.123.tmp").write_bytes(b"half")
    (out / "progress" / ".train-00009.json.123.tmp").write_bytes(b"{")
    times = {out / name: (out / name).stat().st_mtime_ns for outputs in records.values() for name in outputs}
    config = PrepareConfig(sources=same_way([str(tmp_path / "corpus")]), out=out, seq_len=64)
    prepare(config, tiny_tokenizer, "hash")
    assert read_back(out, tiny_tokenizer) == corpus
    assert 0 < len(times) < len(list(out.rglob("*.arrow")))
    assert {path: path.stat().st_mtime_ns for path in times} == times, "a finished shard was redone"
    expected = files_of(out)
    shutil.rmtree(out)
    prepare(config, tiny_tokenizer, "hash")
    assert files_of(out) == expected
