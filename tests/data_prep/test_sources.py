import pytest

from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.sources import list_files


def names(sources, **kwargs):
    return [file.name for file in list_files([Source(path=str(source), **kwargs) for source in sources])]


def test_lists_by_suffix_sorted_and_without_hidden_files(tmp_path):
    root = tmp_path / "corpus"
    for name in ("b.txt", "a.PY", "sub/c.jsonl", "image.png", ".hidden.txt", ".git/x.txt", "meta.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    assert names([root]) == ["corpus/a.PY", "corpus/b.txt", "corpus/sub/c.jsonl"]
    assert names([root], files=("*.TXT", "*.json")) == ["corpus/b.txt", "corpus/meta.json"]
    assert names([root / "b.txt"]) == names([root / "b.txt"], files=("*.TXT", "*.md")) == ["b.txt"]
    with pytest.raises(ValueError, match=r"b\.txt.*\*\.jsonl"):
        names([root / "b.txt"], files=("*.jsonl",))
    assert [file.kind for file in list_files([Source(path=str(root))])] == ["text", "text", "jsonl"]


def test_same_name_in_two_sources(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("x")
    assert names([tmp_path / "one/train.jsonl", tmp_path / "two/train.jsonl"]) == ["one/train.jsonl", "two/train.jsonl"]


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
    return tmp_path / "saved"


def test_a_saved_data_set_is_read_without_its_caches(saved):
    train = [f"saved/train_sft/data-0000{i}-of-00002.arrow" for i in range(2)]
    test = ["saved/test_sft/data-00000-of-00001.arrow"]
    assert names([saved]) == names([saved], files=("*.arrow",)) == names([saved], text_field="text") == [*test, *train]
    assert names([saved], files=("test_sft/*.arrow",)) == test
    segments = scan(list_files([Source(path=str(saved), files=("train_sft/*.arrow",))]), 1 << 20)[1]
    texts = [getattr(one, "text", one) for segment in segments for one in read_documents(segment)]
    assert texts == [f"row {i}" for i in range(4)]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to(path.name)])
def test_what_cannot_be_read_is_named(tmp_path, make):
    make(tmp_path / "x.txt")
    with pytest.raises(OSError, match=r"x\.txt"):
        names([tmp_path])


def test_stdlib_is_sorted_code_without_tests_and_packages():
    files = list_files([Source(path="stdlib")])
    found = [file.name.partition("/")[2] for file in files]
    assert found == sorted(found)
    assert {"json/decoder.py", "pydoc_data/topics.py"} <= set(found)
    assert not [name for name in found if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert all(file.n_bytes for file in files)


@pytest.mark.parametrize("source", ["no/such/place", "."])
def test_missing_source_is_named(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"source '{source}'"):
        list_files([Source(path=source)])
