"""Texts that the target continues: which beginnings it gets, and what `prepare` makes of its continuations."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from longdraft.data_prep import response_generation as module
from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.documents import BadDocument, Document
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.regenerate import RegenerateConfig, regenerate
from longdraft.data_prep.response_generation import Completion, beginning
from longdraft.data_prep.shards import ShardSet
from longdraft.data_prep.tokenize import rust_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "into", "dark", "wood"]


@pytest.fixture
def config(tmp_path):
    """40 texts in records, one in a file of its own, one that is too short, and one that is not text."""
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(40)) + f" {i}" for i in range(40)]
    lines = [json.dumps({"body": text}) for text in [*texts, "the end", None]]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "alone.txt").write_text("alone in the dark " + " ".join(WORDS * 3))
    return RegenerateConfig(
        (str(tmp_path / "texts.jsonl"), str(tmp_path / "alone.txt")), tmp_path / "out", 500, {"target": "none"},
        part_size=16, keep_unfinished=True, continued=(5, 9), text_field="body",
    )  # fmt: skip


class Parrot:
    """Continues with the prompt's own first tokens, cut for every third seed, and remembers its prompts."""

    def __init__(self, tokenizer):
        self.tokenizer, self.asked = tokenizer, []

    def start(self):
        return self

    def __call__(self, prompts, seeds):
        self.asked += prompts
        for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            ended = seed % 3 > 0
            yield Completion(index, prompt[:4] + [self.tokenizer.eos_token_id] * ended, ended)


def records(out):
    return [json.loads(line) for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]


def test_beginnings_are_the_documents_own_tokens(config, tiny_tokenizer, tmp_path):
    parrot = Parrot(tiny_tokenizer)
    manifest = regenerate(config, ChatEncoder(tiny_tokenizer, PLAIN), "hash", parrot.start)
    assert (manifest["input"], manifest["success"]) == (43, 41)
    assert manifest["skipped"] == {"field_not_text": 1, "too_short": 1} and manifest["prompt_tokens"] == [5, 9]
    assert {len(prompt) for prompt in parrot.asked} == {5, 6, 7, 8, 9}
    texts = [json.loads(line)["body"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    texts.append((tmp_path / "alone.txt").read_text())
    whole = [tiny_tokenizer(text).input_ids for text in texts if text]
    assert all(any(ids[: len(prompt)] == prompt for ids in whole) for prompt in parrot.asked)
    assert {"unfinished" in record for record in records(config.out)} == {True, False}


@pytest.fixture
def begin(tiny_tokenizer):
    """(text, number of tokens) -> the text's beginning, or why it has none."""

    def call(text, count):
        tokenizer = rust_tokenizer(tiny_tokenizer.backend_tokenizer.to_str())
        found = beginning(Document("d", bytes(32), text), count, count, tokenizer)
        return found.why if isinstance(found, BadDocument) else found.messages[0][1]

    return call


def test_a_beginning_is_never_empty(begin, tiny_tokenizer):
    """Four tokens make one character, and a beginning that ends within it is extended to its end."""
    assert len(tiny_tokenizer("𓀀").input_ids) == 4
    assert [begin("𓀀 old", count) for count in (1, 2, 3, 4, 5)] == ["𓀀", "𓀀", "𓀀", "𓀀", "𓀀 "]
    assert begin("𓀀", 2) == "too_short"


def test_a_beginning_of_long_tokens_is_read_as_far_as_it_goes(begin, monkeypatch):
    text = "longer than the row" * 3
    expected = [begin(text, count) for count in range(1, 12)]
    assert expected[2] == "longer th"
    for characters in (1, 2, 3, 4):
        monkeypatch.setattr(module, "MOST_CHARACTERS", characters)
        assert [begin(text, count) for count in range(1, 12)] == expected


def test_special_tokens_in_a_text_are_text(begin):
    assert begin("<|end|><|start|> and more", 1) == "<|"


def test_prepare_learns_the_continuation_alone(config, tiny_tokenizer, tmp_path):
    regenerate(config, ChatEncoder(tiny_tokenizer, PLAIN), "hash", Parrot(tiny_tokenizer).start)
    source = Source(path=str(config.out), files=("*.jsonl",), chat_field="messages")
    made = PrepareConfig(
        sources={"own": source}, out=tmp_path / "rows", seq_len=64, chat_template=Path(PLAIN), heldout_share=0.2
    )
    prepare(made, tiny_tokenizer, "hash")
    learned: dict[str, list[int]] = {}
    for split in ("train", "heldout"):
        rows = ShardSet(tmp_path / "rows" / split)
        for i in range(len(rows)):
            row = rows[i]
            for (name, _), (start, stop) in zip(rows.pieces(i), pairwise(row["borders"]), strict=True):
                counted = row["tokens"][start:stop][row["loss"][start:stop]]
                learned[name] = learned.get(name, []) + counted.tolist()
    kept, eos = records(config.out), tiny_tokenizer.eos_token_id
    assert sum(ids[-1] == eos for ids in learned.values()) == sum("unfinished" not in record for record in kept)
    texts = [tiny_tokenizer.decode([token for token in ids if token != eos]) for ids in learned.values()]
    written = [record["messages"][1]["content"] for record in kept]
    cut = ["unfinished" in record for record in kept]  # without the blanks at its end, which may be half a token
    assert sorted(texts) == sorted(text.rstrip() if ends else text for text, ends in zip(written, cut, strict=True))


def test_wrong_lengths_and_sources_are_refused(config, tiny_tokenizer, tmp_path):
    for wrong in ((0, 4), (5, 4), (5, 501)):
        with pytest.raises(ValueError, match=rf"prompt_tokens is {wrong[0]} to {wrong[1]}"):
            replace(config, continued=wrong)
    encoder, start = ChatEncoder(tiny_tokenizer, PLAIN), Parrot(tiny_tokenizer).start
    with pytest.raises(ValueError, match="holds conversations, not text"):
        chats = replace(config, sources=("stdlib-chat",), text_field=None, out=tmp_path / "chats")
        regenerate(chats, encoder, "hash", start)
    regenerate(config, encoder, "hash", start)
    with pytest.raises(ValueError, match="prompt_tokens is"):
        regenerate(replace(config, continued=(5, 8)), encoder, "hash", start)
