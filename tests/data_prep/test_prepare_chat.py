"""Conversations through the whole preparation: rows and masks, cuts, counts, workers, a kill, the command line."""

import json
import random
from pathlib import Path

import pytest

from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source, same_way
from longdraft.data_prep.shards import ShardSet
from longdraft.models.schema import validate

CHATML = Path(__file__).with_name("chatml.jinja").read_text()
FORGETS = CHATML.replace("m.content +", "(m.content if loop.last or m.role == 'user' else '...') +")
WORDS = ["ship", "a boat", "🙂", "\n", "def f(x):\n    return x", "<|end|>", "é", "0"]


@pytest.fixture
def chats(tmp_path):
    """A JSONL file of 90 conversations, with one to four answers of very different lengths."""
    rng = random.Random(0)
    conversations = []
    for i in range(90):
        turns = []
        for _ in range(rng.randint(1, 4)):
            question, answer = (" ".join(rng.choices(WORDS, k=rng.choice([2, 30, 200]))) for _ in range(2))
            turns += [{"role": "user", "content": f"{i} {question}"}, {"role": "assistant", "content": f"{answer}."}]
        conversations.append(turns)
    write(tmp_path / "chats.jsonl", conversations)
    return conversations


@pytest.fixture
def config(tmp_path, chats, monkeypatch):
    monkeypatch.setattr("longdraft.data_prep.prepare.SHARD_TEXT_BYTES", (20_000, 20_000))
    (tmp_path / "template.jinja").write_text(CHATML)
    sources = same_way([str(tmp_path / "chats.jsonl")], chat_field="messages")
    template = tmp_path / "template.jinja"
    settings = {"heldout_share": 0.2, "chat_template": template}
    return PrepareConfig(sources=sources, out=tmp_path / "out", seq_len=64, **settings)


def as_text(config: PrepareConfig) -> dict[str, Source]:
    return {name: Source(path=source.path, text_field="text") for name, source in config.sources.items()}


def write(path: Path, conversations, field="messages") -> None:
    path.write_text("".join(json.dumps({field: messages, "id": 1}) + "\n" for messages in conversations))


def learned(tokenizer, sequence, end: int) -> list[str]:
    """The texts that the loss counts, one for each `end` token. Checks that no `end` token is outside of them."""
    counted, texts = [], []
    for token, supervised in sequence:
        if supervised:
            counted.append(token)
            if token == end:
                texts.append(tokenizer.decode(counted, clean_up_tokenization_spaces=False))
                counted = []
        else:
            assert not counted, "an answer is interrupted"
    assert not counted
    return texts


def said(messages, end="<|end|>"):
    return [message["content"] + end for message in messages if message["role"] == "assistant"]


def test_rows_give_conversations_and_answers_back(config, chats, tiny_tokenizer, joined, capsys):
    manifest = prepare(config, tiny_tokenizer, "hash")
    found = joined(config.out)
    assert found.keys() == {f"chats.jsonl:{i}" for i in range(1, 91)}
    end = tiny_tokenizer.eos_token_id
    for i, messages in enumerate(chats, start=1):
        sequence = found[f"chats.jsonl:{i}"]
        assert learned(tiny_tokenizer, sequence, end) == said(messages)
        text = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
        assert tiny_tokenizer.decode([token for token, _ in sequence], clean_up_tokenization_spaces=False) == text
    assert sum(len(sequence) > 64 for sequence in found.values()) > 60, "hardly a conversation was cut"
    splits = manifest["splits"].values()
    assert sum(split["tokens"] for split in splits) == sum(map(len, found.values()))
    supervised = sum(counts for sequence in found.values() for _, counts in sequence)
    assert sum(split["supervised_tokens"] for split in splits) == supervised
    assert sum(split["documents"] for split in splits) == 90
    assert all((split["bad"], split["dropped"]) == ({}, {}) for split in splits)
    assert manifest["sources"] == {"chats.jsonl": {"chat_field": "messages", "weight": 1.0}}
    assert f", supervised: {supervised:,}, documents: 90, " in capsys.readouterr().out


def test_conversations_by_turn_are_whole_and_on_one_side(config, chats, tiny_tokenizer, joined):
    config.chat_template.write_text(FORGETS)
    manifest = prepare(config, tiny_tokenizer, "hash")
    found = joined(config.out)
    several = [i for i, messages in enumerate(chats, start=1) if len(messages) > 2]
    assert len(several) > 30
    assert sum(split["documents"] for split in manifest["splits"].values()) == 90
    for i, messages in enumerate(chats, start=1):
        names = (
            [f"chats.jsonl:{i}#{k}" for k in range(1, len(messages) // 2 + 1)] if i in several else [f"chats.jsonl:{i}"]
        )
        texts = [learned(tiny_tokenizer, found.pop(name), tiny_tokenizer.eos_token_id) for name in names]
        assert texts == [[answer] for answer in said(messages)]
    assert not found
    sides = [ShardSet(config.out / split) for split in ("train", "heldout")]
    train, heldout = ({n.split("#")[0] for i in range(len(side)) for n, _ in side.pieces(i)} for side in sides)
    assert heldout and not train & heldout


@pytest.mark.parametrize("max_tokens", [3000, 6000, 10000])
def test_a_conversation_that_the_budget_cuts_in_its_question_is_skipped(
    config, tiny_tokenizer, tmp_path, joined, max_tokens
):
    asked = [
        [{"role": "user", "content": f"{i} " + "a boat " * 100}, {"role": "assistant", "content": "no"}]
        for i in range(90)
    ]
    write(tmp_path / "chats.jsonl", asked)
    prepare(config.model_copy(update={"max_tokens": max_tokens, "heldout_share": 0.0}), tiny_tokenizer, "hash")
    found = joined(config.out)
    assert found and all(any(counts for _, counts in sequence) for sequence in found.values())


def test_a_source_whose_answers_are_all_cut_off_has_no_tokens(config, tiny_tokenizer, tmp_path, capsys):
    answer = {"role": "assistant", "content": "no"}
    for name, question in (("short", "a boat"), ("long", "a boat " * 100)):
        write(tmp_path / f"{name}.jsonl", [[{"role": "user", "content": question}, answer]])
    sources = same_way([str(tmp_path / "short.jsonl"), str(tmp_path / "long.jsonl")], chat_field="messages")
    manifest = prepare(
        config.model_copy(update={"sources": sources, "max_tokens": 200, "heldout_share": 0.0}), tiny_tokenizer, "hash"
    )
    assert "long.jsonl 0, short.jsonl " in capsys.readouterr().out
    assert manifest["splits"]["train"]["documents"] == 1


def test_another_template_or_field_is_named(config, tiny_tokenizer):
    prepare(config, tiny_tokenizer, "hash")
    config.chat_template.write_text(FORGETS)
    with pytest.raises(ValueError, match="chat_template_sha256"):
        prepare(config, tiny_tokenizer, "hash")
    with pytest.raises(ValueError, match=r"chats\.jsonl"):
        prepare(config.model_copy(update={"sources": as_text(config), "chat_template": None}), tiny_tokenizer, "hash")


def test_what_does_not_go_with_conversations_is_refused(config, tiny_tokenizer, tmp_path):
    (tmp_path / "text.md").write_text("about these chats")
    cases = {
        "not_a_list": {"sources": same_way([str(tmp_path / "text.md")], chat_field="messages"), "out": tmp_path / "b"},
        r"none\.jinja: cannot be read": {"chat_template": tmp_path / "none.jinja"},
        "chat_template is for conversations": {"sources": as_text(config)},
        "chat_template is not set": {"chat_template": None},
    }
    for said, fields in cases.items():
        with pytest.raises(ValueError, match=said):
            prepare(validate(PrepareConfig, {**dict(config), **fields}), tiny_tokenizer, "hash")
    assert not config.out.exists()
