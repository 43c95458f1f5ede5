"""Records as published data sets have them: the same documents come out of every layout, and damage is named."""

import gzip
import hashlib
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep import records
from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.formats import ChatFormat, TextFormat
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.sources import COMPRESSED, list_files

TEXTS = [f'text {i}, "quoted" [1, {{2}}] \\ é 🙂\n\r\n next' * (i % 7) + f"end {i}" for i in range(150)]
TURNS = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
LINES = [f"lines.jsonl{end}" for end in ("", *COMPRESSED)]
TABLES = ["table.parquet", "stream.arrow", "file.arrow"]
ARRAYS = ["line.json", "indented.json", "bom.json", "a.json.gz"]
LINES_AS_JSON = "lines.json"


def write_as(path, rows):
    """In the layout that the file's name says."""
    if path.name in TABLES:
        table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=70)
    elif path.suffix == ".arrow":
        opened = pa.ipc.new_stream if path.name == "stream.arrow" else pa.ipc.new_file
        with opened(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        if path.name in ARRAYS:
            content = json.dumps(rows, indent=2 if path.name == "indented.json" else None).encode()
        else:
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = b"\xef\xbb\xbf" + content if path.name.startswith("bom") else content
        codec = COMPRESSED.get(path.suffix)
        with pa.CompressedOutputStream(str(path), codec) if codec else path.open("wb") as stream:
            stream.write(content)


def segments_of(path, segment_bytes=2000):
    return scan(list_files([Source(path=str(path))]), segment_bytes)[1]


def documents(path, record_format=None, segment_bytes=2000):
    return [one for segment in segments_of(path, segment_bytes) for one in read_documents(segment, record_format)]


@pytest.mark.parametrize("segment_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("name", [*LINES, *TABLES, *ARRAYS, LINES_AS_JSON])
def test_every_layout_gives_the_same_documents_wherever_it_is_cut(tmp_path, name, segment_bytes):
    path = tmp_path / name
    write_as(path, [{"id": i, "body": text} for i, text in enumerate(TEXTS)])
    record_format = TextFormat("body")
    segments = segments_of(path, segment_bytes)
    parts = [list(read_documents(segment, record_format)) for segment in segments]
    found = [document for part in parts for document in part]
    assert [getattr(document, "text", document) for document in found] == TEXTS
    assert all(n in (None, len(part)) for n, part in zip((s.n_documents for s in segments), parts, strict=True))
    numbers = [int(document.name.rpartition(":")[2]) for document in found]
    assert numbers == list(range(1, 151))
    assert (len(segments) > 2) == (name in ("lines.jsonl", *TABLES) and segment_bytes < 1000)
    # Each segment by itself, in any order.
    assert [list(read_documents(segment, record_format)) for segment in reversed(segments)] == parts[::-1]


@pytest.mark.parametrize("name", [*LINES[:2], *TABLES, ARRAYS[0]])
def test_conversations_and_answers_that_were_cut(tmp_path, name):
    chats = [TURNS, TURNS, TURNS, TURNS[:1]]
    cuts = [True, False, None, True]
    write_as(tmp_path / name, [{"chat": chat, "unfinished": cut} for chat, cut in zip(chats, cuts, strict=True)])
    *good, bad = documents(tmp_path / name, ChatFormat("chat"))
    assert all(isinstance(one, Conversation) and one.messages == tuple(TURNS) for one in good)
    assert [one.unfinished for one in good] == [True, False, False]
    assert isinstance(bad, BadDocument) and (bad.name, bad.why) == (f"{name}:4", "no_assistant_turn")


def whys(path, record_format=None):
    found = documents(path, record_format)
    assert len({document.digest for document in found}) == len(found)
    return [
        (document.name.rpartition(":")[2], getattr(document, "why", getattr(document, "text", None)))
        for document in found
    ]


def test_every_bad_line_is_named(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "good"}', b"{broken", b'{"text": "\xff"}', b'{"other": "x"}', b"[1, 2]", b'{"text": 7}',
        b'{"text": ""}', b"", b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": "also good"}\r',
    ]  # fmt: skip
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert whys(tmp_path / "bad.jsonl") == [
        ("1", "good"), ("2", "bad_json"), ("3", "bad_utf8"), ("4", "missing_field"), ("5", "missing_field"),
        ("6", "field_not_text"), ("7", "empty"), ("9", "bad_utf8"), ("10", "bad_json"), ("11", "also good"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_bad_rows_of_tables(tmp_path, name):
    write_as(tmp_path / name, [{"text": text, "body": b} for text, b in
                               (("good", b"abc"), (None, "é".encode()), ("", b"\xff"), ("x", b""))])  # fmt: skip
    assert [why for _, why in whys(tmp_path / name)] == ["good", "field_not_text", "empty", "x"]
    assert [why for _, why in whys(tmp_path / name, TextFormat("body"))] == ["abc", "é", "bad_utf8", "empty"]
    assert whys(tmp_path / name, TextFormat("content")) == [(str(i), "missing_field") for i in (1, 2, 3, 4)]
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"good"', "{broken", "[" * 100_000, "9" * 5000]))
    maps = pa.MapArray.from_arrays(pa.array(range(5), pa.int32()), pa.array(["key"] * 4), texts)
    write_as(tmp_path / name, pa.table({"text": texts, "map": maps}))
    assert [why for _, why in whys(tmp_path / name)] == ["good", "bad_json", "bad_json", "bad_json"]
    assert [why for _, why in whys(tmp_path / name, TextFormat("map"))] == ["field_not_text"] * 4


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("of_message", [True, False])
def test_what_datasets_keeps_as_json_is_read_as_its_value(tmp_path, name, of_message):
    """It does so where messages have different fields, or contents different types."""
    import datasets

    content = {"role": datasets.Value("string"), "content": datasets.Json()}
    features = datasets.Features({"messages": datasets.List(datasets.Json() if of_message else content)})
    rows = [{"messages": TURNS}, {"messages": [TURNS[0], {"role": "assistant", "content": None}]}, {"messages": None}]
    write_as(tmp_path / name, datasets.Dataset.from_list(rows, features=features).data.table)
    good, *bad = documents(tmp_path / name, ChatFormat("messages"))
    assert good.messages == tuple(TURNS)
    assert [one.why for one in bad] == ["content_not_text", "not_a_list"]


def test_bad_elements_of_arrays(tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}, 2, null, {"text": 3}, {"a": ""}, {"text": "\xff"}, []]')
    why = ["missing_field", "missing_field", "field_not_text", "missing_field", "bad_utf8", "missing_field"]
    assert [why for _, why in whys(tmp_path / "a.json")] == ["one", *why]


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
    ("a.json", b""), ("a.json", b"[]"), ("a.json", b" [ \n ] "), ("a.txt", b""),
])  # fmt: skip
def test_files_without_a_record_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (found,) = documents(tmp_path / name)
    assert isinstance(found, BadDocument) and (found.name, found.why) == (name, "empty")


@pytest.mark.parametrize("name", [*LINES[1:], *TABLES, "a.json.gz"])
def test_truncated_files_are_refused_by_name(tmp_path, name):
    write_as(tmp_path / name, [{"text": os.urandom(30).hex()} for _ in range(200)])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2 + 700])
    with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
        documents(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [
    ("a.json", b'[{"body": "x"},\n {"body": "y"}\n'), ("a.json", b'[{"body": "x"},\n {"body": "y'),
    ("a.json", b'[{"body": "x"}]\n[{"body": "y"}]'), ("a.json", b"[" * 200_000),
    ("a.parquet", b""), ("a.parquet", b"<html>no</html>" * 90), ("a.jsonl.zst", b"<html>no</html>" * 90),
    *((name, None) for name in ("a.csv", "a.tsv.gz", "a.tar", "a")),
])  # fmt: skip
def test_broken_files_are_refused_by_name_and_others_with_what_to_convert_them_to(tmp_path, name, content):
    (tmp_path / name).write_bytes(content or b"")
    with pytest.raises(ValueError, match="convert it to JSONL or Parquet" if content is None else name):
        documents(tmp_path / name)


def test_too_large_an_array_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ARRAY_BYTES", 1000)
    write_as(tmp_path / "a.json.gz", [{"text": "x" * 1000}])
    with pytest.raises(ValueError, match=r"a\.json\.gz: .*JSONL"):
        documents(tmp_path / "a.json.gz")
    lines = [b"", *(json.dumps({"text": "x" * i}).encode() for i in range(1, 200))]  # as C4's and Dolma's files
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    assert [len(document.text) for document in documents(tmp_path / "b.json.gz")] == [*range(1, 200)]


def test_small_row_groups_are_joined(tmp_path):
    rows = [{"text": f"{i} " + "x" * 1000} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "many.parquet", row_group_size=10)
    assert 20 < len(segments_of(tmp_path / "many.parquet", 100_000)) < 40
    assert [one.text for one in documents(tmp_path / "many.parquet", None, 100_000)] == [row["text"] for row in rows]


@pytest.mark.parametrize("segment_bytes", [1, 40, 1 << 20])
def test_blank_lines_are_no_documents(tmp_path, segment_bytes):
    """Wherever the file is cut. The numbers are those of the lines, and the hash is the file's."""
    path = tmp_path / "lines.jsonl"
    path.write_text('\n \t\n{"text": "a"}\n\r\n{"text": "b"}\n{"text": "c"}\n\n\n{"text": "d"}\n\n \n')
    digests, cut = scan(list_files([Source(path=str(path))]), segment_bytes)
    assert digests == {"lines.jsonl": hashlib.sha256(path.read_bytes()).hexdigest()}
    found = {document.name: document for segment in cut[::-1] for document in read_documents(segment)}
    assert {name: getattr(found[name], "text", None) for name in sorted(found)} == {
        "lines.jsonl:3": "a", "lines.jsonl:5": "b", "lines.jsonl:6": "c", "lines.jsonl:9": "d",
    }  # fmt: skip
    assert sum(segment.n_documents or 0 for segment in cut) == 4


def test_a_text_file_is_one_document_as_it_stands(tmp_path):
    raw = "\ufefffirst\r\nsecond\rthird\n\x00é".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    assert documents(tmp_path / "a.txt", None, 3) == [Document("a.txt", hashlib.sha256(raw).digest(), raw.decode())]
    (tmp_path / "a.txt").write_bytes("é".encode("utf-16"))
    (bad,) = documents(tmp_path / "a.txt")
    assert isinstance(bad, BadDocument) and bad.why == "bad_utf8"
