"""Conversations answered anew by a plain function instead of a target: turns, counts, a kill, a full disk."""

import gzip
import hashlib
import json
import random
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.documents import Conversation, Unusable
from longdraft.data_prep.formats import ChatFormat
from longdraft.data_prep.regenerate import RegenerateConfig, regenerate
from longdraft.data_prep.response_generation import Answering, Completion, open_answers
from longdraft.data_prep.tasks import Machine

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# Refuses two users in a row, and strips the blanks around an answer.
STRICT = (
    "{% for m in messages %}{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' %}"
    "{{ raise_exception('') }}{% endif %}{% endfor %}" + CHATML.replace("m.content", "m.content | trim")
)
WORDS = ["ship", "é", "日本語", "\n", "x", "🙂", "0"]


def user(content):
    return {"role": "user", "content": content}


def assistant(content="the old answer"):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages, "id": 1}) + "\n" for messages in conversations))


def records(out):
    return [json.loads(line) for path in sorted(out.glob("part-*")) for line in path.read_text().splitlines()]


def files_of(out):
    files = (path for path in out.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


class Speaker:
    """A function of prompt and seed alone, answering the last prompt first. words: questions (the prompt's last user
    line) to what is said instead, a text or (tokens, ended)."""

    def __init__(self, tokenizer, said=None):
        self.tokenizer, self.said, self.started = tokenizer, said or {}, 0
        self.calls = []

    def start(self):
        self.started += 1
        return self

    def __call__(self, prompts, seeds):
        texts = [self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False) for prompt in prompts]
        self.calls.append(list(zip(texts, seeds, strict=True)))
        for index in reversed(range(len(prompts))):
            yield self.answer(index, texts[index], seeds[index])

    def answer(self, index, prompt, seed):
        question = prompt.rsplit("<|start|>user\n", 1)[1].split("<|end|>")[0]
        said = self.said.get(question, self.text(prompt, seed))
        if isinstance(said, str):
            return Completion(index, [*self.tokenizer(said).input_ids, self.tokenizer.eos_token_id], True)
        tokens, ended = said
        return Completion(index, tokens, ended)

    @staticmethod
    def text(prompt, seed):
        rng = random.Random(hashlib.sha256(f"{prompt}{seed}".encode()).hexdigest())
        return " ".join(rng.choices(WORDS, k=rng.randint(2, 9))) + "!"


@pytest.fixture
def speaker(tiny_tokenizer):
    return Speaker(tiny_tokenizer)


@pytest.fixture
def config(tmp_path):
    source = tmp_path / "chats.jsonl"
    return RegenerateConfig(
        (str(source),), tmp_path / "out", 10_000, {"target": "none", "temperature": 1.0}, part_size=7
    )


@pytest.fixture
def chats(tmp_path):
    """60 conversations of one to four questions, some without a last answer, some with a system message."""
    rng = random.Random(1)
    conversations = []
    for i in range(60):
        turns = [system("be brief")] if rng.random() < 0.3 else []
        for turn in range(rng.randint(1, 4)):
            turns += [user(f"{i}.{turn}"), assistant()]
        conversations.append(turns[: len(turns) - rng.randint(0, 1)])
    write(tmp_path / "chats.jsonl", conversations)
    return conversations


@pytest.fixture
def run(tiny_tokenizer):
    """(config, speaker, template, machine) -> the manifest."""

    def call(config, speaker, template=CHATML, machine=None):
        return regenerate(config, ChatEncoder(tiny_tokenizer, template), "hash", speaker.start, machine)

    return call


def test_every_answer_is_new_and_follows_the_new_ones(config, run, speaker, chats, capsys):
    manifest = run(config, speaker)
    found = records(config.out)
    assert [record["source"] for record in found] == [f"chats.jsonl:{i}" for i in range(1, 61)]
    asked = {prompt: seed for call in speaker.calls for prompt, seed in call}
    for given, record in zip(chats, found, strict=True):
        messages = record["messages"]
        kept = [message for message in given if message["role"] != "assistant"]
        assert [message for message in messages if message["role"] != "assistant"] == kept
        assert [message["role"] for message in messages][: len(given)] == [message["role"] for message in given]
        assert messages[-1]["role"] == "assistant"
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages[:i])
                prompt += "<|start|>assistant\n"
                assert message["content"] == speaker.text(prompt, asked[prompt])
    n_answers = sum(message["role"] == "assistant" for record in found for message in record["messages"])
    assert len({seed for call in speaker.calls for _, seed in call}) == n_answers == manifest["answers"]
    assert (manifest["input"], manifest["success"], manifest["error"], manifest["skipped"]) == (60, 60, {}, {})
    texts = [m["content"] for record in found for m in record["messages"] if m["role"] == "assistant"]
    assert manifest["answer_tokens"] == sum(len(speaker.tokenizer(text).input_ids) + 1 for text in texts)
    assert manifest["reread"] == 0 and [part["conversations"] for part in manifest["parts"]] == [7] * 8 + [4]
    assert f"60 of 60 conversations with {n_answers} answers" in capsys.readouterr().out


def test_answers_depend_on_nothing_but_seed_content_and_turn(config, run, tiny_tokenizer, chats, tmp_path):
    def answered(**other):
        changed = replace(config, out=tmp_path / str(len(list(tmp_path.iterdir()))), **other)
        run(changed, Speaker(tiny_tokenizer))
        return sorted(json.dumps(record["messages"]) for record in records(changed.out))

    expected = answered()
    # A round asks for all that can be decoded together.
    together, turns = Speaker(tiny_tokenizer), [[m["role"] for m in messages].count("user") for messages in chats]
    run(replace(config, part_size=60, out=tmp_path / "together"), together)
    assert [len(call) for call in together.calls] == [sum(n > turn for n in turns) for turn in range(4)]
    assert together.started == 1
    write(tmp_path / "chats.jsonl", reversed(chats))
    assert answered() == answered(part_size=1) == answered(part_size=1000) == expected
    other = answered(seed=1)
    assert not set(other) & set(expected)
    write(tmp_path / "chats.jsonl", [*chats[:5], chats[2]])
    assert set(answered()) <= set(expected), "a copy is answered alike, and other conversations do not matter"


U, A, S, DUE = ("user", "u"), ("assistant", "a"), ("system", "s"), ("assistant", None)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([U], [U, DUE]),
        ([S, U, U], [S, U, U, DUE]),
        ([U, A], [U, DUE]),
        ([U, A, U], [U, DUE, U, DUE]),
        ([U, S, A, S], [U, S, DUE, S]),
        ([U, S], [U, S, DUE]),
        ([S], "no_user_turn"),
        ([A], "no_user_turn"),
        ([A, U], "answer_unasked"),
        ([U, A, A], "answer_unasked"),
        ([U, A, S, A], "answer_unasked"),
    ],
)
def test_which_turns_are_answered(messages, expected):
    if isinstance(expected, list):
        assert open_answers(messages) == expected
    else:
        with pytest.raises(Unusable, match=expected):
            open_answers(messages)


def test_accounts(config, run, tiny_tokenizer, tmp_path):
    """Every reason at once. If the first turn is good and the second is not, nothing of the conversation is kept."""
    end = tiny_tokenizer.eos_token_id
    said = {
        "long": (tiny_tokenizer("no end").input_ids, False),
        "blank": " \n ",
        "half": ([tiny_tokenizer.convert_tokens_to_ids("Ã"), end], True),
        "odd": "x \ufdd2",
        "control": ([*tiny_tokenizer("x").input_ids, 1, *tiny_tokenizer("y").input_ids, end], True),
        "trimmed": " blank before",
    }
    errors = {
        "unfinished": [[user("long")], [user("q"), assistant(), user("long")]],
        "empty_answer": [[user("blank"), assistant(), user("never asked")], [user("blank")]],
        "not_text": [[user("half")], [user("odd")]],
        "special_token_in_answer": [[user("control")]],
        "prompt_too_long": [[user("many words " * 40)]],
        "refused_by_template": [[user("q"), user("q")], [user("q"), assistant(), user("q"), user("q")]],
    }
    skipped = {
        "no_user_turn": [[system("s")], [assistant()]],
        "answer_unasked": [[assistant("hello"), user("q"), assistant()]],
        "tool_role": [[{"role": "tool", "content": "x"}]],
        "content_not_text": [[{"role": "user", "content": 1}]],
        "not_a_list": ["text"],
        "empty": [[]],
        "noncharacter": [[user("\ufdd0")]],
    }
    good = [[user("q")], [user("trimmed")]]
    source = tmp_path / "chats.jsonl"
    all_of_them = [one for many in (*errors.values(), *skipped.values(), good) for one in many]
    random.Random(0).shuffle(all_of_them)
    write(source, all_of_them)
    with source.open("ab") as stream:
        stream.write(b'{"text": "no conversation"}\n{"messages": [\n\xff\n\n')
    skipped |= {"missing_field": [1], "bad_json": [1], "bad_utf8": [1]}
    speaker = Speaker(tiny_tokenizer, said)
    manifest = run(replace(config, max_prompt=200), speaker, STRICT)
    assert manifest["error"] == {why: len(errors[why]) for why in sorted(errors)}
    assert manifest["skipped"] == {why: len(skipped[why]) for why in sorted(skipped)}
    assert manifest["input"] == len(all_of_them) + 3 == 2 + sum(map(len, (*errors.values(), *skipped.values())))
    assert manifest["success"] == len(records(config.out)) == 2
    assert manifest["reread"] == 1, "the template took a blank away"
    assert not any("never asked" in prompt for call in speaker.calls for prompt, _ in call)
    assert len(manifest["named"]) == 20, "one is not named"
    named = {entry["conversation"]: entry["why"] for entry in manifest["named"]}
    for i, one in enumerate(all_of_them, start=1):
        if f"chats.jsonl:{i}" in named and one:
            assert one in (errors | skipped)[named[f"chats.jsonl:{i}"]]
    assert list(named) == sorted(named, key=lambda name: int(name.split(":")[1]))


def test_a_second_call_does_nothing_and_a_stopped_one_goes_on(config, run, speaker, chats, tmp_path, capsys):
    manifest = run(config, speaker)
    expected = files_of(config.out)
    assert expected.keys() == {"plan.json", "manifest.json", *(f"part-{i:05d}.jsonl" for i in range(9))}
    assert run(config, speaker) == manifest and files_of(config.out) == expected
    assert speaker.started == 1 and "Already answered: 60 of 60" in capsys.readouterr().out

    class Stops(Speaker):
        def answer(self, index, prompt, seed):
            if len(self.calls) == 17:
                raise KeyboardInterrupt
            return super().answer(index, prompt, seed)

    other = replace(config, out=tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        run(other, Stops(speaker.tokenizer))
    done = files_of(other.out)
    n_done = sum(name.startswith("part") for name in done)
    assert 3 <= n_done < 8 and "manifest.json" not in done
    # What a kill may leave: a part without its record, or a half-written file.
    (other.out / "progress" / "part-00000.json").unlink()
    (other.out / ".part-00005.jsonl.1.tmp").write_text("half")
    (other.out / "part-00001.jsonl").write_text("{")
    again = Speaker(speaker.tokenizer)
    run(other, again)
    assert files_of(other.out) == expected
    n_again = len({prompt for call in again.calls for prompt, _ in call})
    assert 0 < n_again < sum(map(len, speaker.calls))


def test_several_machines_make_the_bytes_of_one(config, run, speaker, chats, tmp_path, capsys):
    run(config, speaker)
    outs = [replace(config, out=tmp_path / f"machine{i}") for i in (1, 2)]
    for number, out in enumerate(outs, start=1):
        assert run(out, Speaker(speaker.tokenizer), machine=Machine(number, 2)) is None
        assert f"of 9 parts, {number}/2" in capsys.readouterr().out
    assert [len(list(out.out.glob("part-*"))) for out in outs] == [5, 4]
    shutil.copytree(outs[1].out, outs[0].out, dirs_exist_ok=True)
    last = Speaker(speaker.tokenizer)
    run(outs[0], last)
    assert files_of(outs[0].out) == files_of(config.out) and not last.started


def test_a_folder_made_with_something_else(config, run, speaker, chats, tmp_path):
    run(config, speaker)
    expected = files_of(config.out)
    for other, field in [
        (replace(config, seed=3), "seed is 0"),
        (replace(config, part_size=9), "part_size is 7"),
        (replace(config, answering=dict(config.answering) | {"temperature": 0.5}), "temperature is 1.0"),
    ]:
        with pytest.raises(ValueError, match=field):
            run(other, speaker)
    with pytest.raises(ValueError, match="chat_template_sha256"):
        run(config, speaker, STRICT)
    write(tmp_path / "chats.jsonl", chats[:-1])
    with pytest.raises(ValueError, match=r"sources\.chats\.jsonl"):
        run(config, speaker)
    assert files_of(config.out) == expected and speaker.started == 1
    (config.out / "part-00003.jsonl").unlink()
    write(tmp_path / "chats.jsonl", chats)
    with pytest.raises(ValueError, match=r"part-00003\.jsonl"):
        run(config, speaker)
    # With `overwrite` everything is answered anew, as in a new folder.
    fresh = replace(config, seed=3, out=tmp_path / "fresh")
    run(fresh, speaker)
    run(replace(config, seed=3, overwrite=True), speaker)
    assert files_of(config.out) == files_of(fresh.out)


def test_what_cannot_be(config, run, speaker, chats, tmp_path):
    with pytest.raises(ValueError, match=r"\bout\b"):
        replace(config, sources=(str(tmp_path),))
    for field in ("part_size", "max_prompt"):
        with pytest.raises(ValueError, match=field):
            replace(config, **{field: 0})
    config.out.mkdir()
    (config.out / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        run(config, speaker)
    with pytest.raises(ValueError, match=r"thesis\.txt holds plain text"):
        run(replace(config, sources=(str(config.out / "thesis.txt"),), out=tmp_path / "new"), speaker)
    new = replace(config, out=tmp_path / "new")
    with pytest.raises(ValueError, match=r"none of 60 conversations .*refused_by_template: 60") as error:
        run(new, speaker, "{% if tools|length > 0 %}x{% endif %}" + CHATML)
    assert "chats.jsonl:1 is refused" in str(error.value) and "TypeError" in str(error.value)
    write(tmp_path / "chats.jsonl", [[system("s")], [user("q")]])
    silent = Speaker(speaker.tokenizer, {"q": ([], False)})
    with pytest.raises(ValueError, match=r"none of 2 conversations .*unfinished: 1.*no_user_turn: 1"):
        run(replace(config, out=tmp_path / "silent"), silent)
    assert speaker.started == 1


def test_tables_and_docstrings(config, run, tiny_tokenizer, chats, tmp_path):
    """A table and compressed lines give the same answers as plain lines; docstrings are answered as well."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    pq.write_table(pa.table({"messages": [chats[0], chats[1]]}), folder / "b.parquet")
    run(config, Speaker(tiny_tokenizer))
    expected = [record["messages"] for record in records(config.out)]
    other = replace(config, sources=(str(folder),), out=tmp_path / "other", files=("*.jsonl.gz", "*.parquet"))
    run(other, Speaker(tiny_tokenizer))
    assert [record["messages"] for record in records(other.out)] == [*expected, *expected[:2]]
    assert records(other.out)[-1]["source"] == "folder/b.parquet:2"
    docstrings = replace(config, sources=("stdlib-chat",), files=("textwrap.py",), out=tmp_path / "docstrings")
    own = Speaker(tiny_tokenizer)
    run(docstrings, own)
    n_seeds = len({seed for call in own.calls for _, seed in call})
    assert n_seeds == len(records(docstrings.out)) > 5, "their file's hash is not their content"


def test_answers_that_were_cut_are_kept_without_an_end(config, tiny_tokenizer, tmp_path):
    """The conversation and the loss end with it. The same conversation with an end has one token more."""
    words = tiny_tokenizer("the answer goes on世").input_ids[:-1]  # within a character
    said = {"a": (words, False), "b": "done"}
    turns = [user("b"), assistant(), user("a"), assistant(), user("b"), assistant()]
    write(tmp_path / "chats.jsonl", [turns, [user("b")]])
    encoder, speaker = ChatEncoder(tiny_tokenizer, CHATML), Speaker(tiny_tokenizer, said)
    manifest = regenerate(replace(config, keep_unfinished=True), encoder, "hash", speaker.start)
    assert (manifest["success"], manifest["unfinished"], manifest["answers"]) == (2, "keep", 3)
    cut, whole = records(config.out)
    assert cut["unfinished"] is True and "unfinished" not in whole
    assert [m["content"] for m in cut["messages"]] == ["b", "done", "a", "the answer goes on"]
    ended_record, chat = {"messages": cut["messages"]}, ChatFormat("messages")
    kept, ended = (encoder.encode_document(*chat.documents("x", record))[0] for record in (cut, ended_record))
    (first, last), (_, end) = kept.spans, ended.spans
    assert len(kept.tokens) == last[1] and tiny_tokenizer.decode(kept.tokens[slice(*last)]) == "the answer goes on"
    assert end == (last[0], last[1] + 1) and ended.tokens[last[1]] == tiny_tokenizer.convert_tokens_to_ids("<|end|>")
    assert first == ended.spans[0] and kept.tokens.tolist() == ended.tokens[: last[1]].tolist()


def test_a_cut_answer_that_its_template_changes_is_left_out(config, tiny_tokenizer, tmp_path):
    """Like Qwen3's, this template writes an empty thought before an answer that does not end one."""
    thinking = CHATML.replace(
        "m.content +", "('' if m.role == 'user' or '</think>' in m.content else '<think></think>') + m.content +"
    )
    said = {"in": ("<think>still at it", False), "behind": ("<think>short</think>and then", False)}
    said = {question: (tiny_tokenizer(text).input_ids, ended) for question, (text, ended) in said.items()}
    write(tmp_path / "chats.jsonl", [[user("in")], [user("behind")]])
    encoder, speaker = ChatEncoder(tiny_tokenizer, thinking), Speaker(tiny_tokenizer, said)
    manifest = regenerate(replace(config, keep_unfinished=True), encoder, "hash", speaker.start)
    assert (manifest["success"], manifest["error"]["unfinished"]) == (1, 1)
    (kept,) = records(config.out)
    assert [m["content"] for m in kept["messages"]] == ["behind", "<think>short</think>and then"]


OPENS = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
DROPPED = "m.content.split('</think>')[-1]"
# Qwen3-Thinking's: the last answer's thought is written anew.
ANEW = OPENS.replace(
    "m.content",
    "('<think>\n' + m.content.split('</think>')[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' "
    f"if loop.last and m.role == 'assistant' else '') + {DROPPED}.lstrip('\n')",
)


@pytest.mark.parametrize(
    ("template", "second"),
    [
        (OPENS, "\nshort</think>x"),
        (OPENS.replace("m.content", f"(m.content if loop.last else {DROPPED}.lstrip('\n'))"), "\nshort</think>x"),
        (OPENS.replace("m.content", DROPPED), "\nshort</think>x"),
        (ANEW, "short\n</think>\n\nx"),
    ],
    ids=["keeps thoughts", "QwQ", "DeepSeek-R1", "Qwen3-Thinking"],
)
def test_targets_whose_template_changes_a_turn_once_it_is_answered(
    config, run, tiny_tokenizer, tmp_path, template, second
):
    """Each prompt is what the target would see, and `prepare` learns exactly what it wrote there."""
    said = {"one": "a thought\n</think>\n\nHello", "two": second}
    write(tmp_path / "chats.jsonl", [[system("brief"), user("one"), assistant(), user("two")]])
    speaker, encoder = Speaker(tiny_tokenizer, said), ChatEncoder(tiny_tokenizer, template)
    manifest = run(config, speaker, template)
    assert (manifest["success"], manifest["answers"], manifest["reread"]) == (1, 2, 0)
    (record,) = records(config.out)
    contents = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
    assert contents == ["<think>\n" + text for text in said.values()]
    encoded = encoder.encode_document(*ChatFormat("messages").documents("c", record))
    assert len(encoded) == (1 if template == OPENS else 2)
    spans = [(one, *span) for one in encoded for span in one.spans]
    for ((prompt, _),), answer, (one, start, stop) in zip(speaker.calls, said.values(), spans, strict=True):
        assert tiny_tokenizer.decode(one.tokens[:start], clean_up_tokenization_spaces=False) == prompt
        learned = tiny_tokenizer.decode(one.tokens[start:stop], clean_up_tokenization_spaces=False)
        assert learned == answer + "<|end|>"
    assert ("a thought" in speaker.calls[1][0][0]) == (template == OPENS)


def test_a_first_part_that_fails_as_one_stops_the_call(config, run, tiny_tokenizer, chats):
    """If no answer fits the template, this is known after one part."""
    control = ([*tiny_tokenizer("x").input_ids, 1, tiny_tokenizer.eos_token_id], True)
    speaker = Speaker(tiny_tokenizer, {f"{i}.0": control for i in range(60)})
    with pytest.raises(ValueError, match=r"none of the first 20 .*special_token_in_answer"):
        run(replace(config, part_size=20), speaker)
    assert len(speaker.calls) == 1 and files_of(config.out).keys() == {"plan.json"}
    del speaker.said["7.0"]
    assert run(replace(config, part_size=20), speaker)["success"] == 1


VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'U: ' + m.content + ' A:' }}{% else %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def test_a_cut_answer_keeps_its_complete_characters_where_bytes_are_tokens(blank_tokenizer):
    """As in Llama 2; the bytes of the character that was cut go."""
    encoder = ChatEncoder(blank_tokenizer, VICUNA)
    written = blank_tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "🙂世🙂".encode()])
    for count, text in ((4, "🙂"), (6, "🙂"), (7, "🙂世"), (8, "🙂世"), (10, "🙂世"), (11, "🙂世🙂")):
        conversation = Answering(Conversation("d", b"", (("user", "hi"),)), encoder, 99, keep_unfinished=True)
        conversation.take(Completion(0, written[:count], False))
        assert conversation.messages[-1] == ("assistant", text)


@pytest.mark.parametrize(("template", "begun", "said"), [(PLAIN, "hello wor", " the gate"), (VICUNA, "hi", "the gate")])
def test_a_blank_between_prompt_and_answer_is_kept_where_the_template_has_none(blank_tokenizer, template, begun, said):
    """The learned tokens are those that the target wrote, whether the blank is in the text or in the template. The same
    text from other tokens is read back as these, with its blank."""
    encoder, asked = ChatEncoder(blank_tokenizer, template), Conversation("d", b"", (("user", begun),))
    wrote = [*blank_tokenizer.convert_tokens_to_ids(["▁the", "▁", "g", "ate"]), blank_tokenizer.eos_token_id]
    others = [*blank_tokenizer.convert_tokens_to_ids(["▁t", "h", "e", "▁"]), *wrote[2:]]
    for reread, tokens in enumerate((wrote, others)):
        conversation = Answering(asked, encoder, 99)
        conversation.take(Completion(0, tokens, True))
        assert conversation.messages[-1] == ("assistant", said) and conversation.reread == reread
        (encoded,) = encoder.encode_document(Conversation("d", b"", tuple(conversation.messages)))
        assert encoded.tokens[slice(*encoded.spans[0])].tolist() == wrote
