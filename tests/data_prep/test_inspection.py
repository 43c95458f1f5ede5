"""What `longdraft prepare --inspect` reports on a folder, compared with what was put in."""

import json
import shutil
from pathlib import Path

import pytest

from longdraft.data_prep.inspection import inspect
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.launch.prepare import main

TEMPLATE = Path(__file__).with_name("chatml.jinja")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    """70 different texts, one of them four times, an empty one, and one that is not text."""
    root = tmp_path_factory.mktemp("inspected")
    texts = [f"document {i} " + "word " * (5 * i) for i in range(70)]
    records = [{"text": text} for text in [*texts, texts[3], texts[3], texts[3], ""]] + [{"text": 5}]
    (root / "lines.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PrepareConfig(
        sources=same_way([str(root / "lines.jsonl")]),
        out=root / "out",
        seq_len=64,
        heldout_share=0.2,
    )
    prepare(config, tiny_tokenizer, "hash")
    return config.out


def test_numbers_are_those_of_the_manifests(folder, capsys):
    main(["--inspect", str(folder)])
    shown = capsys.readouterr().out
    train, heldout = (ShardSet(folder / split) for split in ("train", "heldout"))
    for name, rows in (("train", train), ("heldout", heldout)):
        assert f"  {name}:\n    rows: {len(rows)}\n    tokens: {rows.manifest['tokens']}\n" in shown
    assert "'field_not_text': 'lines.jsonl:75'" in shown and "'empty': 'lines.jsonl:74'" in shown
    assert train.manifest["documents"] + heldout.manifest["documents"] == 73 and "sample" not in shown


def test_samples_decode_and_mark_what_counts(tmp_path, tiny_tokenizer):
    turns = [{"role": "user", "content": "a question " * 20}, {"role": "assistant", "content": "an answer"}]
    records = [{"messages": [{**turns[0], "content": f"{turns[0]['content']}{i}"}, turns[1]]} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PrepareConfig(
        sources=same_way([str(tmp_path / "chat.jsonl")], chat_field="messages"), out=tmp_path / "out", seq_len=256,
        heldout_share=0.2, chat_template=TEMPLATE,
    )  # fmt: skip
    prepare(config, tiny_tokenizer, "hash")
    shown = inspect(config.out, tiny_tokenizer)
    assert shown.count("  sample, train row ") == shown.count("《an answer<|end|>》") == 3
    assert shown.count("assistant\n    | 《") == 3 and shown.count("《") == 3


def test_damaged_folders_are_not_called_sound(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "damaged")
    shard = sorted((tmp_path / "damaged" / "train").glob("*.arrow"))[0]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 4
    shard.write_bytes(raw)
    with pytest.raises(SystemExit) as stop:
        main(["--inspect", str(tmp_path / "damaged")])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and "shard-00000.arrow" in shown.err and shown.out == ""
    (tmp_path / "manifest.json").write_text('{"input": 3}')  # as `longdraft prepare regenerate` ends one
    with pytest.raises(ValueError, match=r"train/manifest\.json: cannot be read"):
        inspect(tmp_path)
