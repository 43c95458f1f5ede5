"""MDS shards that mosaicml-streaming 0.13.0 wrote, in `mds/`: plain, under zstd, with a pickled column, with bytes."""

import io
from pathlib import Path

import numpy as np
import pytest

from longdraft.data_prep.formats import TextFormat, TokenIdsFormat
from longdraft.data_prep.recipe import Source
from longdraft.data_prep.records import read_documents, scan
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tables import Mds, open_table, table_rows

WRITTEN = Path(__file__).parent / "mds"
ENDING = {"plain": "", "zstd": ".zstd"}


def samples():
    """The samples in these shards, made by the code that wrote them."""
    rng = np.random.default_rng(0)
    for i in range(40):
        ids = rng.integers(0, 50, size=30 + i).astype(np.uint32)
        cut = 10 + i % 7
        yield {
            "input_ids": ids,
            "indices": np.array([[0, cut], [cut, len(ids)]], dtype=np.uint32),
            "domain": f"book é {i}".encode(),
            "length": len(ids),
            "text": f"text {i}\n".encode(),
            "extra": {"i": i},
        }


@pytest.mark.parametrize("kind", ENDING)
def test_every_column_comes_back(kind):
    expected = list(samples())
    found = []
    for file in list_files([Source(path=str(WRITTEN / kind))]):
        with open_table(file) as table:
            n = len(table.chunks)
        found += [row for i in range(n) for row in table_rows(file, i, i + 1, tuple(expected[0]))]
    assert len(found) == 40
    for sample, wanted in zip(found, expected, strict=True):
        assert sample.keys() == wanted.keys()
        for name, value in wanted.items():
            assert type(sample[name]) is type(value), name
            np.testing.assert_array_equal(sample[name], value)
            assert getattr(sample[name], "dtype", None) == getattr(value, "dtype", None), name


def test_a_column_of_bytes_can_hold_the_text():
    segments = scan(list_files([Source(path=str(WRITTEN / "bytes"))]), 1)[1]
    found = [document.text for segment in segments for document in read_documents(segment)]
    assert found == ["text é 0\n", "text é 1\n"]


def test_only_what_is_asked_for_is_decoded():
    (file,) = list_files([Source(path=str(WRITTEN / "pickled"))])
    assert list(table_rows(file, fields=("text", "none"))) == [{"text": b"a"}]
    with pytest.raises(ValueError, match=r"shard\.00000\.mds: cannot be read .*'pkl'"):
        list(table_rows(file, fields=("x",)))


@pytest.mark.parametrize("kind", ENDING)
def test_ids_of_another_tokenizer_become_a_document_a_span(kind, tiny_tokenizer):
    form = TokenIdsFormat("input_ids", "indices", tiny_tokenizer.backend_tokenizer.to_str())
    files = list_files([Source(path=str(WRITTEN / kind))])
    segments = scan(files, 2000)[1]
    # A compressed shard is unpacked for each of its segments, so it has one.
    assert (len(segments) > len(files)) == (kind == "plain")
    found = [d for segment in segments for d in read_documents(segment, form)]
    expected = []
    for sample in samples():
        for begin, end in sample["indices"].tolist():
            ids = sample["input_ids"][begin:end].tolist()
            expected.append(tiny_tokenizer.decode(ids, skip_special_tokens=True).strip("\ufffd"))
    assert [document.text for document in found] == expected
    assert [document.name for document in found][:3] == [
        f"{kind}/shard.00000.mds{ENDING[kind]}:{place}" for place in ("1.1", "1.2", "2.1")
    ]


def test_texts_and_damage(tmp_path):
    (file, *_) = files = list_files([Source(path=str(WRITTEN / "plain"))])
    found = [d for segment in scan(files, 2000)[1] for d in read_documents(segment, TextFormat())]
    assert [document.text for document in found] == [f"text {i}\n" for i in range(40)]
    whole, path = Path(file.path).read_bytes(), tmp_path / "cut.mds"
    overlapping = np.array([1, 12, 4], dtype=np.uint32).tobytes()
    for content in (*(whole[:cut] for cut in (2, 30, 1000, len(whole) - 3)), b"text, no shard" * 50, overlapping):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.mds: cannot be read"):
            list(table_rows(*list_files([Source(path=str(path))]), fields=("text",)))


class Small(io.BytesIO):
    """A file on a machine with little memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > 1 << 20:
            raise MemoryError
        return super().read(size)


def test_what_is_no_shard_takes_no_memory():
    with pytest.raises(ValueError):
        Mds(Small(b"version https://git-lfs.github.com/spec/v1"))
