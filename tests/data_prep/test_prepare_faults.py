"""What goes wrong while data is prepared: a full disk, a lost right, Ctrl-C, a closed output. Each is one line that
says what to do, and the next call makes the bytes of an unbroken one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from longdraft.data_prep import prepare as prepare_module
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, same_way
from longdraft.data_prep.shards import ShardSet


@pytest.fixture
def config(tmp_path, make_corpus):
    make_corpus(tmp_path / "corpus", 20)
    sources = same_way([str(tmp_path / "corpus")])
    return PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=64, heldout_share=0.2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_an_error_that_loses_nothing(
    tmp_path, make_corpus, config, tiny_tokenizer, monkeypatch, workers, files_of, no_file_above
):
    monkeypatch.setattr(prepare_module, "SHARD_TEXT_BYTES", (20_000, 20_000))
    make_corpus(tmp_path / "corpus", 100)
    config = config.model_copy(update={"workers": workers})
    whole = config.model_copy(update={"out": tmp_path / "whole", "workers": 1})
    prepare(whole, tiny_tokenizer, "hash")
    sizes = sorted(path.stat().st_size for path in whole.out.rglob("*.arrow"))
    with no_file_above(sizes[len(sizes) // 2]), pytest.raises(ValueError, match=rf"{config.out}.*File too large"):
        prepare(config, tiny_tokenizer, "hash")
    assert not (config.out / "manifest.json").exists() and not list(config.out.rglob("*.tmp"))
    with pytest.raises(ValueError, match=r"train/manifest\.json"):
        ShardSet(config.out / "train")
    prepare(config.model_copy(update={"workers": 1}), tiny_tokenizer, "hash")
    assert files_of(config.out) == files_of(whole.out)


def test_a_damaged_file_is_named_before_anything_is_made(config, tmp_path, tiny_tokenizer):
    (tmp_path / "corpus" / "html.parquet").write_bytes(b"<html>not found</html>" * 9)
    with pytest.raises(ValueError, match=r"html\.parquet: cannot be read"):
        prepare(config, tiny_tokenizer, "hash")
    assert not config.out.exists()


@pytest.mark.parametrize("out", ["corpus.txt", "corpus.txt/deep/er", "n" * 300, "/dev/full"])
def test_a_folder_that_cannot_be_made_is_named(config, tiny_tokenizer, tmp_path, out):
    (tmp_path / "corpus.txt").write_text("x")
    with pytest.raises(ValueError, match=out[:100]) as error:
        prepare(config.model_copy(update={"out": tmp_path / out}), tiny_tokenizer, "hash")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert ("is not a folder; give another" in str(error.value)) == ("/" in out or ".txt" in out)


def test_a_file_that_the_system_does_not_give_is_named(config, tiny_tokenizer, monkeypatch):
    """File rights do not stop a superuser, so the test patches opening: the one file cannot be opened."""
    opened = Path.open

    def refuse(path, *args, **kwargs):
        if path.name == "file003.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"Permission denied.*file003\.txt"):
        prepare(config, tiny_tokenizer, "hash")


# The command with a `Light` tokenizer.
SCRIPT = """
import sys
from types import SimpleNamespace
if __name__ == "__main__":
    sys.modules["longdraft.models.hf"] = SimpleNamespace(load_tokenizer=Light)
    sys.modules["longdraft.models.fingerprint"] = SimpleNamespace(tokenizer_hash=lambda tokenizer: "hash")
    from longdraft.launch import cli
    sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_is_130_at_once_and_takes_the_workers_along(light, tiny_tokenizer, tmp_path):
    """With rows so large that a shard takes much longer than that."""
    (tmp_path / "script.py").write_text(light + SCRIPT)
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    line = json.dumps({"text": " ".join(f"word{i} and {i * i}" for i in range(100_000))}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 8)
    out = tmp_path / "out"
    options = {"--source": "a.jsonl", "--target": "tokenizer.json", "--out": "out"}
    command = [sys.executable, str(tmp_path / "script.py"), "prepare", "--seq-len", "4096", "--workers", "2"]
    command += [word for option, name in options.items() for word in (option, str(tmp_path / name))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    parent = psutil.Process(process.pid)
    while not any((out / "progress").glob("heldout-*.json")) and process.poll() is None:
        time.sleep(0.01)
    # The held-out shard is done, which is empty. Both workers are at one of the others, or about to be.
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
