"""CSV, TSV and JSON arrays give the same records as JSONL, wherever a file is cut, and errors name what is broken."""

import csv
import gzip
import io
import json
import tracemalloc

import pytest

from longdraft.data_prep import hub, streams
from longdraft.data_prep.documents import BadDocument, Document
from longdraft.data_prep.json_arrays import array_elements
from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.record_formats import TextFormat
from longdraft.data_prep.segments import read_documents, scan
from longdraft.data_prep.settings import Source, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files

RECORDS = [
    {"id": str(i), "body": f'text {i}, "quoted" [1, {{2}}] \\ é 🙂\n\n next line' * (i % 7) + f"end {i}"}
    for i in range(150)
]


def as_csv(delimiter=",", **more):
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ["id", "body"], delimiter=delimiter, **more)
    writer.writeheader()
    writer.writerows(RECORDS)
    return stream.getvalue().encode()


FILES = {
    "a.csv": as_csv(),
    "bom.csv": b"\xef\xbb\xbf" + as_csv(lineterminator="\n"),
    "excel.csv": as_csv(";"),
    "a.tsv": as_csv("\t"),
    "quoted.CSV": as_csv(quoting=csv.QUOTE_ALL),
    "blank.csv": as_csv().replace(b"\r\n0,", b"\r\n\r\n0,"),
    "a.csv.gz": gzip.compress(as_csv()),
    "line.json": json.dumps(RECORDS).encode(),
    "indented.json": json.dumps(RECORDS, indent=2, ensure_ascii=False).encode(),
    "bom.json": b"\xef\xbb\xbf \n" + json.dumps(RECORDS).encode() + b"\n",
    "tight.json": json.dumps(RECORDS, separators=(",", ":")).encode(),
    "a.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
}


def documents(path, segment_bytes=1 << 20, field="body"):
    (file,) = list_files([Source(str(path))])
    segments = scan([file], segment_bytes)[1]
    return [document for segment in segments for document in read_documents(segment, TextFormat(field))], segments


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("segment_bytes", [1, 700, 1 << 20])
def test_the_records_are_those_of_jsonl_wherever_the_file_is_cut(tmp_path, name, segment_bytes):
    (tmp_path / name).write_bytes(FILES[name])
    found, segments = documents(tmp_path / name, segment_bytes)
    assert [getattr(document, "text", document) for document in found] == [record["body"] for record in RECORDS]
    assert len({document.name for document in found}) == len(RECORDS)
    cut = segment_bytes if not name.endswith(".gz") else segment_bytes * 64  # compressed: read up to each cut
    if cut < 10_000:
        assert len(segments) > 5
    numbers = [int(document.name.rpartition(":")[2]) for document in found]
    if ".json" in name:
        assert numbers == list(range(1, 151))
    else:  # the line where the record begins
        lines = (gzip.decompress(FILES[name]) if name.endswith(".gz") else FILES[name]).split(b"\n")
        assert all(b"%d" % i in lines[number - 1] for i, number in enumerate(numbers))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "indented.json"])
def test_all_of_a_file_is_read_by_opening_it_once(tmp_path, name, monkeypatch):
    """Remote files need this, because every opening asks a server."""
    (tmp_path / name).write_bytes(FILES[name])
    opened = []
    monkeypatch.setattr(streams, "open_bytes", lambda path: opened.append(path) or hub.open_bytes(path))
    kind = "array" if ".json" in name else "csv"
    assert len(list(streams.stream_records(str(tmp_path / name), kind))) == len(RECORDS) and len(opened) == 1


@pytest.mark.parametrize("name", ["a.csv", "indented.json"])
def test_the_whole_preparation_reads_them(tmp_path, name, tiny_tokenizer, read_back):
    (tmp_path / name).write_bytes(FILES[name])
    config = PrepareConfig(same_way([str(tmp_path / name)], text_field="body"), tmp_path / "out", 64, heldout_share=0)
    prepare(config, tiny_tokenizer, "hash")
    texts = read_back(ShardSet(config.out / "train"), tiny_tokenizer)
    assert sorted(texts.values()) == sorted(record["body"].encode() for record in RECORDS)


def test_bad_rows_are_counted_and_the_others_kept(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,body\n1,one\n2\n3,three,more\n4,"fo"ur\n5,\xff\n\n7,"se\nven"\n8,eight')
    found, _ = documents(tmp_path / "a.csv", 1)
    assert [(d.name, getattr(d, "why", getattr(d, "text", None))) for d in found] == [
        ("a.csv:2", "one"), ("a.csv:3", "bad_csv"), ("a.csv:4", "bad_csv"), ("a.csv:5", "bad_csv"),
        ("a.csv:6", "bad_utf8"), ("a.csv:8", "se\nven"), ("a.csv:10", "eight"),
    ]  # fmt: skip
    details = [document.detail for document in found if isinstance(document, BadDocument)]
    assert details[:2] == ["has 1 values, and the header 2 names", "has 3 values, and the header 2 names"]
    assert len({document.digest for document in found}) == len(found)
    (tmp_path / "a.json").write_text('[{"body": "one"}, 2, null, {"body": 3}, {"text": "x"}, {"body": "\\ud800"}, []]')
    found, _ = documents(tmp_path / "a.json", 1)
    whys = ["missing_field", "missing_field", "field_not_text", "missing_field", "bad_utf8", "missing_field"]
    assert [getattr(document, "why", None) for document in found] == [None, *whys]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.csv", b'id,body\n1,x\n2,"never\nends\n3,x\n', r"a\.csv, line 3: a quote opens that does not close"),
    ("a.csv", b"body,body\n1,2\n", r"a\.csv, line 1 names the field 'body' twice"),
    ("a.csv", b"id,body\r1,2\r", r"a\.csv, line 1 cannot be read as a header of CSV \(new-line"),
    ("a.csv", b"\nid,body\n1,2\n", r"a\.csv, line 1 is blank"),
    ("a.csv", "id,body\n1,2\n".encode("utf-16"), r"a\.csv, line 1 is no UTF-8; convert the file"),
    ("a.json", b'[{"body": "x"},\n {"body": "y"}\n', r"a\.json, line 3 .*',' or '\]' was expected"),
    ("a.json", b'[{"body": "x"},\n {"body": "y', r"a\.json, line 2 .*it ends early"),
    ("a.json", b'[{"body": "x"},\n {"body" "y"}, {"body": "z"} ]', r"a\.json, line 2 .*Expecting ':' delimiter"),
    ("a.json", b'[{"body": "x"}]\n[{"body": "y"}]', r"a\.json, line 2 .*more stands behind the array"),
    ("a.json", b'[{"body": "x"},]', r"a\.json, line 1 .*Expecting value"),
    ("a.json", b"[" * 200_000, r"a\.json, line 1 .*recursion"),
])  # fmt: skip
def test_broken_files_are_named_with_the_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        documents(tmp_path / name)


@pytest.mark.parametrize(
    "content", [("a.csv", b""), ("a.csv", b"id,body\n"), ("a.json", b"[]"), ("a.json", b" [ \n ] ")]
)
def test_files_without_a_record_are_named(tmp_path, content):
    (tmp_path / content[0]).write_bytes(content[1])
    ((found,), _) = documents(tmp_path / content[0])
    assert isinstance(found, BadDocument) and (found.name, found.why) == (content[0], "empty")


def test_lines_in_a_json_file_stay_lines(tmp_path):
    (tmp_path / "a.json").write_text('{"body": "x"}\n{"body": "y"}\n')
    assert [document.text for document in documents(tmp_path / "a.json")[0] if isinstance(document, Document)] == [
        "x",
        "y",
    ]


def test_an_array_is_read_in_bounded_memory(tmp_path):
    """40 MB of records, and one of 6 MB that is longer than any block."""
    with (tmp_path / "a.json").open("w") as stream:
        stream.write("[" + ",".join(json.dumps({"body": "é" * 1000}) for _ in range(6000)))
        stream.write("," + json.dumps({"body": "x" * 6_000_000}) + "]")
    tracemalloc.start()
    try:
        with (tmp_path / "a.json").open("rb") as stream:
            sizes = [(len(element["body"]), n_bytes) for element, n_bytes in array_elements(stream, "a.json")]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [size for size, _ in sizes] == [1000] * 6000 + [6_000_000]
    assert sum(n_bytes for _, n_bytes in sizes) == (tmp_path / "a.json").stat().st_size > 40_000_000
    assert peak < 36e6
