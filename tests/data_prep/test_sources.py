import gzip
import os

import pytest

from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.sources import list_files


def names(sources, **kwargs):
    return [file.name for file in list_files([Source(path=str(source), **kwargs) for source in sources])]


def test_lists_by_suffix_sorted_and_without_hidden_files(tmp_path):
    root = tmp_path / "corpus"
    for name in ("b.txt", "a.PY", "sub/c.jsonl", "image.png", ".hidden.txt", ".git/x.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert names([root]) == ["corpus/a.PY", "corpus/b.txt", "corpus/sub/c.jsonl"]
    assert names([root], files=("*.PNG",)) == ["corpus/image.png"]
    assert names([root / "image.png"]) == names([root / "image.png"], files=("*.PNG", "*.md")) == ["image.png"]
    with pytest.raises(ValueError, match=r"image\.png.*\*\.jsonl"):
        names([root / "image.png"], files=("*.jsonl",))
    assert [file.kind for file in list_files([Source(path=str(root))])] == ["text", "text", "jsonl"]


def test_same_name_in_two_sources(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("x")
    assert names([tmp_path / "one/train.jsonl", tmp_path / "two/train.jsonl"]) == ["one/train.jsonl", "two/train.jsonl"]


def test_a_file_of_two_sources_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("x")
    with pytest.raises(ValueError, match=r"in/a\.jsonl"):
        names([tmp_path / "in", tmp_path / "in" / "a.jsonl"])
    (tmp_path / "in" / "b.jsonl").symlink_to("a.jsonl")
    assert len(names([tmp_path / "in"])) == 1  # two names of one file


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
    _, segments = scan([file for file in list_files([Source(path=str(source))]) if file.name in wanted], 1 << 20)
    return [document for segment in segments for document in read_documents(segment)]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda saved: (saved / "train_sft" / "data-00001-of-00002.arrow").unlink(), "data-00001-of-00002.arrow"),
        (lambda saved: (saved / "train_sft" / "state.json").write_text("{"), "train_sft"),
        (lambda saved: (saved / "train_sft" / "state.json").write_text('{"_data_files": null}'), "train_sft"),
        (lambda saved: (saved / "dataset_dict.json").write_text("[]"), "saved"),
    ],
    ids=["file missing", "no JSON", "no files", "no splits"],
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


@pytest.mark.parametrize("name", ["a.tar", "a.csv", "a.json", "a.tsv.gz"])
def test_kinds_that_are_taken_only_if_they_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"{}") if name.endswith("gz") else b"{}")
    with pytest.raises(ValueError, match="--files"):
        names([tmp_path])
    (file,) = list_files([Source(path=str(tmp_path), files=("*.*",))])
    assert file.kind == {"a.tar": "archive", "a.json": "jsonl"}.get(name, "csv")


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), os.mkfifo, lambda p: p.symlink_to(p.name)])
def test_what_cannot_be_read_is_named(tmp_path, make):
    make(tmp_path / "x.txt")
    for source in (tmp_path, tmp_path / "x.txt"):
        with pytest.raises(ValueError, match=r"x\.txt"):
            names([source])


def test_stdlib_is_sorted_code_without_tests_and_packages():
    files = list_files([Source(path="stdlib")])
    found = [file.name.partition("/")[2] for file in files]
    assert found == sorted(found)
    assert {"json/decoder.py", "pydoc_data/topics.py"} <= set(found)
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert all(file.size for file in files)


@pytest.mark.parametrize("source", ["no/such/place", "."])
def test_missing_source_is_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=source.replace(".", r"\.")):
        list_files([Source(path=source)])


def test_a_folder_that_is_still_being_made_is_no_source(tmp_path):
    for name in ("plan.json", "part-00000.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"plan\.json"):
        list_files([Source(path=str(tmp_path))])
    (tmp_path / "manifest.json").write_text("{}")
    assert [file.name.partition("/")[2] for file in list_files([Source(path=str(tmp_path))])] == ["part-00000.jsonl"]
