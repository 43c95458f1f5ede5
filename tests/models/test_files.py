"""Files that are written whole or not at all, with the permissions that the umask gives."""

import os

import pytest
import torch
from safetensors import safe_open

from longdraft.models.files import from_home, write_atomically, write_tensors


@pytest.fixture(params=[0o022, 0o077, 0o007])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_permissions_are_the_umasks(tmp_path, umask):
    write_atomically(tmp_path / "text", lambda temporary: temporary.write_text("a"))
    write_atomically(tmp_path / "tensors", lambda temporary: write_tensors({"a": torch.ones(2)}, temporary, {"b": "c"}))
    (tmp_path / "tensors").chmod(0o400)  # the permissions of the file it replaces do not matter
    write_atomically(tmp_path / "tensors", lambda temporary: write_tensors({"a": torch.ones(2)}, temporary, {"b": "c"}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensors", "text"]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    with safe_open(tmp_path / "tensors", "pt") as opened:
        assert opened.metadata() == {"b": "c"} and torch.equal(opened.get_tensor("a"), torch.ones(2))


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    def broken(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    write_atomically(tmp_path / "text", lambda temporary: temporary.write_text("whole"))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "text", broken)
    one = torch.ones(2)
    with pytest.raises(RuntimeError, match="share memory"):
        write_atomically(tmp_path / "text", lambda temporary: write_tensors({"a": one, "b": one}, temporary))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert [from_home(path) for path in ("~/a", "a/~", "./a", "")] == ["/somewhere/a", "a/~", "./a", ""]
