"""Records as published data sets have them: the same documents come out of every layout, and damage is named."""

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile

import datasets
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
CSV = ["a.csv", "bom.csv", "excel.csv", "a.tsv", "quoted.CSV", "blank.csv", "a.csv.gz"]
ARRAYS = ["line.json", "indented.json", "bom.json", "a.json.gz"]


def as_csv(rows, delimiter=",", **more):
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), delimiter=delimiter, **more)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def add_samples(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, content in samples:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_as(path, rows):
    """In the layout that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=70)
    elif path.suffix == ".arrow":
        opened = pa.ipc.new_stream if path.name == "stream.arrow" else pa.ipc.new_file
        with opened(path, (table := pa.Table.from_pylist(rows)).schema) as writer:
            writer.write_table(table, max_chunksize=70)
    elif path.suffix == ".tar":
        samples = [(f"deep/{i:03d}", field, value) for i, row in enumerate(rows) for field, value in row.items()]
        add_samples(path, [(f"{stem}.{field}.json", json.dumps(value).encode()) for stem, field, value in samples])
    else:
        delimiter = {"excel.csv": ";", "a.tsv": "\t"}.get(path.name, ",")
        more = {"quoting": csv.QUOTE_ALL} if path.name == "quoted.CSV" else {}
        if path.name in CSV:
            content = as_csv(rows, delimiter, **more)
        elif path.name in ARRAYS:
            content = json.dumps(rows, indent=2 if path.name == "indented.json" else None).encode()
        else:
            content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        content = b"\xef\xbb\xbf" + content if path.name.startswith("bom") else content
        content = content.replace(b"\r\n0,", b"\r\n\r\n0,") if path.name == "blank.csv" else content
        codec = COMPRESSED.get(path.suffix)
        with pa.CompressedOutputStream(str(path), codec) if codec else path.open("wb") as stream:
            stream.write(content)


def segments_of(path, segment_bytes=2000):
    return scan(list_files([Source(path=str(path))]), segment_bytes)[1]


def documents(path, record_format=None, segment_bytes=2000):
    return [one for segment in segments_of(path, segment_bytes) for one in read_documents(segment, record_format)]


@pytest.mark.parametrize("segment_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("name", [*LINES, *TABLES, *CSV, *ARRAYS, "a.tar"])
def test_every_layout_gives_the_same_documents_wherever_it_is_cut(tmp_path, name, segment_bytes):
    path = tmp_path / name
    write_as(path, [{"id": i, "body": text} for i, text in enumerate(TEXTS)])
    record_format = TextFormat("body.json" if name == "a.tar" else "body")
    segments = segments_of(path, segment_bytes)
    parts = [list(read_documents(segment, record_format)) for segment in segments]
    found = [document for part in parts for document in part]
    assert [getattr(document, "text", document) for document in found] == TEXTS
    assert all(n in (None, len(part)) for n, part in zip((s.n_documents for s in segments), parts, strict=True))
    numbers = [int(document.name.rpartition(":")[2]) for document in found]
    if name in CSV:  # the line where the record begins
        content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
        lines = content.split(b"\n")
        assert all(b"%d" % i in lines[number - 1] for i, number in enumerate(numbers))
    else:
        assert numbers == list(range(1, 151))
    can_be_cut = name == "lines.jsonl" or name in TABLES
    assert (len(segments) > 2) == (can_be_cut and segment_bytes < 1000)
    # Each segment by itself, in any order.
    assert [list(read_documents(segment, record_format)) for segment in reversed(segments)] == parts[::-1]


@pytest.mark.parametrize("name", [*LINES[:2], *TABLES, ARRAYS[0], "a.tar"])
def test_conversations_and_answers_that_were_cut(tmp_path, name):
    chats = [TURNS, TURNS, TURNS, TURNS[:1]]
    cuts = [True, False, None, True]
    write_as(tmp_path / name, [{"chat": chat, "unfinished": cut} for chat, cut in zip(chats, cuts, strict=True)])
    field = "chat.json" if name == "a.tar" else "chat"
    *good, bad = documents(tmp_path / name, ChatFormat(field))
    assert all(isinstance(one, Conversation) and one.messages == (("user", "a?"), ("assistant", "b")) for one in good)
    assert [one.unfinished for one in good] == [True, False, False]
    assert isinstance(bad, BadDocument) and (bad.name, bad.why) == (f"{name}:4", "no_assistant_turn")


def test_what_the_datasets_library_saved_is_read(tmp_path):
    rows = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    rows.to_parquet(tmp_path / "one.parquet")
    assert [file.kind for file in list_files([Source(path=str(tmp_path / "saved"))])] == ["table", "table"]
    for name in ("saved", "one.parquet"):
        assert [getattr(document, "text", None) for document in documents(tmp_path / name)] == TEXTS


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
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\3\0\0\0\5\0\0\0"), pa.py_buffer(b"abc\xff\xfe"))
    pq.write_table(pa.table({"text": broken}), tmp_path / "t.parquet")
    assert [why for _, why in whys(tmp_path / "t.parquet")] == ["abc", "bad_utf8"]


def test_bad_rows_of_csv_and_arrays(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2\n3,three,more\n4,"fo"ur\n5,\xff\n\n7,"se\nven"\n8,eight')
    assert whys(tmp_path / "a.csv") == [
        ("2", "one"), ("3", "bad_csv"), ("4", "bad_csv"), ("5", "bad_csv"), ("6", "bad_utf8"), ("8", "se\nven"),
        ("10", "eight"),
    ]  # fmt: skip
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}, 2, null, {"text": 3}, {"a": ""}, {"text": "\xff"}, []]')
    why = ["missing_field", "missing_field", "field_not_text", "missing_field", "bad_utf8", "missing_field"]
    assert [why for _, why in whys(tmp_path / "a.json")] == ["one", *why]


def test_bad_samples_of_archives(tmp_path):
    """Each is one bad document, whatever else the sample and earlier samples hold."""
    add_samples(tmp_path / "a.tar", {
        "0.txt": b"good", "0.jpg": b"no picture", "0.wav": b"no sound", "1.txt": b"caf\xe9", "2.json": b"{",
        "2.txt": b"", "./deep/3.txt": b"last", "3": b"no field",
    }.items())  # fmt: skip
    assert [why for _, why in whys(tmp_path / "a.tar", TextFormat("txt"))] == ["good", "bad_utf8", "empty", "last"]
    assert [why for _, why in whys(tmp_path / "a.tar", TextFormat("json"))][2] == "bad_json"


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", b""), ("a.jsonl", b"\n \n"), ("a.jsonl.gz", gzip.compress(b"", mtime=0)), ("a.csv", b""),
    ("a.csv", b"id,body\n"), ("a.json", b"[]"), ("a.json", b" [ \n ] "), ("a.txt", b""),
])  # fmt: skip
def test_files_without_a_record_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    (found,) = documents(tmp_path / name)
    assert isinstance(found, BadDocument) and (found.name, found.why) == (name, "empty")


@pytest.mark.parametrize("name", [*LINES[1:], *TABLES, "a.tar", "a.json.gz", "a.csv.gz"])
def test_truncated_files_are_refused_by_name(tmp_path, name):
    write_as(tmp_path / name, [{"text": os.urandom(30).hex()} for _ in range(200)])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2 + 700])
    with pytest.raises(ValueError, match=rf"{name} cannot be read"):
        documents(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [
    ("a.csv", b'id,body\n1,x\n2,"never\nends\n3,x\n'), ("a.csv", b"body,body\n1,2\n"), ("a.csv", b"\nid,body\n1,2\n"),
    ("a.json", b'[{"body": "x"},\n {"body": "y"}\n'), ("a.json", b'[{"body": "x"},\n {"body": "y'),
    ("a.json", b'[{"body": "x"}]\n[{"body": "y"}]'), ("a.json", b"[" * 200_000), ("a.tar", b"<html>no</html>" * 90),
    ("a.parquet", b""), ("a.parquet", b"<html>no</html>" * 90), ("a.jsonl.zst", b"<html>no</html>" * 90),
])  # fmt: skip
def test_broken_files_are_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        documents(tmp_path / name)


def test_too_large_an_array_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ARRAY_BYTES", 1000)
    write_as(tmp_path / "a.json.gz", [{"text": "x" * 1000}])
    with pytest.raises(ValueError, match=r"a\.json\.gz .*JSONL"):
        documents(tmp_path / "a.json.gz")


def test_large_row_groups_are_not_read_again_for_every_segment(tmp_path):
    """A row group of Parquet is decoded from its beginning, so it is cut coarsely, and small groups are joined."""
    rows = [{"text": f"{i} " + "x" * 1000} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "one.parquet", row_group_size=3000)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "many.parquet", row_group_size=10)
    assert [len(segments_of(tmp_path / "one.parquet", size)) for size in (100_000, 10_000)] == [1, 4]
    assert 20 < len(segments_of(tmp_path / "many.parquet", 100_000)) < 40
    assert [one.text for one in documents(tmp_path / "many.parquet", None, 100_000)] == [row["text"] for row in rows]


@pytest.mark.parametrize("segment_bytes", [1, 40, 1 << 20])
def test_blank_lines_are_no_documents(tmp_path, segment_bytes):
    """Wherever the file is cut. The numbers are those of the lines, and the hash is the file's."""
    path = tmp_path / "lines.jsonl"
    path.write_text('\n \t\n{"text": "a"}\n\r\n{"text": "b"}\n{"text": "c"}\n\n\n{"text": "d"}\n\n \n')
    described, cut = scan(list_files([Source(path=str(path))]), segment_bytes)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert described == {"lines.jsonl": {"bytes": path.stat().st_size, "sha256": sha256}}
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


def test_a_file_that_changes_under_us_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    (segment,) = segments_of(tmp_path / "a.txt")
    os.utime(tmp_path / "a.txt", ns=(0, (segment.mtime_ns or 0) + 1))
    with pytest.raises(ValueError, match=r"a\.txt changed"):
        list(read_documents(segment))
