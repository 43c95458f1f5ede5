import hashlib
import json
import os

import pytest

from longdraft.data_prep.documents import BadDocument, Document
from longdraft.data_prep.segments import read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.sources import list_files


def names(sources, **kwargs):
    return [file.name for file in list_files([Source(str(source), **kwargs) for source in sources])]


def test_lists_by_suffix_sorted_and_without_hidden_files(tmp_path):
    root = tmp_path / "corpus"
    for name in ("b.txt", "a.PY", "sub/c.jsonl", "image.png", ".hidden.txt", ".git/x.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert names([root]) == ["corpus/a.PY", "corpus/b.txt", "corpus/sub/c.jsonl"]
    assert names([root], files=("*.PNG",)) == ["corpus/image.png"]
    assert names([root / "image.png"]) == ["image.png"]
    assert names([root, root / "b.txt"]) == ["corpus/a.PY", "corpus/b.txt", "corpus/sub/c.jsonl"]
    assert [file.kind for file in list_files([Source(str(root))])] == ["text", "text", "jsonl"]


def test_same_name_in_two_sources(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("x")
    assert names([tmp_path / "one/train.jsonl", tmp_path / "two/train.jsonl"]) == ["one/train.jsonl", "two/train.jsonl"]


def test_a_file_of_two_sources_that_read_it_otherwise(tmp_path):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("x")
    chats, texts = Source(str(path), chat_field="messages"), Source(str(path), text_field="doc")
    with pytest.raises(ValueError, match=r"in/a\.jsonl': its files already belong to source '.*in/a\.jsonl', which"):
        list_files([chats, texts])
    assert [file.source for file in list_files([texts, Source(str(path.parent), text_field="doc")])] == [0]
    (path.parent / "b.jsonl").write_text("x")
    found = list_files([chats, Source(str(path.parent), text_field="doc")])
    assert [(file.name, file.source) for file in found] == [("a.jsonl", 0), ("in/b.jsonl", 1)]


def test_a_name_that_is_no_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    with pytest.raises(ValueError, match=r"/caf\\xe9\.txt has a name that is no UTF-8; rename it, or leave it out by"):
        names([tmp_path])
    assert names([tmp_path], files=("a*",)) == [f"{tmp_path.name}/a.txt"]


def test_links_keep_their_name(tmp_path):
    (tmp_path / "blob").write_text("x")
    (tmp_path / "named").mkdir()
    (tmp_path / "named/train.jsonl").symlink_to(tmp_path / "blob")
    assert names([tmp_path / "named"]) == ["named/train.jsonl"]
    assert names([tmp_path / "named/train.jsonl"]) == ["train.jsonl"]


@pytest.fixture
def saved(tmp_path):
    """A DatasetDict as save_to_disk writes it, with the caches of later calls of `map` and `filter`."""
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(6)]})
    of_splits = {"train_sft": rows.select(range(4)), "test_sft": rows.select(range(4, 6))}
    datasets.DatasetDict(of_splits).save_to_disk(tmp_path / "saved", num_shards={"train_sft": 2, "test_sft": 1})
    for split in datasets.load_from_disk(tmp_path / "saved").values():
        split.map(lambda row: {"length": len(row["text"])}).filter(lambda row: row["length"] > 0)
    assert len(list((tmp_path / "saved" / "train_sft").glob("cache-*.arrow"))) == 2
    (tmp_path / "saved" / "old").mkdir()
    (tmp_path / "saved" / "old" / "data.jsonl").write_text("{}")
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_by_its_own_lists(saved):
    train = [f"train_sft/data-0000{i}-of-00002.arrow" for i in range(2)]
    test = ["test_sft/data-00000-of-00001.arrow"]
    whole = [f"saved/{name}" for name in (*test, *train)]
    assert names([saved]) == names([saved], files=("*.arrow",)) == names([saved], text_field="text") == whole
    assert names([saved.parent], files=("saved/*", "other/*"))[-3:] == [f"{saved.parent.name}/{name}" for name in whole]
    assert names([saved], split="test_sft") == [f"saved/{name}" for name in test]
    assert names([saved / "train_sft"]) == train
    assert names([saved], files=("*/data-00001*",)) == [f"saved/{train[1]}"]
    texts = [one.text for name in (train, test) for one in all_documents(saved, [f"saved/{file}" for file in name])]
    assert texts == [f"row {i}" for i in range(6)]


def all_documents(source, wanted):
    _, segments = scan([file for file in list_files([Source(str(source))]) if file.name in wanted], 1 << 20)
    return [document for segment in segments for document in read_documents(segment)]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda saved: (saved / "train_sft" / "data-00001-of-00002.arrow").unlink(), "data-00001-of-00002.arrow"),
        (lambda saved: (saved / "train_sft" / "state.json").write_text("{"), "state.json"),
        (lambda saved: (saved / "train_sft" / "state.json").write_text('{"_data_files": null}'), "state.json"),
        (lambda saved: (saved / "dataset_dict.json").write_text("[]"), "dataset_dict.json"),
        (lambda saved: (saved / "dataset_dict.json").write_text('{"splits": ["train_sft", "gone"]}'), "gone"),
    ],
    ids=["file missing", "no JSON", "no files", "no splits", "split missing"],
)
def test_a_damaged_saved_data_set_is_named(saved, damage, named):
    damage(saved)
    with pytest.raises(ValueError, match=named):
        names([saved])


def test_the_cache_of_load_dataset_has_its_caches_left_out(tmp_path):
    for name in ("books-train.arrow", "cache-0123456789abcdef.arrow", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    assert names([tmp_path]) == [f"{tmp_path.name}/books-train.arrow"]
    (tmp_path / "dataset_info.json").unlink()
    (tmp_path / "state.json").write_text("{}")  # another program's
    assert len(names([tmp_path])) == 2


def test_stdlib_is_sorted_code_without_tests_and_packages():
    files = list_files([Source("stdlib")])
    found = [file.name.partition("/")[2] for file in files]
    assert found == sorted(found)
    assert {"json/decoder.py", "pydoc_data/topics.py"} <= set(found)
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert all(file.size for file in files)


@pytest.mark.parametrize("source", ["no/such/place", "."])
def test_missing_source_is_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=source.replace(".", r"\.")):
        list_files([Source(source)])
    with pytest.raises(ValueError, match="sources is empty"):
        list_files([])


def test_a_folder_that_is_still_being_made_is_no_source(tmp_path):
    for name in ("plan.json", "part-00000.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"is not finished \(plan\.json without manifest\.json\)"):
        list_files([Source(str(tmp_path))])
    (tmp_path / "manifest.json").write_text("{}")
    assert [file.name.partition("/")[2] for file in list_files([Source(str(tmp_path))])] == ["part-00000.jsonl"]


def test_segments_cover_the_file_at_line_ends(tmp_path):
    lines = [json.dumps({"text": f"{i}" * (i % 40 + 1)}) + "\n" for i in range(200)]
    lines[-1] = lines[-1].rstrip("\n")
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(lines))
    described, segments = scan(list_files([Source(str(path))]), segment_bytes=500)
    raw = path.read_bytes()
    assert described == {"lines.jsonl": {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}}
    assert len(segments) > 5
    read = [list(read_documents(segment)) for segment in segments]
    assert [document.name for part in read for document in part] == [f"lines.jsonl:{i + 1}" for i in range(200)]
    assert [getattr(d, "text", None) for part in read for d in part] == [json.loads(line)["text"] for line in lines]


def test_text_file_is_one_document_as_it_stands(tmp_path):
    raw = "\ufefffirst\r\nsecond\rthird\n\x00é".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    (segment,) = scan(list_files([Source(str(tmp_path / "a.txt"))]), segment_bytes=3)[1]
    (document,) = read_documents(segment)
    assert document == Document("a.txt", hashlib.sha256(raw).digest(), raw.decode())


def test_every_bad_line_is_named(tmp_path):
    lines = [
        b'{"text": "good"}',
        b"{broken",
        b'{"text": "\xff"}',
        b'{"other": "x"}',
        b"[1, 2]",
        b'{"text": 7}',
        b'{"text": ""}',
        b"",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "also good"}\r',
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    (segment,) = scan(list_files([Source(str(path))]), 1 << 20)[1]
    documents = list(read_documents(segment))
    bad = {document.name: document.why for document in documents if isinstance(document, BadDocument)}
    why = [
        *("bad_json", "bad_utf8", "missing_field", "missing_field", "field_not_text", "empty", None, "bad_utf8"),
        "bad_json",
    ]
    assert bad == {f"bad.jsonl:{line}": reason for line, reason in enumerate(why, start=2) if reason}
    assert [d.text for d in documents if isinstance(d, Document)] == ["good", "also good"]


@pytest.mark.parametrize("segment_bytes", [1, 40, 1 << 20])
def test_blank_lines_are_no_documents(tmp_path, segment_bytes):
    """Wherever the file is cut. The numbers are those of the lines, and the hash is the file's."""
    path = tmp_path / "lines.jsonl"
    path.write_text('\n \t\n{"text": "a"}\n\r\n{"text": "b"}\n{"text": "c"}\n\n\n{"text": "d"}\n\n \n')
    described, cut = scan(list_files([Source(str(path))]), segment_bytes)
    assert described["lines.jsonl"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    for segments in (cut, cut[::-1]):
        found = {document.name: document for segment in segments for document in read_documents(segment)}
        assert {name: document.text for name, document in sorted(found.items())} == {
            "lines.jsonl:3": "a", "lines.jsonl:5": "b", "lines.jsonl:6": "c", "lines.jsonl:9": "d",
        }  # fmt: skip
    assert sum(segment.n_documents for segment in cut) == 4
    path.write_text("\n \n")
    (segment,) = scan(list_files([Source(str(path))]), segment_bytes)[1]
    assert [(document.name, document.why) for document in read_documents(segment)] == [("lines.jsonl", "empty")]


def test_bad_text_files(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "empty.jsonl").touch()
    found = [d for segment in scan(list_files([Source(str(tmp_path))]), 100)[1] for d in read_documents(segment)]
    assert [(d.name.partition("/")[2], getattr(d, "why", None)) for d in found] == [
        ("empty.jsonl", "empty"),
        ("empty.txt", "empty"),
        ("latin.txt", "bad_utf8"),
    ]


def test_file_that_changes_under_us_is_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    (segment,) = scan(list_files([Source(str(path))]), 100)[1]
    path.write_text("after")
    os.utime(path, ns=(0, segment.mtime_ns + 1))
    with pytest.raises(ValueError, match=r"a\.txt changed"):
        list(read_documents(segment))


def test_patterns_hold_for_a_file_too(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert names([tmp_path / "a.txt"], files=("*.TXT", "*.md")) == ["a.txt"]
    with pytest.raises(ValueError, match=r"a\.txt' holds no file that matches \*\.jsonl; see --files"):
        names([tmp_path / "a.txt"], files=("*.jsonl",))


def test_a_folder_of_csv_alone_says_how_to_take_it(tmp_path):
    for name in ("a.csv", "b.csv", "c.json"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=r"see --files \(--files '\*\.csv' takes the 3 files of \.csv, \.json\)"):
        names([tmp_path])
