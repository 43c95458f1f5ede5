"""Data sets of the hub, fetched, streamed and refused, with the real client against a hub on this machine."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.recipe import Source
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files

SCRIPT = """
import json, sys
from pathlib import Path
from longdraft.data_prep.recipe import PrepareConfig
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import Source

sources, out, tokenizer, settings = sys.argv[1:]
sources = {name: Source(**{**how, "files": tuple(how.get("files", ()))}) for name, how in json.loads(sources).items()}
try:
    settings = {"seq_len": 64, "heldout_share": 0.2, **json.loads(settings)}
    prepare(PrepareConfig(sources=sources, out=out, **settings), Light(tokenizer), "hash")
except ValueError as error:
    sys.exit(f"error: {error}")
"""
LISTING = """
import json, sys
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.sources import list_files

for name, streaming in json.loads(sys.argv[1]):
    try:
        files = ("none/*",) if name == "me/set" else ()
        list_files([Source(path=name, files=files, streaming=streaming)])
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""
SPLITS = """
import json, sys
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.sources import list_files

for case in json.loads(sys.argv[1]):
    try:
        print(*(file.name for file in list_files([Source(**case)])))
    except ValueError as error:
        print(error)
"""
README = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: "data/train-*"}
  - {split: test, path: "data/test-*"}
- config_name: tables
  data_files: "data/*.parquet"
---
"""
TEXTS = {f"part {part} text {i} " + "word " * (i % 9) for part in range(4) for i in range(60)}


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
    """run(address, out, sources, **settings) prepares in a process of its own, and returns the finished process."""
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    def run(address, out, sources, offline=False, **settings):
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
        arguments = [json.dumps(sources), str(out), str(tmp_path / "tokenizer.json"), json.dumps(settings)]
        command = [sys.executable, "-c", light + SCRIPT, *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    return run


def texts(out, read_back, tokenizer):
    train, heldout = (read_back(ShardSet(out / split), tokenizer) for split in ("train", "heldout"))
    return train | heldout


def given(requests, path):
    """How many bytes of a file the hub has sent."""
    return sum(
        size for method, name, size in requests if method == "GET" and name.endswith(path) and "/resolve/" in name
    )


def test_fetched_and_streamed_sets_are_the_same_documents(root, run, tmp_path, read_back, tiny_tokenizer, serving):
    fetched, streamed = tmp_path / "fetched", tmp_path / "streamed"
    wanted = {"path": "me/set", "files": ["data/train-*"]}
    with serving(root) as (address, requests):
        done = run(address, fetched, {"set": wanted})
        assert done.returncode == 0, done.stderr
        assert given(requests, "train-0.jsonl") > 0 and not given(requests, "test-0.jsonl")
        requests.clear()
        assert "Already prepared" in run(address, fetched, {"set": wanted}).stdout
        assert not [name for _, name, _ in requests if "/resolve/" in name], "what is in the cache was fetched again"
        cached = sorted((tmp_path / "cache").rglob("*"))
        done = run(address, streamed, {"set": {**wanted, "streaming": True}}, workers=2)
        assert done.returncode == 0, done.stderr
        assert given(requests, "train-0.jsonl") > 0 and sorted((tmp_path / "cache").rglob("*")) == cached
        requests.clear()
        assert "Already prepared" in run(address, streamed, {"set": {**wanted, "streaming": True}}).stdout
        assert not given(requests, "train-0.jsonl"), "a finished set was read again"
    found = texts(fetched, read_back, tiny_tokenizer)
    assert {text.decode() for text in found.values()} == TEXTS
    assert texts(streamed, read_back, tiny_tokenizer) == found
    assert {name.partition(":")[0] for name in found} == {
        f"me/set/data/train-{part}" for part in ("0.jsonl", "1.jsonl.zst", "2.parquet", "3.parquet")
    }
    plans = [json.loads((out / "plan.json").read_text()) for out in (fetched, streamed)]
    assert plans[0]["sources"] == plans[1]["sources"], "the hub's hashes are those of the content"
    # Without a network, the cache is used.
    done = run("http://127.0.0.1:9", tmp_path / "offline", {"set": {"path": "me/set", "files": ["data/train-*"]}}, True)
    assert done.returncode == 0, done.stderr
    assert texts(tmp_path / "offline", read_back, tiny_tokenizer) == found


def test_streaming_reads_what_the_share_and_the_budget_ask_for(root, run, tmp_path, serving):
    source = {"path": "me/set", "files": ["data/*.parquet", "data/*.jsonl"], "streaming": True, "share": 0.3}
    with serving(root) as (address, requests):
        done = run(address, tmp_path / "out", {"set": source})
        assert done.returncode == 0, done.stderr
        read = {name.rpartition("/")[2] for method, name, _ in requests if method == "GET" and "/resolve/" in name}
    assert len(read) < 4, "files beyond the share were read"
    mix = json.loads((tmp_path / "out" / "manifest.json").read_text())["splits"]
    n_all = sum(text.startswith(("part 0", "part 2", "part 3")) for text in TEXTS) + 1
    n = sum(split["documents"] for split in mix.values())
    assert 0.15 * n_all < n < 0.45 * n_all


def test_what_is_not_to_be_had_is_named(root, tmp_path, serving):
    said = {
        "no/set": "Repository Not Found",
        "gated/set": "gated",
        "me/set@nope": "nope",
        "me/set": "holds no file none/*",
    }
    cases = [(name, streaming) for name in said for streaming in (False, True)]

    def errors(address, cases):
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", LISTING, json.dumps(cases)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with serving(root) as (address, _):
        for (name, _), line in zip(cases, errors(address, cases), strict=True):
            assert line.startswith(f"source '{name}' ") and said[name] in line, line
    for line in errors("http://127.0.0.1:9", [("me/set", False), ("me/set", True)]):
        assert line.startswith("source 'me/set' ") and "hub" in line


def test_a_configuration_and_a_split_are_the_files_that_datasets_says(tmp_path, serving):
    """Of a data set by name, fetched or streamed, and of a folder. Pattern signs in a name match only themselves."""
    folder = tmp_path / "hub" / "me" / "parts"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    for name in ("train-[0].jsonl", "train-0.jsonl", "train-1.jsonl", "test-0.jsonl"):
        (folder / "data" / name).write_text(json.dumps({"text": name}))
    pq.write_table(pa.table({"text": ["b"]}), folder / "data" / "other.parquet")
    train = ["data/train-0.jsonl", "data/train-1.jsonl", "data/train-[0].jsonl"]
    cases = [
        ({"split": "train"}, train),
        ({"split": "test"}, ["data/test-0.jsonl"]),
        ({"config": "tables"}, ["data/other.parquet"]),
        ({"config": "tables", "split": "test"}, "has no split 'test'; it has 'train'"),
        ({"config": "nope"}, "config 'nope': BuilderConfig 'nope' not found. Available: ['default', 'tables']"),
    ]
    places = [("me/parts", {}), ("me/parts@main", {"streaming": True}), (str(folder), {})]
    asked = [({"path": path, **how, **more}, wanted) for how, wanted in cases for path, more in places]
    with serving(tmp_path / "hub") as (address, _):
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", SPLITS, json.dumps([case for case, _ in asked])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (case, wanted), line in zip(asked, done.stdout.splitlines(), strict=True):
        if isinstance(wanted, str):
            assert line.startswith(f"source '{case['path']}'") and line.endswith(wanted)
        else:
            name = "parts" if case["path"] == str(folder) else case["path"]
            assert line.split(" ") == [f"{name}/{file}" for file in wanted]
    (folder / "parts.py").write_text("import datasets")
    with pytest.raises(ValueError, match=r"config None: Dataset scripts are no longer supported"):
        list_files([Source(path=str(folder), split="train")])
    with pytest.raises(ValueError, match=r"files and config or split are given for me/parts; .* leave one"):
        Source(path="me/parts", files=("*",), split="train")
    with pytest.raises(ValueError, match=r"'stdlib' is neither a folder nor a data set of the hub; leave out"):
        list_files([Source(path="stdlib", split="train")])
