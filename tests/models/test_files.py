"""Files that are written whole or not at all, with the permissions that the umask gives."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from longdraft.models.files import WorkFolder, locked, write_atomically, write_tensors


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


HOLD = """
import sys, time
from pathlib import Path
from longdraft.models.files import locked
with locked(Path(sys.argv[1]), "out", "busy"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_excludes_other_processes_and_ends_with_its_own(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "lock"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        lock = locked(tmp_path / "lock", "train.run_dir", "stop the other")
        with pytest.raises(ValueError, match=r"^train.run_dir: stop the other$"), lock:
            pass
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path / "lock", "train.run_dir", "stop the other"):
        pass


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_work_goes_on_with_a_warning(tmp_path, monkeypatch, capsys, error):
    def refuse(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", "train.run_dir", "busy"):
        pass
    assert capsys.readouterr().out.startswith("train.run_dir: ")
    with pytest.raises(ValueError, match=r"^out: .*cannot be written"), locked(tmp_path / "lock/a", "out", ""):
        pass


def finish(folder, task, text):
    (folder.path / f"{task}.txt").write_text(text)
    folder.write(task, {"text": text}, [folder.path / f"{task}.txt"])


def test_finished_tasks_are_read_back_and_damaged_ones_are_not(tmp_path):
    folder = WorkFolder(tmp_path / "out", {"seed": 0}, r"\w+\.txt")
    with folder.opened():
        for task in "abcd":
            finish(folder, task, task * 3)
    (folder.path / "b.txt").unlink()
    (folder.path / "c.txt").write_text("other size")
    for damaged in ("7", "[[]]", "{"):
        (folder.path / "progress/d.json").write_text(damaged)
        assert folder.read("d") is None
    (folder.path / ".b.txt.77.tmp").write_text("half")
    with folder.opened():
        assert [folder.read(task) for task in "abcde"] == [{"text": "aaa"}, *[None] * 4]
        assert folder.tasks() == [*"abcd"] and not (folder.path / ".b.txt.77.tmp").exists()
        with pytest.raises(ValueError, match="3 of 4 tasks"):
            folder.read_all("abcd")
    assert WorkFolder(folder.path, {"seed": 1}).read("a") is None
    with folder.opened():
        folder.remove_progress()
    assert sorted(path.name for path in folder.path.iterdir()) == ["a.txt", "c.txt", "d.txt", "plan.json"]


def test_another_plan_is_refused(tmp_path):
    with WorkFolder(tmp_path, {"seed": 0, "sizes": {"a": 1}}, r"\w+\.txt").opened():
        (tmp_path / "a.txt").write_text("a")
    other = WorkFolder(tmp_path, {"seed": 1, "sizes": {"a": 1, "b": (2,)}}, r"\w+\.txt")
    with pytest.raises(ValueError, match=r"seed is 0 there and 1 here; sizes\.b is None"), other.opened():
        pass
    assert (tmp_path / "a.txt").read_text() == "a"


@pytest.mark.parametrize("content", ["{", "[]", '{"steps": 3}'])
def test_a_folder_of_another_program_is_left_alone(tmp_path, content):
    folder = WorkFolder(tmp_path, {"seed": 0}, ".*")
    (tmp_path / "weights.bin").write_text("precious")
    for plan in (None, content):
        if plan is not None:
            (tmp_path / "plan.json").write_text(plan)
        with pytest.raises(ValueError, match=r"weights|plan"), folder.opened():
            pass
    assert (tmp_path / "weights.bin").read_text() == "precious"
