"""What goes wrong while data is prepared: a full disk, a lost right, Ctrl-C, a closed output. Each is one line that
says what to do, and the next call makes the bytes of an unbroken one."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, changed, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.launch import cli

COMMAND = [sys.executable, "-m", "longdraft.launch.cli", "prepare"]
SCRIPT = """
import sys
from longdraft.data_prep import prepare as module
from longdraft.data_prep.recipe import PrepareConfig, same_way

if __name__ == "__main__":
    source, out, tokenizer, workers = sys.argv[1:]
    module.WORKER_BYTES = 1
    settings = {"seq_len": 64, "shard_bytes": 20_000, "workers": int(workers)}
    try:
        module.prepare(PrepareConfig(sources=same_way([source]), out=out, **settings), Light(tokenizer), "hash")
    except ValueError as error:
        sys.exit(f"error: {error}")
"""


@pytest.fixture
def config(tmp_path, make_corpus):
    make_corpus(tmp_path / "corpus", 20)
    sources = same_way([str(tmp_path / "corpus")])
    return PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=64, heldout_share=0.2)


def run(tmp_path, source, out, tokenizer, workers=1, largest_file=None):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    def limit():
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    arguments = [str(part) for part in (tmp_path / "script.py", source, out, tmp_path / "tokenizer.json", workers)]
    return subprocess.run([sys.executable, *arguments], preexec_fn=limit, capture_output=True, text=True, timeout=120)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def shell(line, *arguments):
    command = ["bash", "-c", f'"$@" {line}', "bash", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path, make_corpus, tiny_tokenizer, light, workers):
    (tmp_path / "script.py").write_text(light + SCRIPT)
    make_corpus(tmp_path / "corpus", 100)
    whole = run(tmp_path, tmp_path / "corpus", tmp_path / "whole", tiny_tokenizer)
    assert whole.returncode == 0, whole.stderr
    sizes = sorted(path.stat().st_size for path in (tmp_path / "whole").rglob("*.arrow"))
    # No file may grow beyond this, so writing the larger shards fails as on a full disk.
    out, limit = tmp_path / "out", sizes[len(sizes) // 2]
    full = run(tmp_path, tmp_path / "corpus", out, tiny_tokenizer, workers, limit)
    assert full.returncode == 1 and "error: no room for" in full.stderr, full.stderr
    assert not (out / "manifest.json").exists() and not list(out.rglob("*.tmp"))
    with pytest.raises(ValueError, match="holds no finished data"):
        ShardSet(out / "train")
    again = run(tmp_path, tmp_path / "corpus", out, tiny_tokenizer, workers)
    assert again.returncode == 0, again.stderr
    assert files_of(out) == files_of(tmp_path / "whole")


def test_lines_of_many_megabytes(tmp_path, tiny_tokenizer):
    """One sample holds mostly other fields, one holds a long text, and one is cut off."""
    path, text = tmp_path / "long.jsonl", "ship " * 200_000
    with path.open("w") as stream:
        for record in ({"text": "a"}, {"raw": "x" * 30_000_000, "text": text}, {"text": "b"}):
            stream.write(json.dumps(record) + "\n")
        stream.write('{"text": "' + "y" * 30_000_000 + "\n")
    settings = {"seq_len": 8192, "heldout_share": 0, "max_bad_share": 0.3}
    config = PrepareConfig(sources=same_way([str(path)]), out=tmp_path / "out", **settings)
    split = prepare(config, tiny_tokenizer, "hash")["splits"]["train"]
    assert (split["documents"], split["text_bytes"]) == (3, len(text) + 2)
    assert split["bad_named"] == [{"document": "long.jsonl:4", "why": "bad_json"}]


def test_a_damaged_file_is_named_before_anything_is_made(config, tmp_path, tiny_tokenizer):
    (tmp_path / "corpus" / "html.parquet").write_bytes(b"<html>not found</html>" * 9)
    with pytest.raises(ValueError, match=r"html\.parquet cannot be read"):
        prepare(config, tiny_tokenizer, "hash")
    assert not config.out.exists()


@pytest.mark.parametrize("out", ["corpus.txt", "corpus.txt/deep/er", "n" * 300, "/dev/full"])
def test_a_folder_that_cannot_be_made_is_named(config, tiny_tokenizer, tmp_path, out):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(ValueError, match=out[:100]) as error:
        prepare(changed(config, out=tmp_path / out), tiny_tokenizer, "hash")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_a_file_that_the_system_does_not_give_is_named(config, tiny_tokenizer, monkeypatch):
    """File rights do not stop a superuser, so the test patches opening: the one file cannot be opened."""
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "file003.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"file003\.txt.*Permission denied"):
        prepare(config, tiny_tokenizer, "hash")


def test_output_that_cannot_be_written_is_one_line(config, tmp_path, tiny_tokenizer):
    prepare(config, tiny_tokenizer, "hash")
    for line, status in (("> /dev/full", 2), (">&-", 2), ("2> /dev/full", 0)):
        done = shell(line, "--inspect", config.out)
        assert done.returncode == status and done.stderr.count("\n") == bool(status), done.stderr
    assert done.stdout.startswith(str(config.out))
    assert shell("| head -c 3", "--inspect", config.out).stderr == ""
    for number, line in enumerate(("2> /dev/full", "2>&-")):  # progress bars stop no work
        argv = f"--source {tmp_path}/corpus --target smollm2-135m --out {tmp_path}/{number} --seq-len 64".split()
        done = shell(line, *argv)
        assert done.returncode == 0 and done.stdout.startswith("Prepared: "), line


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


def test_ctrl_c_while_the_command_is_read(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["prepare", "--help"]) == 130
    assert capsys.readouterr().err == "longdraft prepare: interrupted\n"
