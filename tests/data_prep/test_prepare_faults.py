"""What goes wrong while data is prepared: a full disk, a line of 100 MB, a dying worker, files that are not what they
say; each counted and named, or a clear error, and the next call makes the bytes of an unbroken one."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.prepare import PrepareConfig, prepare
from longdraft.data_prep.settings import same_way
from longdraft.data_prep.shards import ShardSet

SCRIPT = """
import sys
from pathlib import Path
from longdraft.data_prep import prepare as module
from longdraft.data_prep.settings import same_way

if __name__ == "__main__":
    source, out, tokenizer, workers = sys.argv[1:]
    module.WORKER_BYTES = 1
    config = module.PrepareConfig(same_way([source]), Path(out), 64, shard_bytes=20_000, workers=int(workers))
    try:
        module.prepare(config, Light(tokenizer), "hash")
    except ValueError as error:
        sys.exit(f"error: {error}")
"""


def run(tmp_path, source, out, tokenizer, workers=1, largest_file=None):
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    def limit():
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    arguments = [str(part) for part in (tmp_path / "script.py", source, out, tmp_path / "tokenizer.json", workers)]
    return subprocess.run([sys.executable, *arguments], preexec_fn=limit, capture_output=True, text=True, timeout=120)


@pytest.fixture(autouse=True)
def script(tmp_path, light):
    (tmp_path / "script.py").write_text(light + SCRIPT)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path, make_corpus, tiny_tokenizer, workers):
    make_corpus(tmp_path / "corpus", 100)
    whole = run(tmp_path, tmp_path / "corpus", tmp_path / "whole", tiny_tokenizer)
    assert whole.returncode == 0, whole.stderr
    sizes = sorted(path.stat().st_size for path in (tmp_path / "whole").rglob("*.arrow"))
    # No file may grow beyond this, so writing the larger shards fails as on a full disk.
    out, limit = tmp_path / "out", sizes[len(sizes) // 2]
    full = run(tmp_path, tmp_path / "corpus", out, tiny_tokenizer, workers, limit)
    assert full.returncode == 1 and "error: no room for" in full.stderr, full.stderr
    assert "what is finished is kept: make room, call again" in full.stderr
    assert not (out / "manifest.json").exists() and not list(out.rglob("*.tmp"))
    with pytest.raises(ValueError, match="holds no finished data"):
        ShardSet(out / "train")
    again = run(tmp_path, tmp_path / "corpus", out, tiny_tokenizer, workers)
    assert again.returncode == 0, again.stderr
    assert files_of(out) == files_of(tmp_path / "whole")


def test_lines_of_100_megabytes(tmp_path, tiny_tokenizer):
    """One sample holds mostly other fields, one holds a long text, and one is cut off."""
    path, text = tmp_path / "long.jsonl", "ship " * 200_000
    with path.open("w") as stream:
        for record in ({"text": "a"}, {"raw": "x" * 100_000_000, "text": text}, {"text": "b"}):
            stream.write(json.dumps(record) + "\n")
        stream.write('{"text": "' + "y" * 100_000_000 + "\n")
    config = PrepareConfig(same_way([str(path)]), tmp_path / "out", 8192, heldout_share=0, max_bad_share=0.3)
    split = prepare(config, tiny_tokenizer, "hash")["splits"]["train"]
    assert (split["documents"], split["text_bytes"]) == (3, len(text) + 2)
    assert split["bad_named"] == [{"document": "long.jsonl:4", "why": "bad_json"}]


def test_files_that_are_not_what_they_say(tmp_path, make_corpus, tiny_tokenizer):
    make_corpus(tmp_path / "corpus", 60)
    table = pa.Table.from_pylist([{"text": f"row {i}"} for i in range(50)])
    pq.write_table(table, tmp_path / "corpus" / "good.parquet")
    config = PrepareConfig(same_way([str(tmp_path / "corpus")]), tmp_path / "out", 64, heldout_share=0.2)
    expected = prepare(replace(config, out=tmp_path / "first"), tiny_tokenizer, "hash")
    contents = {
        "html.parquet": b"<html>not found</html>" * 9,
        "html.jsonl.zst": b"<html>not found</html>" * 9,
        "html.jsonl.gz": b"<html>not found</html>" * 9,
        "html.arrow": b"<html>not found</html>" * 9,
        "html.mds": b"<html>not found</html>" * 9,
        "cut.parquet": (tmp_path / "corpus" / "good.parquet").read_bytes()[:-20],
        "empty.parquet": b"",
    }
    for name, content in contents.items():
        (tmp_path / "corpus" / name).write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"{name} cannot be read \((.|\n)*\); it is damaged or was not fetched whole"
        ):
            prepare(config, tiny_tokenizer, "hash")
        (tmp_path / "corpus" / name).unlink()
        assert not config.out.exists()
    assert prepare(config, tiny_tokenizer, "hash") == expected


def test_a_shard_that_was_damaged_is_named_and_never_read_in_half(tmp_path, make_corpus, tiny_tokenizer):
    make_corpus(tmp_path / "corpus", 60)
    config = PrepareConfig(same_way([str(tmp_path / "corpus")]), tmp_path / "out", 64, heldout_share=0.2)
    prepare(config, tiny_tokenizer, "hash")
    shard = next((config.out / "train").glob("*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"{shard.name} has {len(whole) - 100} bytes instead of {len(whole)}"):
        ShardSet(config.out / "train")
    shard.write_bytes(whole[:-100] + bytes(100))
    with pytest.raises(ValueError, match=rf"content of {shard.name} is not as prepared"):
        ShardSet(config.out / "train").verify()


def test_ctrl_c_ends_at_once_and_goes_on(tmp_path, make_corpus, tiny_tokenizer):
    make_corpus(tmp_path / "corpus", 100)
    tiny_tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    arguments = [
        str(part) for part in (tmp_path / "script.py", tmp_path / "corpus", out, tmp_path / "tokenizer.json", 2)
    ]
    process = subprocess.Popen([sys.executable, *arguments], start_new_session=True, stderr=subprocess.PIPE)
    while not list((out / "progress").glob("*.json")) and process.poll() is None:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    done = run(tmp_path, tmp_path / "corpus", out, tiny_tokenizer)
    assert done.returncode == 0, done.stderr
    whole = run(tmp_path, tmp_path / "corpus", tmp_path / "whole", tiny_tokenizer)
    assert whole.returncode == 0 and files_of(out) == files_of(tmp_path / "whole")
