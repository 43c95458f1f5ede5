"""Conversations answered anew, and texts continued, by a plain function instead of a target: turns, counts, a stop."""

import copy
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from longdraft.data_prep import regenerate as module
from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.documents import Conversation, Document, Unusable
from longdraft.data_prep.formats import ChatFormat
from longdraft.data_prep.prepare import prepare
from longdraft.data_prep.recipe import PrepareConfig, Source
from longdraft.data_prep.regenerate import Completion, RegenerateConfig, beginning, open_answers, regenerate
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tokenize import rust_tokenizer

CHATML = Path(__file__).with_name("chatml.jinja").read_text()
# Refuses two users in a row.
STRICT = (
    "{% for m in messages %}{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('') }}{% endif %}{% endfor %}" + CHATML
)
WORDS = ["ship", "é", "日本語", "\n", "x", "🙂", "0"]
OLD = {"role": "assistant", "content": "the old answer"}


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages, "id": 1}) + "\n" for messages in conversations))


def records(out):
    return [json.loads(line) for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]


class Speaker:
    """A function of prompt and seed alone, answering the last prompt first. said: questions (the prompt's last user
    line) to what is said instead, a text or (text, ended). header: what a question begins with."""

    def __init__(self, tokenizer, said=None, header="<|start|>user\n"):
        self.tokenizer, self.said, self.header, self.started, self.calls = tokenizer, said or {}, header, 0, []

    def start(self):
        self.started += 1
        return self

    def __call__(self, due):
        while due:
            asked = [
                (index, self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False), seed)
                for index, (prompt, seed) in due.items()
            ]
            due.clear()
            self.calls.append([(text, seed) for _, text, seed in asked])
            for one in reversed(asked):
                yield self.answer(*one)

    def answer(self, index, prompt, seed):
        question = prompt.rpartition(self.header)[2].split("<|end|>")[0]
        said = self.said.get(question, self.text(prompt, seed))
        return Completion(index, *((said, True) if isinstance(said, str) else said))

    @staticmethod
    def text(prompt, seed):
        rng = random.Random(hashlib.sha256(f"{prompt}{seed}".encode()).hexdigest())
        return " ".join(rng.choices(WORDS, k=rng.randint(2, 9))) + "!"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "PART_SIZE", 7)


@pytest.fixture
def speaker(tiny_tokenizer):
    return Speaker(tiny_tokenizer)


@pytest.fixture
def config(tmp_path):
    return RegenerateConfig((str(tmp_path / "chats.jsonl"),), tmp_path / "out", 10_000, {"temperature": 1.0})


@pytest.fixture
def chats(tmp_path):
    """60 conversations of one to four questions, some without a last answer, some with a system message."""
    rng = random.Random(1)
    conversations = []
    for i in range(60):
        turns = [system("be brief")] if rng.random() < 0.3 else []
        for turn in range(rng.randint(1, 4)):
            turns += [user(f"{i}.{turn}"), OLD]
        conversations.append(turns[: len(turns) - rng.randint(0, 1)])
    write(tmp_path / "chats.jsonl", conversations)
    return conversations


@pytest.fixture
def run(tiny_tokenizer):
    """(config, speaker, template) -> the counts."""

    def call(config, speaker, template=CHATML):
        return regenerate(config, ChatEncoder(tiny_tokenizer, template), "hash", speaker.start)

    return call


def test_every_answer_is_new_and_follows_the_new_ones(config, run, speaker, chats, capsys):
    counts = run(config, speaker)
    found = records(config.out)
    assert [record["source"] for record in found] == [f"chats.jsonl:{i}" for i in range(1, 61)]
    asked = {prompt: seed for call in speaker.calls for prompt, seed in call}
    for given, record in zip(chats, found, strict=True):
        messages = record["messages"]
        assert [m for m in messages if m["role"] != "assistant"] == [m for m in given if m["role"] != "assistant"]
        assert [m["role"] for m in messages][: len(given)] == [m["role"] for m in given]
        assert messages[-1]["role"] == "assistant"
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages[:i])
                prompt += "<|start|>assistant\n"
                assert message["content"] == speaker.text(prompt, asked[prompt])
    n_answers = sum(message["role"] == "assistant" for record in found for message in record["messages"])
    assert len({seed for call in speaker.calls for _, seed in call}) == n_answers
    assert counts == {"input": 60, "success": 60, "bad": {}, "bad_named": []}
    assert "60 of 60 conversations" in capsys.readouterr().out


def test_answers_depend_on_nothing_but_seed_content_and_turn(config, run, tiny_tokenizer, chats, tmp_path, monkeypatch):
    def answered(part_size=7, **other):
        monkeypatch.setattr(module, "PART_SIZE", part_size)
        speaker = Speaker(tiny_tokenizer)
        changed = replace(config, out=tmp_path / str(len(list(tmp_path.iterdir()))), **other)
        run(changed, speaker)
        return sorted(json.dumps(record["messages"]) for record in records(changed.out)), speaker

    expected, _ = answered()
    # A round asks for all that can be decoded together.
    again, together = answered(part_size=60)
    turns = [[m["role"] for m in messages].count("user") for messages in chats]
    assert again == expected and together.started == 1
    assert [len(call) for call in together.calls] == [sum(n > turn for n in turns) for turn in range(4)]
    write(tmp_path / "chats.jsonl", reversed(chats))
    assert answered()[0] == answered(part_size=1)[0] == expected
    assert not set(answered(seed=1)[0]) & set(expected)
    write(tmp_path / "chats.jsonl", [*chats[:5], chats[2]])
    assert set(answered()[0]) <= set(expected), "a copy is answered alike, and other conversations do not matter"


U, A, S, T, DUE = (
    {"role": role, "content": content}
    for role, content in (("user", "u"), ("assistant", "a"), ("system", "s"), ("tool", "t"), ("assistant", None))
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [([U], [U, DUE]), ([S, U, U], [S, U, U, DUE]), ([U, A, U], [U, DUE, U, DUE]), ([U, S, A, S], [U, S, DUE, S]),
     ([A, U, A], [A, U, DUE]), ([U, A, T, A], [U, A, T, DUE]), ([U, A, T], [U, A, T, DUE]),
     ([S], "no_user_turn"), ([A], "no_user_turn"), ([], "no_user_turn")],
)  # fmt: skip
def test_which_turns_are_answered(messages, expected):
    if isinstance(expected, list):
        assert open_answers(messages) == expected
    else:
        with pytest.raises(Unusable, match=expected):
            open_answers(messages)


def test_tools_and_variables_of_the_template_are_passed_on(config, run, speaker, tmp_path):
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"style": "short"}}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [U], **fields}) + "\n")
    run(config, speaker, "{{ style }}{{ tools[0].function.name }}" + CHATML)
    (record,) = records(config.out)
    assert {name: record[name] for name in fields} == fields
    assert speaker.calls[0][0][0] == "shortf<|start|>user\nu<|end|>\n<|start|>assistant\n"


def test_accounts(config, run, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    """Every reason at once. If the first turn is good and the second is not, nothing of the conversation is kept."""
    said = {
        "long": ("no end", False),
        "blank": " \n ",
        "half": "\ufffd",
        "odd": "x \ufdd2",
        "control": "x<|start|>y",
        "trimmed": " blank before",
    }
    reasons = {
        "unfinished": [[user("long")], [user("q"), OLD, user("long")]],
        "empty_answer": [[user("blank"), OLD, user("never asked")], [user("blank")]],
        "not_text": [[user("half")], [user("odd")]],
        "special_token_in_answer": [[user("control")]],
        "prompt_too_long": [[user("many words " * 40)]],
        "refused_by_template": [[user("q"), user("q")], [user("q"), OLD, user("q"), user("q")]],
        "no_user_turn": [[system("s")], [OLD]],
        "not_a_list": [[]],
    }
    all_of_them = [*(one for many in reasons.values() for one in many), [user("q")], [user("trimmed")]]
    random.Random(0).shuffle(all_of_them)
    write(tmp_path / "chats.jsonl", all_of_them)
    with (tmp_path / "chats.jsonl").open("ab") as stream:
        stream.write(b'{"text": "no conversation"}\n{"messages": [\n\xff\n\n')
    expected = {why: len(many) for why, many in reasons.items()} | {"missing_field": 1, "bad_json": 1, "bad_utf8": 1}
    monkeypatch.setattr(module, "SHOWN_BAD", 99)
    speaker = Speaker(tiny_tokenizer, said)
    counts = run(replace(config, max_prompt=200), speaker, STRICT)
    assert counts["bad"] == expected
    assert counts["input"] == len(all_of_them) + 3 == 2 + sum(expected.values())
    found = records(config.out)
    assert counts["success"] == len(found) == 2
    assert "blank before" in {record["messages"][-1]["content"] for record in found}
    assert not any("never asked" in prompt for call in speaker.calls for prompt, _ in call)
    named = dict(line.split(": ", 1) for line in counts["bad_named"])
    assert list(named) == sorted(named, key=lambda name: int(name.split(":")[1])) and len(named) == len(all_of_them) + 1
    for i, one in enumerate(all_of_them, start=1):
        if one and f"chats.jsonl:{i}" in named:
            assert one in reasons[named[f"chats.jsonl:{i}"].split()[0]]
    shown = capsys.readouterr().out
    assert "unfinished: 2" in shown and "is refused by the chat template (TemplateError" in shown


def test_a_second_call_does_nothing_and_a_stopped_one_goes_on(config, run, speaker, chats, files_of):
    counts, expected = run(config, speaker), files_of(config.out)
    parts = [f"part-{i:05d}" for i in range(9)]
    made = {name for part in parts for name in (f"{part}.jsonl", f"progress/{part}.json")}
    assert expected.keys() == made | {"plan.json", "manifest.json"}
    assert run(config, speaker) == counts and files_of(config.out) == expected and speaker.started == 1

    # A call that was stopped lacks the manifest and some parts. A kill may also leave a part without its record, or a
    # half-written file.
    (config.out / "manifest.json").unlink()
    for i in (3, 4, 6):
        (config.out / f"part-{i:05d}.jsonl").unlink()
        (config.out / "progress" / f"part-{i:05d}.json").unlink()
    (config.out / "progress" / "part-00000.json").unlink()
    (config.out / ".part-00005.jsonl.1.tmp").write_text("half")
    (config.out / "part-00001.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"out' is not finished; call again"):
        list_files([Source(path=str(config.out), chat_field="messages")])
    again = Speaker(speaker.tokenizer)
    assert run(config, again) == counts and files_of(config.out) == expected
    n_again = len({prompt for call in again.calls for prompt, _ in call})
    assert 0 < n_again < sum(map(len, speaker.calls))


def test_the_next_conversations_do_not_wait_for_a_long_answer(config, run, speaker, chats, files_of, tmp_path):
    """The first question of all is answered last: meanwhile all others are answered, and their parts are written."""
    expected = run(config, speaker), files_of(config.out)
    written = []

    class Slow(Speaker):
        def __call__(self, due):
            index, (prompt, seed) = next(iter(due.items()))
            del due[index]
            yield from super().__call__(due)
            written.extend(path.stem for path in sorted((tmp_path / "slow").glob("part-*")))
            text = self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)
            yield self.answer(index, text, seed)
            yield from super().__call__(due)

    slow = replace(config, out=tmp_path / "slow")
    assert (run(slow, Slow(speaker.tokenizer)), files_of(slow.out)) == expected
    assert written == [f"part-{i:05d}" for i in range(1, 9)]


def test_a_later_file_of_another_form_costs_itself_alone(config, run, speaker, chats, tmp_path, monkeypatch):
    """Its conversations are done as soon as they are begun, while the first ones are still being answered."""
    monkeypatch.setattr(module, "PART_SIZE", 60)
    (tmp_path / "other.jsonl").write_text('{"text": "no conversation"}\n' * 44)
    both = replace(config, sources=(*config.sources, str(tmp_path / "other.jsonl")))
    counts = run(both, speaker)
    assert counts["success"] == 60 and counts["bad"] == {"missing_field": 44}


def test_a_folder_made_with_something_else(config, run, speaker, chats, tmp_path):
    run(config, speaker)
    for other, field in [
        (replace(config, seed=3), "seed is 0"),
        (replace(config, keep_unfinished=True), "keep_unfinished is False"),
        (replace(config, answering={"temperature": 0.5}), "temperature is 1.0"),
    ]:
        with pytest.raises(ValueError, match=field):
            run(other, speaker)
    with pytest.raises(ValueError, match="chat_template_sha256"):
        run(config, speaker, STRICT)
    write(tmp_path / "chats.jsonl", chats[:-1])
    with pytest.raises(ValueError, match=r"sources\.chats\.jsonl"):
        run(config, speaker)
    assert speaker.started == 1


def test_what_cannot_be(config, run, speaker, tmp_path):
    with pytest.raises(ValueError, match=r"\bout\b"):
        replace(config, sources=(str(tmp_path),))
    (tmp_path / "thesis.txt").write_text("no conversation")
    counts = run(replace(config, sources=(str(tmp_path / "thesis.txt"),), out=tmp_path / "new"), speaker)
    assert counts["bad"] == {"not_a_list": 1} and not list((tmp_path / "new").glob("part*"))


def test_docstrings_are_answered_each_with_its_own_seed(config, run, tiny_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    functions = (f'def f{i}():\n    """{"Say what this is good for. " * 4}"""\n    return {i}\n' for i in range(6))
    (tmp_path / "lib" / "a.py").write_text("\n".join(functions))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "lib"))
    speaker = Speaker(tiny_tokenizer)
    run(replace(config, sources=("stdlib-chat",)), speaker)
    n_seeds = len({seed for call in speaker.calls for _, seed in call})
    assert n_seeds == len(records(config.out)) == 6, "their file's hash is not their content"


def test_answers_that_were_cut_are_kept_without_an_end(config, tiny_tokenizer, tmp_path):
    """The conversation and the loss end with it. The same conversation with an end has one token more."""
    said = {"a": ("the answer goes on\ufffd", False), "b": "done"}  # within a character
    write(tmp_path / "chats.jsonl", [[user("b"), OLD, user("a"), OLD, user("b"), OLD], [user("b")]])
    encoder, speaker = ChatEncoder(tiny_tokenizer, CHATML), Speaker(tiny_tokenizer, said)
    counts = regenerate(replace(config, keep_unfinished=True), encoder, "hash", speaker.start)
    assert counts["success"] == 2
    cut, whole = records(config.out)
    assert cut["unfinished"] is True and "unfinished" not in whole
    assert [m["content"] for m in cut["messages"]] == ["b", "done", "a", "the answer goes on"]
    ended_record, chat = {"messages": cut["messages"]}, ChatFormat("messages")
    kept, ended = (encoder.encode_document(*chat.documents("x", record))[0] for record in (cut, ended_record))
    (first, last), (_, end) = kept.spans, ended.spans
    assert len(kept.tokens) == last[1] and tiny_tokenizer.decode(kept.tokens[slice(*last)]) == "the answer goes on"
    assert end == (last[0], last[1] + 1) and ended.tokens[last[1]] == tiny_tokenizer.convert_tokens_to_ids("<|end|>")
    assert first == ended.spans[0] and kept.tokens.tolist() == ended.tokens[: last[1]].tolist()


OPENS = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
DROPPED = "m.content.split('</think>')[-1]"


@pytest.mark.parametrize(
    "template",
    [OPENS.replace("m.content", f"(m.content if loop.last else {DROPPED}.lstrip('\n'))"),
     OPENS.replace("m.content", DROPPED)],
    ids=["QwQ", "DeepSeek-R1"],
)  # fmt: skip
def test_targets_whose_template_changes_a_turn_once_it_is_answered(config, run, tiny_tokenizer, tmp_path, template):
    """Each prompt is what the target would see, and `prepare` learns exactly what it wrote there."""
    said = {"one": "a thought\n</think>\n\nHello", "two": "\nshort</think>x"}
    write(tmp_path / "chats.jsonl", [[system("brief"), user("one"), OLD, user("two")]])
    speaker, encoder = Speaker(tiny_tokenizer, said), ChatEncoder(tiny_tokenizer, template)
    assert run(config, speaker, template)["success"] == 1
    encoded = encoder.encode_document(*ChatFormat("messages").documents("c", *records(config.out)))
    for ((prompt, _),), answer, one in zip(speaker.calls, said.values(), encoded, strict=True):
        ((start, stop),) = one.spans
        assert tiny_tokenizer.decode(one.tokens[:start], clean_up_tokenization_spaces=False) == prompt
        learned = tiny_tokenizer.decode(one.tokens[start:stop], clean_up_tokenization_spaces=False)
        assert learned == answer + "<|end|>"
    assert "a thought" not in speaker.calls[1][0][0]


CHANNELS = ["<|channel|>", "<|message|>", "<|return|>", "<|call|>"]
GPT_OSS = (Path(__file__).parent / "published" / "gpt-oss.jinja").read_text(encoding="utf-8")


def test_the_thoughts_of_gpt_oss_are_kept_beside_its_answers(config, tiny_tokenizer, tmp_path):
    """Its control tokens are the template's again when `prepare` learns the answer; any other one makes it bad."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": CHANNELS})
    final = "<|channel|>final<|message|>"
    said = {
        "one": f"<|channel|>analysis<|message|>A\nthought.<|end|><|start|>assistant{final}Hello",
        "two": f"{final}Well",
        "call": "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}",
        "cut": (f"{final}Hel", False),
    }
    write(tmp_path / "chats.jsonl", [[user("one"), OLD, user("two")], [user("call")], [user("cut")]])
    encoder, speaker = ChatEncoder(tokenizer, GPT_OSS), Speaker(tokenizer, said, header="<|start|>user<|message|>")
    made = regenerate(replace(config, keep_unfinished=True), encoder, "hash", speaker.start)
    assert made["bad"] == {"special_token_in_answer": 2}
    (record,) = records(config.out)
    assert record["messages"][1] == {"role": "assistant", "content": "Hello", "reasoning_content": "A\nthought."}
    encoded = encoder.encode_document(*ChatFormat("messages").documents("c", record))
    for answer, one in zip(("one", "two"), encoded, strict=True):
        ((start, stop),) = one.spans
        assert tokenizer.decode(one.tokens[start:stop]) == said[answer] + "<|return|>"
        assert tokenizer.decode(one.tokens[:start]) in {prompt for call in speaker.calls for prompt, _ in call}
    assert "thought" not in speaker.calls[1][0][0]


VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U: ' + m.content + ' A:' }}{% else %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("template", [PLAIN, VICUNA])
def test_a_blank_between_prompt_and_answer_is_kept(config, sentencepiece, tmp_path, template, ended):
    """The learned tokens are those that the target wrote, whether the blank is in the text or in the template. Encoding
    puts a blank before every text, and decoding removes the first one."""
    tokenizer = sentencepiece("always", ["▁the", "ate"])
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [user("hello wor")], "text": "hello wor x"}))
    encoder, speaker = ChatEncoder(tokenizer, template), Speaker(tokenizer)
    speaker.text = lambda prompt, seed: (" the gate", ended)
    beginning = (9, 9) if template == PLAIN else None
    made = replace(config, keep_unfinished=not ended, beginning=beginning, field="text" if beginning else "messages")
    assert regenerate(made, encoder, "hash", speaker.start)["success"] == 1
    (encoded,) = encoder.encode_document(*ChatFormat("messages").documents("c", *records(config.out)))
    wrote = tokenizer.convert_tokens_to_ids(["▁the", "▁", "g", "ate"]) + [tokenizer.eos_token_id] * ended
    assert encoded.tokens[slice(*encoded.spans[0])].tolist() == wrote


@pytest.fixture
def texts(config, tmp_path):
    """40 texts in records, one in a file of its own, one that is too short, and one that is not text."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "into", "dark", "wood"]
    texts = [" ".join(words[(i + j) % len(words)] for j in range(40)) + f" {i}" for i in range(40)]
    lines = [json.dumps({"body": text}) for text in [*texts, "the end", None]]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "alone.txt").write_text("alone in the dark " + " ".join(words * 3))
    sources = (str(tmp_path / "texts.jsonl"), str(tmp_path / "alone.txt"))
    return replace(config, sources=sources, keep_unfinished=True, beginning=(5, 9), field="body")


class Parrot(Speaker):
    """Continues with the prompt's own beginning, cut for every third seed."""

    def answer(self, index, prompt, seed):
        return Completion(index, prompt[:8], seed % 3 > 0)


def test_texts_are_continued_and_prepare_learns_the_continuation_alone(texts, run, tiny_tokenizer, tmp_path, joined):
    parrot = Parrot(tiny_tokenizer)
    counts = run(texts, parrot, PLAIN)
    assert (counts["input"], counts["success"]) == (43, 41)
    assert counts["bad"] == {"field_not_text": 1, "too_short": 1}
    asked = [tiny_tokenizer(prompt).input_ids for call in parrot.calls for prompt, _ in call]
    assert {len(prompt) for prompt in asked} == {5, 6, 7, 8, 9}
    given = [json.loads(line)["body"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    whole = [tiny_tokenizer(text).input_ids for text in (*given, (tmp_path / "alone.txt").read_text()) if text]
    assert all(any(ids[: len(prompt)] == prompt for ids in whole) for prompt in asked)
    source = Source(path=str(texts.out), files=("*.jsonl",), chat_field="messages")
    rows = {"seq_len": 64, "chat_template": Path(PLAIN), "heldout_share": 0.2}
    prepare(PrepareConfig(sources={"own": source}, out=tmp_path / "rows", **rows), tiny_tokenizer, "hash")
    documents = joined(tmp_path / "rows").values()
    learned = [[token for token, counts in pairs if counts] for pairs in documents]
    eos, written = tiny_tokenizer.eos_token_id, []
    for record in records(texts.out):
        content = record["messages"][1]["content"]
        written.append(content.rstrip() if "unfinished" in record else content + "<|end|>")
    assert 0 < sum(ids[-1] == eos for ids in learned) < len(learned)
    assert sorted(map(tiny_tokenizer.decode, learned)) == sorted(written)


@pytest.mark.parametrize(
    ("text", "counts", "expected"),
    [
        # Four tokens make one character, and a beginning that ends within it is extended to its end.
        ("𓀀 old", (1, 2, 3, 4, 5), ["𓀀", "𓀀", "𓀀", "𓀀", "𓀀 "]),
        ("𓀀", (2,), ["too_short"]),
        ("longer than the row" * 3, (3,), ["longer th"]),
        ("<|end|><|start|> and more", (1,), ["<|"]),
        ("a\ufdd0b", (4,), ["noncharacter"]),
    ],
)
def test_beginnings_are_whole_characters(tiny_tokenizer, text, counts, expected):
    tokenizer = rust_tokenizer(tiny_tokenizer.backend_tokenizer.to_str())

    def begin(count):
        try:
            found = beginning(Document("d", bytes(32), text), count, count, tokenizer)
        except Unusable as error:
            return error.why
        assert isinstance(found, Conversation)
        return found.messages[0]["content"]

    assert list(map(begin, counts)) == expected
