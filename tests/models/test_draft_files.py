"""The pair of files of a draft: where it may be written, that it is written whole or not at all, what is read of it."""

import json
import resource
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.models import draft_files
from longdraft.models.draft_files import CONFIG, STAGED, WEIGHTS, check_out, read_config, write_pair
from longdraft.models.files import file_digest

OURS = {"format_version": 1, "method": "medusa"}


def write(folder: Path, value: float, padding: int = 0) -> None:
    content = OURS | {"value": value, "padding": "x" * padding}
    write_pair(folder, lambda sha256: content | {"sha256": sha256}, {"a": torch.full((400,), value)})


def value(folder: Path) -> float:
    """What both files say, which are no pair otherwise."""
    content = read_config(folder)
    assert content["sha256"] == file_digest(folder / WEIGHTS)
    assert float(load_file(folder / WEIGHTS)["a"][0]) == content["value"]
    return content["value"]


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def no_file_above(n_bytes: int):
    """What a full disk does to a file that grows beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_pair_replaces_a_pair(tmp_path):
    for number in (1.0, 2.0):
        write(tmp_path / "a" / "draft", number)
        assert value(tmp_path / "a" / "draft") == number
    assert sorted(files(tmp_path)) == [f"a/draft/{CONFIG}", f"a/draft/{WEIGHTS}"]


# The weights take 1.7 KB: one limit meets them, the other the long config.json that is written behind them.
@pytest.mark.parametrize("limit", [1000, 3000])
def test_a_full_disk_changes_nothing(tmp_path, limit):
    write(tmp_path / "draft", 1.0)
    before = files(tmp_path)
    for folder in (tmp_path / "draft", tmp_path / "new" / "draft"):
        with (
            no_file_above(limit),
            pytest.raises(ValueError, match=r"out: no draft can be written to .*draft: .*File too"),
        ):
            write(folder, 2.0, padding=4000)
        assert files(tmp_path) == before and sorted(tmp_path.iterdir()) == [tmp_path / "draft"]
    assert value(tmp_path / "draft") == 1.0 and not (tmp_path / "draft" / STAGED).exists()
    write(tmp_path / "draft", 2.0, padding=4000)
    assert value(tmp_path / "draft") == 2.0


@pytest.mark.parametrize("after", ["write_tensors", "file_digest", "sync"])
def test_an_interrupt_changes_nothing(tmp_path, monkeypatch, after):
    write(tmp_path / "draft", 1.0)
    before, work = files(tmp_path), getattr(draft_files, after)

    def interrupted(*arguments):
        work(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(draft_files, after, interrupted)
    for folder in (tmp_path / "draft", tmp_path / "new" / "draft"):
        with pytest.raises(KeyboardInterrupt):
            write(folder, 2.0)
        assert files(tmp_path) == before and sorted(tmp_path.iterdir()) == [tmp_path / "draft"]


def test_an_interrupt_between_the_two_files_leaves_the_new_pair(tmp_path, monkeypatch):
    write(tmp_path, 1.0)
    rename = Path.rename

    def interrupted(self, target):
        rename(self, target)
        if self.name == WEIGHTS:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2.0)
    assert value(tmp_path) == 2.0 and not (tmp_path / STAGED).exists()


def test_what_fails_its_check_changes_nothing(tmp_path):
    write(tmp_path / "draft", 1.0)
    before = files(tmp_path)

    def check(staged):
        assert staged.parent == folder and value(staged) == 2.0
        raise ValueError("it is not as it should be")

    content = OURS | {"value": 2.0}
    for folder in (tmp_path / "draft", tmp_path / "new" / "draft"):
        with pytest.raises(ValueError, match="it is not as it should be"):
            write_pair(folder, lambda sha256: content | {"sha256": sha256}, {"a": torch.full((400,), 2.0)}, check)
        assert files(tmp_path) == before and sorted(tmp_path.iterdir()) == [tmp_path / "draft"]


def test_what_a_kill_left_is_cleared(tmp_path):
    (tmp_path / STAGED).mkdir()
    (tmp_path / STAGED / ".tmpabc").write_text("half")
    write(tmp_path, 1.0)
    assert value(tmp_path) == 1.0 and sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]


def test_only_what_is_absent_empty_or_ours_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "ours", 1.0)
    (tmp_path / "ours" / "notes.txt").write_text("kept")
    for name in ("empty", "link", "ours", "not/there"):
        check_out(tmp_path / name)
    write(tmp_path / "ours", 2.0)
    assert value(tmp_path / "ours") == 2.0 and (tmp_path / "ours" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "held", "message"),
    [
        ("model", {CONFIG: '{"model_type": "llama"}', WEIGHTS: "w"}, f"holds {CONFIG}, {WEIGHTS}, which is no draft"),
        ("model", {"a.txt": "", "b": "", "c": "", "d": ""}, "holds a.txt, b, c, ..., which is no draft that longdraft"),
        ("model", {CONFIG: '{"format_version"'}, f"holds {CONFIG}, which is no draft"),
        ("model", {WEIGHTS: "w"}, f"holds {WEIGHTS}, which is no draft"),
        ("model/a.txt", {"a.txt": ""}, "Not a directory; give another folder"),
        ("model/a.txt/b/c", {"a.txt": ""}, "Not a directory; give another folder"),
        ("x" * 300, {}, "File name too long; give another folder"),
        ("new/" + "x" * 300, {}, "File name too long"),
        ("/proc/nothing/draft", {}, "no draft can be written to /proc/nothing/draft: No such file or directory"),
        ("dangling", {}, "is a link to nothing"),
    ],
)
def test_nothing_else_is_touched(tmp_path, name, held, message):
    (tmp_path / "model").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for file, text in held.items():
        (tmp_path / "model" / file).write_text(text)
    before = files(tmp_path), sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"^out: ") as error:
        write(tmp_path / name, 2.0)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert (files(tmp_path), sorted(tmp_path.rglob("*"))) == before


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_not_written(tmp_path, wrong, dtype):
    weights = {"a": torch.ones(3, 5, dtype=dtype), "b": torch.ones(3, 5, dtype=dtype), "ids": torch.arange(3)}
    weights["b"][1, 2] = wrong
    with pytest.raises(ValueError, match=r"out: the draft has NaN or infinite weights \(b\)"):
        write_pair(tmp_path / "draft", lambda _: OURS, weights)
    assert not (tmp_path / "draft").exists()


def test_config_json_that_is_none(tmp_path):
    for text, message in (
        ("[" * 100_000 + "]" * 100_000, "cannot be read as JSON (maximum recursion depth"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "cannot be read as JSON (maximum recursion depth"),
        ("9" * 5000, "cannot be read as JSON (Exceeds the limit"),
        ("[]", "holds no fields"),
        (" " * 2**24 + "{}", "cannot be read as JSON (16,777,218 bytes)"),
    ):
        (tmp_path / CONFIG).write_text(text)
        begin = time.monotonic()
        with pytest.raises(ValueError, match=CONFIG) as error:
            read_config(tmp_path)
        assert message in str(error.value) and len(str(error.value)) < 600 and time.monotonic() - begin < 30
    (tmp_path / CONFIG).write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"a": 1}))
    assert read_config(tmp_path) == {"a": 1}
    for missing in (tmp_path / "none", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match=r"holds no config\.json|File name too long"):
            read_config(missing)
