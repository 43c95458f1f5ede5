"""WebDataset archives: their samples are records like any other."""

import io
import json
import tarfile

import pytest

from longdraft.data_prep.chat import make_chat_encoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document
from longdraft.data_prep.record_formats import ChatFormat, TextFormat
from longdraft.data_prep.regenerate import RegenerateConfig, open_input
from longdraft.data_prep.segments import read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.sources import list_files

TURNS = [{"role": "user", "content": "2020-01-01"}, {"role": "assistant", "content": "a date"}]
TEXTS = [f"text {i}\r\n\u00e9" for i in range(30)]


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "part-[0].tar"
    with tarfile.open(path, "w") as tar:
        for i, text in enumerate(TEXTS):
            for suffix, content in (("txt", text), ("chat.json", json.dumps(TURNS))):
                info = tarfile.TarInfo(f"deep/{i:03d}.{suffix}")
                info.size = len(content.encode())
                tar.addfile(info, io.BytesIO(content.encode()))
    return path


def documents(path, record_format):
    (file,) = list_files([Source(str(path))])
    (segment,) = scan([file], 100)[1]
    return list(read_documents(segment, record_format))


def test_samples_are_records(archive):
    found = documents(archive, TextFormat("txt"))
    assert [(document.name, document.text) for document in found if isinstance(document, Document)] == [
        (f"part-[0].tar:{number}", text) for number, text in enumerate(TEXTS, start=1)
    ]
    found = documents(archive, ChatFormat("chat.json"))
    assert all(isinstance(document, Conversation) for document in found) and len(found) == len(TEXTS)
    assert found[0].messages == (("user", "2020-01-01"), ("assistant", "a date"))
    missing = documents(archive, TextFormat())[-1]
    assert isinstance(missing, BadDocument) and missing.why == "missing_field"
    assert missing.detail.startswith("has no field 'text' but 'txt', 'chat.json'; ")


def test_one_bad_sample_is_one_bad_document(tmp_path):
    """Whatever else the sample and earlier samples hold."""
    path = tmp_path / "mixed.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in {
            "0.txt": b"good", "0.jpg": b"no picture", "0.wav": b"no sound", "1.txt": b"caf\xe9",
            "2.json": b"{", "2.txt": b"", "./deep/3.txt": b"last", "3": b"no field",
        }.items():  # fmt: skip
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    found = documents(path, TextFormat("txt"))
    assert [getattr(one, "text", None) or one.why for one in found] == ["good", "bad_utf8", "empty", "last"]
    assert "field 'txt' is no UTF-8 (byte 0xe9 at 3)" in found[1].detail
    assert [one.why for one in documents(path, TextFormat("json")) if isinstance(one, BadDocument)][2] == "bad_json"


def test_all_conversations_of_an_archive_are_counted(archive, tiny_tokenizer):
    """Although the archive is one segment, because regeneration divides the samples into tasks."""
    out = archive.parent / "out"
    config = RegenerateConfig((str(archive),), out, max_prompt=100, answering={}, chat_field="chat.json")
    _, count, conversations = open_input(config, make_chat_encoder(tiny_tokenizer, "plain"))
    assert count == len(list(conversations)) == len(TEXTS)


def test_an_answer_that_was_cut_is_told_by_a_file_of_its_own(tmp_path):
    path = tmp_path / "cut.tar"
    with tarfile.open(path, "w") as tar:
        for i, cut in enumerate((b"true", b"false", None)):
            parts = {"chat.json": json.dumps(TURNS).encode()} | ({"unfinished.json": cut} if cut else {})
            for suffix, content in parts.items():
                info = tarfile.TarInfo(f"{i}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    assert [one.unfinished for one in documents(path, ChatFormat("chat.json"))] == [True, False, False]


def test_what_is_no_archive_is_named(archive):
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2 + 700], b"<html>not found</html>" * 90):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=r"part-\[0\]\.tar cannot be read \(.*\); it is damaged"):
            documents(archive, TextFormat("txt"))


def test_an_archive_is_taken_where_it_is_asked_for(archive):
    with pytest.raises(ValueError, match=r"--files '\*\.tar' takes the 1 files of \.tar"):
        list_files([Source(str(archive.parent))])
    assert [file.kind for file in list_files([Source(str(archive.parent), files=("*.tar",))])] == ["archive"]
