from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from longdraft.data_prep.shards import FORMAT_VERSION, Row, ShardSet, shard_schema, write_shard
from longdraft.models.files import write_json

SEQ_LEN = 6
ROWS = [
    Row(np.arange(6, dtype=np.int32), [0, 2, 6], [0, 6], ["a", "b.jsonl:7"], [3, 0]),
    Row(np.array([7, 8, 9], dtype=np.int32), [0, 3], [0, 1, 2, 3], ["c"], [0]),
    Row(np.array([5], dtype=np.int32), [0, 1], [], ["é"], [1]),
]


@pytest.fixture
def split(tmp_path):
    """Two shards, with two rows and one row."""
    folder = tmp_path / "train"
    folder.mkdir()
    parts = {"shard-00000.arrow": ROWS[:2], "shard-00003.arrow": ROWS[2:]}
    shards = [write_shard(folder / name, rows, SEQ_LEN, fill_id=99) for name, rows in parts.items()]
    write_json(folder / "manifest.json", {"format_version": FORMAT_VERSION, "seq_len": SEQ_LEN, "shards": shards})
    return folder


def test_rows_come_back(split):
    shards = ShardSet(split)
    assert len(shards) == 3
    rows = [shards[i] for i in range(3)]
    assert [row["tokens"].tolist() for row in rows] == [[0, 1, 2, 3, 4, 5], [7, 8, 9, 99, 99, 99], [5, *[99] * 5]]
    assert [row["borders"].tolist() for row in rows] == [[0, 2, 6], [0, 3], [0, 1]]
    assert [row["loss"].astype(int).tolist() for row in rows] == [[1] * 6, [1, 0, 1, 0, 0, 0], [0] * 6]
    assert {row["tokens"].dtype.name for row in rows} == {row["borders"].dtype.name for row in rows} == {"int32"}
    assert [shards.pieces(i) for i in range(3)] == [[("a", 3), ("b.jsonl:7", 0)], [("c", 0)], [("é", 1)]]
    assert shards[-1]["tokens"].tolist() == shards[2]["tokens"].tolist()
    assert shards[-3]["tokens"].tolist() == shards[0]["tokens"].tolist()
    for i in (3, -4):
        with pytest.raises(IndexError, match=f"row {i} of 3"):
            shards[i]


def test_a_row_is_a_copy(split):
    shards = ShardSet(split)
    shards[0]["tokens"][:] = -1
    shards[0]["borders"][:] = -1
    assert shards[0]["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
    assert shards[0]["borders"].tolist() == [0, 2, 6]


def test_opening_reads_no_shard_and_reading_maps_one(split, monkeypatch):
    opened = []
    memory_map = pa.memory_map
    monkeypatch.setattr(pa, "memory_map", lambda path: opened.append(path[-17:]) or memory_map(path))
    shards = ShardSet(split)
    assert (len(shards), opened) == (3, [])
    allocated = pa.total_allocated_bytes()
    _ = shards[1], shards[0]
    assert opened == ["shard-00000.arrow"]
    _ = shards[2]
    assert opened == ["shard-00000.arrow", "shard-00003.arrow"]
    assert pa.total_allocated_bytes() == allocated, "a column was read into memory instead of mapped"


def test_the_datasets_library_opens_a_shard(split):
    numbers, names = datasets.List(datasets.Value("int32")), datasets.List(datasets.Value("string"))
    tokens = datasets.List(datasets.Value("int32"), length=24)
    columns = {"tokens": tokens, "borders": numbers, "loss_spans": numbers, "documents": names, "pieces": numbers}
    theirs, ours = datasets.Features(columns).arrow_schema, shard_schema(24)
    assert ours.equals(theirs) and ours.metadata == theirs.metadata
    dataset = datasets.Dataset.from_file(str(split / "shard-00000.arrow"))
    assert dataset[1]["tokens"] == [7, 8, 9, 99, 99, 99]
    assert dataset[0]["documents"] == ["a", "b.jsonl:7"]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("name", "damage"), [
    ("shard-00003.arrow", flip_a_bit), ("shard-00003.arrow", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    ("shard-00003.arrow", Path.unlink), ("manifest.json", Path.unlink), ("manifest.json", lambda p: p.write_text("{")),
    ("", lambda folder: write_json(folder / "manifest.json", {"format_version": 99})),
])  # fmt: skip
def test_damage_is_refused_by_name(split, name, damage):
    """At once, but for the content of a shard."""
    ShardSet(split).verify()
    damage(split / name)
    with pytest.raises(ValueError, match=name or "99"):
        (ShardSet(split).verify if damage is flip_a_bit else partial(ShardSet, split))()
