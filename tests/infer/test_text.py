"""Streamed text and stop strings, compared with decoding all tokens again for every new one."""
# ruff: noqa: RUF001 (the letters are meant)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.text import UNFINISHED, ShownText, StopStrings, TextReader, text_behind
from longdraft.models.hf import load_tokenizer

TEXTS = [
    "naïve café, déjà vu: 你好，世界。これはテストです。 한국어 텍스트",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇨🇭!  two  spaces\n\n\tdef f(x):\n        return {x: [1, 2]}  # ok\r\n",
    "The end. The end? THE END!!! ... <|not special|> </s> a.b.c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ e\u0301 \u200b zero\u00a0width",
]
STOPS = ["end", "\n\n", "。", "世界", "👧", "  ", "return {", ".b.", "xx", "!!", "é", "\u0301 "]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("smollm2-135m")


def texts_and_noise():
    """Token lists: pieces of real text in any order, cut anywhere, with any other tokens between them."""
    piece = st.tuples(st.sampled_from(TEXTS), st.integers(0, 40), st.integers(1, 40))
    return st.lists(st.one_of(piece, st.integers(0, 49151)), max_size=8)


def tokens_of(tokenizer, parts) -> list[int]:
    tokens = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            text, start, count = part
            tokens += tokenizer(text).input_ids[start : start + count]
    return tokens


def finished(tokenizer, tokens) -> str:
    """The text of these tokens, without bytes at its end that may become a character."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text[: len(text) - min(3, len(text) - len(text.rstrip(UNFINISHED)))]


@settings(max_examples=150, deadline=None)
@given(parts=texts_and_noise(), step=st.integers(1, 4))
def test_the_reader_is_never_behind_nor_ahead(tokenizer, parts, step):
    tokens, reader, shown = tokens_of(tokenizer, parts), TextReader(tokenizer), ""
    for start in range(0, len(tokens), step):
        shown += reader.push(tokens[start : start + step])
        assert shown == reader.text == finished(tokenizer, tokens[: start + step])


@settings(max_examples=150, deadline=None)
@given(parts=texts_and_noise(), strings=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_stop_strings_stop_at_the_first_token_that_completes_one(tokenizer, parts, strings):
    tokens, stops, shown = tokens_of(tokenizer, parts), StopStrings(tokenizer, strings), ShownText(tokenizer, strings)
    text = ""
    for count, token in enumerate(tokens, start=1):
        whole = finished(tokenizer, tokens[:count])
        places = [whole.find(string) for string in strings if string in whole]
        stopped = stops.push(token)
        text += shown.push([token])
        assert stopped == bool(places)
        if stopped:
            assert stops.text == whole[: min(places)] == text
            return
        assert stops.text == whole and whole.startswith(text)
        # Held back is only what may become a stop string.
        assert text == whole or any(string.startswith(whole[len(text) :]) for string in strings)
    final = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text + shown.finish(final) == final


def test_a_character_of_many_tokens_comes_whole(tokenizer):
    tokens = tokenizer("a👩‍👩‍👧‍👦b").input_ids
    reader = TextReader(tokenizer)
    pieces = [reader.push([token]) for token in tokens]
    assert len(tokens) > 10 and "".join(pieces) == "a👩‍👩‍👧‍👦b" and not any(UNFINISHED in piece for piece in pieces)
    assert pieces.count("") >= 4


def test_special_tokens_are_no_text_and_cost_nothing(tokenizer):
    """A model that repeats its end token must not make every further token slower to read."""
    reader, (end,) = TextReader(tokenizer), tokenizer("<|im_end|>").input_ids
    assert reader.push(tokenizer("A b").input_ids) == "A b"
    assert [reader.push([end]) for _ in range(2000)] == [""] * 2000
    assert len(reader._window) < 10
    assert reader.push(tokenizer(" c").input_ids) == " c"


def leading_space_tokenizer():
    """As in SentencePiece, a word's space is part of its token and is dropped at the beginning of a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "\u2581the", "\u2581cat", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\u2581"]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_a_leading_space_tokenizer_is_read_the_same():
    tokenizer = leading_space_tokenizer()
    tokens = [1, 2, 3, 4, 1, 5, 6, 7, 8, 9, 2, 5, 6, 7, 8, 4, 1, 3, 5, 6]
    reader, given = TextReader(tokenizer), []
    for token in tokens:
        given.append(reader.push([token]))
    assert "".join(given) + UNFINISHED * 2 == tokenizer.decode(tokens, skip_special_tokens=True)
    assert given[5:9] == ["", "", "", "😀"]


def test_a_text_behind_a_prompt_goes_on_from_its():
    """As in vLLM, prompt and text together are the decoded tokens. The face's last byte would spoil the next one."""
    tokenizer = leading_space_tokenizer()
    face = [5, 6, 7, 8]
    for prompt, tokens, text in [
        ([1, 2], [3, 4], " cats"),
        ([1, 2], [4, 3], "s cat"),
        ([1, 2, 9], [4, 3], "s cat"),
        ([2, *face], [*face, 3], "😀 cat"),
        ([1], [3, 4], "cats"),  # nothing is before it
    ]:
        assert text_behind(tokenizer, prompt, tokens) == text
        assert tokenizer.decode(prompt, skip_special_tokens=True) + text == tokenizer.decode(
            prompt + tokens, skip_special_tokens=True
        )
        reader, shown, stops = TextReader(tokenizer, prompt), ShownText(tokenizer, (), prompt), []
        assert "".join(map(reader.push, [[token] for token in tokens])) == reader.text == text
        assert "".join(map(shown.push, [[token] for token in tokens])) == text
        stops = StopStrings(tokenizer, [text], prompt)
        assert [stops.push(token) for token in tokens][-1] and stops.text == ""


def test_characters_of_byte_tokens_follow_one_another():
    tokenizer, face = leading_space_tokenizer(), [5, 6, 7, 8]
    reader = TextReader(tokenizer)
    pieces = [reader.push([token]) for token in (2, *face, *face, 5, 3, 4)]
    assert pieces[1:9] == ["", "", "", "😀", "", "", "", "😀"] and reader.text.endswith(" cats")
