"""Records as published data sets have them: lines under each compression, Parquet by row groups, Arrow as `datasets`
saves it; the same documents come out of all."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.record_formats import ChatFormat, TextFormat
from longdraft.data_prep.segments import COSTLY_SEGMENTS, read_documents, scan
from longdraft.data_prep.settings import Source, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.streams import COMPRESSED, is_compressed

TEXTS = [f"text {i} " + "é\n" * (i % 50) for i in range(400)]
RECORDS = [{"id": i, "text": text, "meta": {"set": "a"}} for i, text in enumerate(TEXTS)]
COMPRESSIONS = ["", *COMPRESSED]


def write_lines(path, records, compression=None):
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    if compression is None:
        path.write_bytes(lines)
        return
    with pa.CompressedOutputStream(str(path), compression) as stream:
        stream.write(lines)


def write_as(path, records):
    """In the layout that the file's name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=70)
    elif path.name == "stream.arrow":
        with pa.ipc.new_stream(path, (table := pa.Table.from_pylist(records)).schema) as writer:
            writer.write_table(table, max_chunksize=70)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, (table := pa.Table.from_pylist(records)).schema) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        write_lines(path, records, COMPRESSED.get(path.suffix))


NAMES = [*(f"lines.jsonl{end}" for end in COMPRESSIONS), "table.parquet", "stream.arrow", "file.arrow"]


def segments_of(path, segment_bytes=2000):
    (file,) = list_files([Source(str(path))])
    # A compressed file has fewer segments, since each is read from the file's beginning.
    return scan([file], segment_bytes // COSTLY_SEGMENTS if is_compressed(file.path) else segment_bytes)[1]


@pytest.mark.parametrize("name", NAMES)
def test_every_layout_gives_the_same_documents(tmp_path, name):
    path = tmp_path / name
    write_as(path, RECORDS)
    segments = segments_of(path)
    assert len(segments) > 3
    found = [document for segment in segments for document in read_documents(segment)]
    assert [document.name for document in found] == [f"{name}:{i}" for i in range(1, 401)]
    assert [document.text for document in found if isinstance(document, Document)] == TEXTS
    assert sum(segment.n_documents for segment in segments) == 400
    # Each segment by itself, in any order.
    for segment in reversed(segments):
        names = [document.name for document in read_documents(segment)]
        assert names == [f"{name}:{segment.first_number + i}" for i in range(segment.n_documents)]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_prepares_to_the_source_byte_for_byte(tmp_path, name, tiny_tokenizer, read_back):
    (tmp_path / "source").mkdir()
    write_as(tmp_path / "source" / name, RECORDS)
    (tmp_path / "source" / "README.json").write_text("not a record")
    config = PrepareConfig(same_way([str(tmp_path / "source")]), tmp_path / "out", seq_len=64, heldout_share=0.2)
    prepare(config, tiny_tokenizer, "hash")
    found = [read_back(ShardSet(config.out / split), tiny_tokenizer) for split in ("train", "heldout")]
    assert found[0] | found[1] == {f"source/{name}:{i}": text.encode() for i, text in enumerate(TEXTS, start=1)}


def test_what_the_datasets_library_saved_is_read(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved", num_shards=2)
    datasets.Dataset.from_list(RECORDS).to_parquet(tmp_path / "one.parquet")
    files = list_files([Source(str(tmp_path / "saved"))])
    assert [file.kind for file in files] == ["table", "table"]
    found = [d for segment in scan(files, 1)[1] for d in read_documents(segment)]
    assert [document.text for document in found if isinstance(document, Document)] == TEXTS
    found = [d for segment in segments_of(tmp_path / "one.parquet") for d in read_documents(segment)]
    assert [document.text for document in found if isinstance(document, Document)] == TEXTS


@pytest.mark.parametrize("name", NAMES)
def test_conversations(tmp_path, name):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    write_as(tmp_path / name, [{"messages": turns}, {"messages": turns[:1]}])
    (segment,) = segments_of(tmp_path / name)
    good, bad = read_documents(segment, ChatFormat("messages"))
    assert isinstance(good, Conversation) and good.messages == (("user", "a?"), ("assistant", "b"))
    assert isinstance(bad, BadDocument) and (bad.name, bad.why) == (f"{name}:2", "no_assistant_turn")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_is_told(tmp_path, name):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    write_as(tmp_path / name, [{"messages": turns, "unfinished": cut} for cut in (True, False, None)])
    (segment,) = segments_of(tmp_path / name)
    assert [document.unfinished for document in read_documents(segment, ChatFormat("messages"))] == [True, False, False]


@pytest.mark.parametrize("name", ["table.parquet", "stream.arrow", "file.arrow"])
def test_texts_in_a_column_of_bytes(tmp_path, name):
    write_as(tmp_path / name, [{"text": text} for text in (b"abc", "é".encode(), b"\xff", b"")])
    (segment,) = segments_of(tmp_path / name)
    found = [getattr(document, "text", None) or document.why for document in read_documents(segment)]
    assert found == ["abc", "é", "bad_utf8", "empty"]


def test_any_error_of_the_tables_library_names_the_file(tmp_path, monkeypatch):
    """A damaged schema raises the library's own error, not a ValueError."""
    write_as(tmp_path / "table.parquet", RECORDS[:3])

    def refuses(source):
        raise pa.ArrowNotImplementedError("Integers with more than 64 bits not implemented")

    monkeypatch.setattr(pq, "ParquetFile", refuses)
    with pytest.raises(ValueError, match=r"table\.parquet cannot be read \(Integers .*\); it is damaged"):
        segments_of(tmp_path / "table.parquet")


@pytest.mark.parametrize("name", ["table.parquet", "stream.arrow", "file.arrow"])
def test_bad_rows_of_tables_are_named(tmp_path, name):
    write_as(tmp_path / name, [{"text": "good"}, {"text": None}, {"text": ""}])
    (segment,) = segments_of(tmp_path / name)
    found = list(read_documents(segment))
    assert [getattr(document, "why", None) for document in found] == [None, "field_not_text", "empty"]
    found = list(read_documents(segment, TextFormat("content")))
    assert [getattr(document, "why", None) for document in found] == ["missing_field"] * 3
    assert [document.name for document in found] == [f"{name}:{i}" for i in (1, 2, 3)]
    assert len({document.digest for document in found}) == 3


def test_text_that_is_no_utf8_in_a_table(tmp_path):
    broken = pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\3\0\0\0\5\0\0\0"), pa.py_buffer(b"abc\xff\xfe"))
    pq.write_table(pa.table({"text": broken}), tmp_path / "t.parquet")
    (segment,) = segments_of(tmp_path / "t.parquet")
    good, bad = read_documents(segment)
    assert isinstance(good, Document) and good.text == "abc"
    assert isinstance(bad, BadDocument) and bad.why == "bad_utf8"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lines.jsonl"])
def test_truncated_files_are_refused_by_name(tmp_path, name):
    path = tmp_path / name
    write_as(path, RECORDS)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(.*\); it is damaged or was not fetched whole"):
        segments_of(path)


def test_a_line_of_many_megabytes(tmp_path):
    text = "x" * 20_000_000
    write_as(tmp_path / "long.jsonl.zst", [{"text": "a"}, {"text": text}, {"text": "b"}])
    segments = segments_of(tmp_path / "long.jsonl.zst", segment_bytes=1 << 20)
    assert [segment.n_documents for segment in segments] == [2, 1]
    found = [document for segment in segments for document in read_documents(segment)]
    assert [document.text for document in found if isinstance(document, Document)] == ["a", text, "b"]


def test_large_row_groups_are_not_read_again_for_every_segment(tmp_path, monkeypatch):
    """A row group of Parquet is decoded from its beginning, so it is cut coarsely, and small groups are joined."""
    texts = [{"text": f"{i} " + "x" * 1000} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "one.parquet", row_group_size=3000)
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "many.parquet", row_group_size=10)
    assert len(segments_of(tmp_path / "one.parquet", 100_000)) == 1
    assert len(segments_of(tmp_path / "one.parquet", 10_000)) == 4
    many = segments_of(tmp_path / "many.parquet", 100_000)
    assert 20 < len(many) < 40
    found = [document.text for segment in many for document in read_documents(segment)]
    assert found == [record["text"] for record in texts]


def test_a_byte_order_mark_before_the_first_record(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n{"text": "b"}\n')
    (segment,) = segments_of(tmp_path / "bom.jsonl")
    assert [document.text for document in read_documents(segment)] == ["a", "b"]
