"""What `longdraft prepare --inspect` reports on a folder, compared with what was put in."""

import json
import shutil

import pytest

from longdraft.data_prep.inspection import as_text, inspect
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.launch.prepare import main

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + ':' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
)


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
        max_bad_share=0.1,
    )
    prepare(config, tiny_tokenizer, "hash")
    return config.out


def test_numbers_are_those_of_the_texts(folder, tiny_tokenizer):
    found = inspect(folder)
    train, heldout = found["splits"]["train"], found["splits"]["heldout"]
    assert train["documents"] + heldout["documents"] == 73 and train["copies"] + heldout["copies"] == 3
    assert train["supervised_share"] == 1.0
    assert train["filler_share"] == pytest.approx(1 - train["tokens"] / (64 * train["rows"]))
    lengths = {split: [] for split in found["splits"]}
    for i in range(70):
        ids = tiny_tokenizer(f"document {i} " + "word " * (5 * i))["input_ids"]
        lengths["heldout" if f"lines.jsonl:{i + 1}" in names(folder / "heldout") else "train"].append(len(ids) + 1)
    assert [split["lengths"][-1] for split in (train, heldout)] == [max(lengths[split]) for split in lengths]
    assert [split["lengths"][0] for split in (train, heldout)] == [min(lengths[split]) for split in lengths]
    assert sum(sum(split["bad"].values()) for split in (train, heldout)) == 2
    assert found["samples"] == []


def names(split):
    rows = ShardSet(split)
    return {name for i in range(len(rows)) for name, _ in rows.pieces(i)}


def test_samples_decode_and_mark_what_counts(tmp_path, tiny_tokenizer):
    turns = [{"role": "user", "content": "a question " * 20}, {"role": "assistant", "content": "an answer"}]
    records = [{"messages": [{**turns[0], "content": f"{turns[0]['content']}{i}"}, turns[1]]} for i in range(20)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    config = PrepareConfig(
        sources=same_way([str(tmp_path / "chat.jsonl")], chat_field="messages"), out=tmp_path / "out", seq_len=256,
        heldout_share=0.2, chat_template=tmp_path / "template.jinja",
    )  # fmt: skip
    prepare(config, tiny_tokenizer, "hash")
    found = inspect(config.out, tiny_tokenizer, "hash")
    assert len(found["samples"]) == 3
    for sample in found["samples"]:
        counted = "".join(text for text, in_loss in sample["runs"] if in_loss)
        assert counted == "an answer<|end|>"
        assert sample["runs"][0][0].rstrip().endswith("assistant:") and not sample["runs"][0][1]
    assert "《an answer<|end|>》" in as_text(config.out, found)
    assert 0 < found["splits"]["train"]["supervised_share"] < 0.5
    with pytest.raises(ValueError, match="--target: "):
        inspect(config.out, tiny_tokenizer, "other")


def test_the_command(folder, capsys):
    main(["--inspect", str(folder)])
    assert "field_not_text" in capsys.readouterr().out
    main(["--inspect", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["seq_len"] == 64 and report["splits"]["train"]["rows"] > report["splits"]["heldout"]["rows"] > 0


def damage_a_bit(folder):
    shard = sorted((folder / "train").glob("*.arrow"))[0]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 4
    shard.write_bytes(raw)


@pytest.mark.parametrize(("damage", "named"), [
    (damage_a_bit, "shard-00000.arrow"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    (lambda folder: (folder / "train/manifest.json").write_text("{"), "train/manifest.json"),
    (lambda folder: (folder / "train/manifest.json").write_text("[]"), "train/manifest.json"),
])  # fmt: skip
def test_damaged_folders_are_not_called_sound(folder, tmp_path, capsys, damage, named):
    shutil.copytree(folder, tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with pytest.raises(SystemExit) as stop:
        main(["--inspect", str(tmp_path / "damaged")])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and named in shown.err and shown.err.count("\n") == 1 and shown.out == ""


@pytest.mark.parametrize(("argv", "named"), [
    (["--inspect", "nowhere"], "nowhere"),
    (["--inspect", "x", "--seq-len", "64", "--workers", "2"], "--seq-len, --workers"),
    (["--inspect", "x", "--merge"], "--merge"),
    (["--inspect", "x", "--seed", "0"], "--seed"),
    (["--merge", "--out", "x", "--target", "y"], "--target"),
    (["--merge"], "--out"),
    (["recipe.yaml", "--merge", "--out", "x"], "recipe"),
    (["--json", "--out", "x"], "--json"),
    (["--out", "x"], "--source, --target, --seq-len"),
])  # fmt: skip
def test_mistakes_are_named(argv, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and named in capsys.readouterr().err
