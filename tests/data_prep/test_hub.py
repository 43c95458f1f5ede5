"""Data sets of the hub, fetched, streamed and refused, with the real client against a hub on this machine."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

# Prepares or lists, as each call says, and prints a line.
SCRIPT = """
import json, sys
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.sources import list_files

for call in json.loads(sys.argv[2]):
    try:
        if "out" in call:
            prepare(PrepareConfig(**call, seq_len=64, heldout_share=0.2), Light(sys.argv[1]), "hash")
        else:
            print(*(file.name for file in list_files([Source(**call)])))
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""
TEXTS = {f"part {part} text {i} " + "word " * (i % 9) for part in range(4) for i in range(60)}
WANTED = {"path": "me/set", "files": ["data/train-*"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of the hub: a data set as JSONL, compressed JSONL and Parquet, with a split that is not used."""
    root = tmp_path_factory.mktemp("hub")
    data = root / "me" / "set" / "data"
    data.mkdir(parents=True)
    parts = [sorted(text for text in TEXTS if text.startswith(f"part {part} ")) for part in range(4)]
    lines = ["".join(json.dumps({"text": text}) + "\n" for text in part).encode() for part in parts]
    (data / "train-0.jsonl").write_bytes(lines[0])
    with pa.CompressedOutputStream(str(data / "train-1.jsonl.zst"), "zstd") as stream:
        stream.write(lines[1])
    for number in (2, 3):
        table = pa.Table.from_pylist([{"text": text} for text in parts[number]])
        pq.write_table(table, data / f"train-{number}.parquet", row_group_size=25)
    (data / "test-0.jsonl").write_text(json.dumps({"text": "not wanted"}) + "\n")
    return root


@pytest.fixture
def run(tmp_path, tiny_tokenizer, light):
    """run(address, calls) makes the calls in a process of its own, and returns the lines that it prints."""
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    def run(address, calls, **env):
        env |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", light + SCRIPT, str(tmp_path / "tokenizer.json"), json.dumps(calls)]
        done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def given(requests, path):
    """How many bytes of a file the hub has sent."""
    gets = [(name, size) for method, name, size in requests if method == "GET" and "/resolve/" in name]
    return sum(size for name, size in gets if name.endswith(path))


def test_fetched_and_streamed_sets_are_the_same_documents(root, run, tmp_path, read_back, tiny_tokenizer, serving):
    outs = [tmp_path / name for name in ("fetched", "streamed", "offline")]
    fetched, streamed, offline = ({"sources": {"set": WANTED}, "out": str(out)} for out in outs)
    streamed = {**streamed, "sources": {"set": {**WANTED, "streaming": True}}, "workers": 2}
    with serving(root) as (address, requests):
        first, second = run(address, [fetched, fetched])
        assert first.startswith("Prepared") and second.startswith("Already prepared")
        assert not given(requests, "test-0.jsonl")
        size = (root / "me/set/data/train-0.jsonl").stat().st_size
        assert given(requests, "train-0.jsonl") == size, "what is in the cache was fetched again"
        requests.clear()
        cached = sorted((tmp_path / "cache").rglob("*"))
        assert run(address, [streamed])[0].startswith("Prepared")
        assert given(requests, "train-0.jsonl") > 0 and sorted((tmp_path / "cache").rglob("*")) == cached
    # Without a network, the cache is used.
    assert run("http://127.0.0.1:9", [offline], HF_HUB_OFFLINE="1")[0].startswith("Prepared")
    texts = [read_back(out, tiny_tokenizer) for out in outs]
    assert texts[0] == texts[1] == texts[2] and {text.decode() for text in texts[0].values()} == TEXTS
    assert {name.partition(":")[0] for name in texts[0]} == {
        f"me/set/data/train-{part}" for part in ("0.jsonl", "1.jsonl.zst", "2.parquet", "3.parquet")
    }
    plans = [json.loads((out / "plan.json").read_text()) for out in outs]
    assert plans[0]["sources"] == plans[1]["sources"], "the hub's hashes are those of the content"


def test_streaming_reads_what_the_budget_asks_for(root, run, tmp_path, serving):
    source = {"path": "me/set", "files": ["data/*.parquet", "data/*.jsonl"], "streaming": True}
    with serving(root) as (address, requests):
        run(address, [{"sources": {"set": source}, "out": str(tmp_path / "out"), "max_tokens": 200}])
        read = {name.rpartition("/")[2] for method, name, _ in requests if method == "GET" and "/resolve/" in name}
    assert len(read) < 4, "files beyond the budget were read"
    splits = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"].values()
    assert 190 < sum(split["tokens"] for split in splits) <= 200


def test_what_is_not_to_be_had_is_named(root, run, serving):
    said = {
        "a/b/c": "repo_name",
        "no/set": "Repository Not Found",
        "gated/set": "gated repo",
        "me/set@nope": "nope",
        "me/set": "none/*",
    }
    cases = [(path, streaming) for path in said for streaming in (False, True)]
    calls = [{"path": path, "streaming": streaming, "files": ["none/*"]} for path, streaming in cases]
    with serving(root) as (address, _):
        for (path, _), line in zip(cases, run(address, calls), strict=True):
            assert line.startswith(f"source '{path}' ") and said[path] in line, line
    for line in run("http://127.0.0.1:9", calls[-2:]):
        assert line.startswith("source 'me/set' ") and "hub" in line
