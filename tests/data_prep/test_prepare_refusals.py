"""What the system refuses ends `prepare` with one line that says what to do, and Ctrl-C ends it at once."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import popen_spawn_posix as spawn
from pathlib import Path

import psutil
import pytest

from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.settings import same_way
from longdraft.data_prep.tasks import run_in_processes
from longdraft.launch import cli

COMMAND = [sys.executable, "-m", "longdraft.launch.cli", "prepare"]


@pytest.fixture
def config(tmp_path, make_corpus):
    make_corpus(tmp_path / "corpus", 20)
    return PrepareConfig(same_way([str(tmp_path / "corpus")]), tmp_path / "out", seq_len=64, heldout_share=0.2)


@pytest.fixture
def prepared(config, tiny_tokenizer):
    prepare(config, tiny_tokenizer, "hash")
    return config.out


@pytest.mark.parametrize(("out", "said"), [
    ("corpus.txt", r"out .*corpus\.txt is a file; give the folder to make"),
    ("corpus.txt/deep/er", r"out .* cannot be made: .*corpus\.txt is a file; give another folder by --out"),
    ("n" * 300, r"out .*\.\.\. \(\d+ characters\) cannot be made \(File name too long\); give another by --out"),
    ("/dev/full", r"out /dev/full is a file"),
    ("/proc/nothing/out", r"out /proc/nothing/out cannot be (made|written).*; give another folder by --out"),
])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_named_before_any_work(config, tiny_tokenizer, tmp_path, out, said):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(ValueError, match=said) as error:
        prepare(replace(config, out=tmp_path / out), tiny_tokenizer, "hash")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "corpus.txt"]


def test_a_file_where_a_folder_of_ours_belongs_is_named(config, prepared, tiny_tokenizer):
    (prepared / "progress").write_text("mine")
    (prepared / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"out/progress is no folder, and prepare keeps its files there; move it away"):
        prepare(config, tiny_tokenizer, "hash")
    assert (prepared / "progress").read_text() == "mine"


def a_link_to_nothing(path):
    path.symlink_to("nowhere")


def a_pipe(path):
    os.mkfifo(path)


def a_loop(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [a_link_to_nothing, a_pipe, a_loop])
@pytest.mark.parametrize("inside", [True, False])
def test_what_cannot_be_read_is_named(config, tiny_tokenizer, tmp_path, make, inside):
    path = tmp_path / ("corpus/x.txt" if inside else "x.txt")
    make(path)
    sources = config.sources if inside else same_way([str(path)])
    with pytest.raises(ValueError, match=r"x\.txt is (a link to .*, which is not there|neither a file nor a folder)"):
        prepare(replace(config, sources=sources), tiny_tokenizer, "hash")
    assert not config.out.exists()


def test_a_file_that_the_system_does_not_give_is_named(config, tiny_tokenizer, tmp_path, monkeypatch):
    """File rights do not stop a superuser, so the test patches opening: the one file cannot be opened."""
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "file003.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"file003\.txt(: Permission| cannot be read \(Permission) denied.*rights"):
        prepare(config, tiny_tokenizer, "hash")


@pytest.mark.parametrize("seq_len", [10**12, (1 << 24) + 1, 0, -5])
def test_an_absurd_length_of_rows_is_named(config, seq_len):
    with pytest.raises(
        ValueError, match=rf"seq_len is {seq_len}, valid: {'at least 2' if seq_len < 2 else 'at most 16777216'}$"
    ):
        replace(config, seq_len=seq_len)


def shell(line, *arguments):
    command = ["bash", "-c", f'"$@" {line}', "bash", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_output_that_cannot_be_written_is_one_line(prepared):
    full = shell("> /dev/full", "--inspect", prepared)
    said = "standard output cannot be written: No space left on device; make room or write elsewhere"
    assert (full.returncode, full.stderr) == (2, f"longdraft prepare: error: {said}\n")
    closed = shell(">&-", "--inspect", prepared, "--json")
    assert (closed.returncode, closed.stderr.count("\n")) == (2, 1) and "standard output is closed" in closed.stderr
    left = shell("| head -c 3", "--inspect", prepared)
    assert left.stderr == ""
    deaf = shell("2> /dev/full", "--inspect", prepared)
    assert deaf.returncode == 0 and deaf.stdout.startswith(str(prepared))


SCRIPT = """
import sys
from pathlib import Path
from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.settings import same_way
from longdraft.launch import cli

prepare(PrepareConfig(same_way([sys.argv[1]]), Path(sys.argv[2]), 64), Light(sys.argv[3]), "hash")
"""


def test_bars_stop_no_work_and_hold_no_message(tmp_path, config, light, tiny_tokenizer):
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "script.py").write_text(light + SCRIPT)
    arguments = [str(tmp_path / name) for name in ("script.py", "corpus", "out", "tokenizer.json")]
    for number, line in enumerate(("2> /dev/full", "2>&-")):
        command = ["bash", "-c", f'"$@" {line}', "bash", sys.executable, *arguments]
        command[-2] += str(number)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.startswith("Prepared: "), line
    (tmp_path / "corpus" / "x.parquet").write_text("no table")
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)
    assert "Traceback (most recent call last):" in done.stderr.splitlines(), done.stderr
    assert "\r" not in done.stderr and "reading sources: " in done.stderr  # a pipe gets plain lines


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_is_130_at_once_and_takes_the_workers_along(tmp_path, workers):
    """With a real tokenizer, and rows so large that a shard takes much longer than that."""
    line = json.dumps({"text": " ".join(f"word{i} and {i * i}" for i in range(100_000))}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * (4 * workers))
    out = tmp_path / "out"
    arguments = ["--source", tmp_path / "a.jsonl", "--target", "smollm2-135m", "--seq-len", "4096", "--out", out]
    command = [*COMMAND, *map(str, arguments), "--workers", str(workers)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    parent = psutil.Process(process.pid)
    while not (out / "train").exists() and process.poll() is None:
        time.sleep(0.01)
    if workers > 1:  # they are at work, or about to be
        while process.poll() is None and sum("spawn_main" in " ".join(c.cmdline()) for c in parent.children()) < 2:
            time.sleep(0.01)
    children = parent.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - begin
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and errors.rstrip().splitlines()[-1].startswith("longdraft prepare: interrupted")
    assert seconds < 15  # 0.3 on a quiet machine; neighbours may hold the cores for a while
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert not (out / "manifest.json").exists()


def test_ctrl_c_while_a_worker_starts_waits_for_it(monkeypatch, capfd):
    """Another thread gets the signal that is blocked in ours, after a worker's start and before it is told its work."""
    start, workers = spawn.util.spawnv_passfds, []

    def interrupted(path, args, descriptors):
        pid = start(path, args, descriptors)
        if any(b"spawn_main" in os.fsencode(arg) for arg in args):
            workers.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return pid

    monkeypatch.setattr(spawn.util, "spawnv_passfds", interrupted)
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    with pytest.raises(KeyboardInterrupt):
        run_in_processes(time.sleep, [0, 0], 2, print)
    done.set()
    for pid in workers:  # one that was left half started is nobody's
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    assert (len(workers), capfd.readouterr().err) == (2, "")


def test_ctrl_c_while_the_command_is_read(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["prepare", "--help"]) == 130
    assert capsys.readouterr().err == "longdraft prepare: interrupted\n"
