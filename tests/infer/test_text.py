"""Streamed text and stop strings, compared with decoding all tokens again for every new one."""
# ruff: noqa: RUF001 (the letters are meant)

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from longdraft.infer.generation import ActiveSequence
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.text import MOST_HELD, UNFINISHED, ShownText, token_text
from longdraft.models.hf import load_tokenizer

TEXTS = [
    "naïve café, déjà vu: 你好，世界。これはテストです。 한국어 텍스트",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇨🇭!  two  spaces\n\n\tdef f(x):\n        return {x: [1, 2]}  # ok\r\n",
    "The end. The end? THE END!!! ... <|not special|> </s> a.b.c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ e\u0301 \u200b zero\u00a0width. ",
]
STOPS = ["end", "\n\n", "。", "世界", "👧", "  ", "return {", ".b.", "xx", "!!", "é", "\u0301 ", "a", " the"]
SPACE, METASPACE = decoders.Replace("\u2581", " "), decoders.Metaspace()
FALLBACK, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
# Decoders by tokenizers that have them. SmolLM2's own tokenizer is byte-level, as are GPT-2's, Llama 3's and Qwen's.
DECODERS = {
    "SmolLM2": None,
    "Llama 2, Vicuna, Mistral": decoders.Sequence([SPACE, FALLBACK, FUSE, STRIP]),
    "Gemma": decoders.Sequence([SPACE, FALLBACK, FUSE]),
    "GGUF of Llama": decoders.Sequence([FALLBACK, FUSE, SPACE, STRIP]),
    "unigram with bytes": decoders.Sequence([FALLBACK, METASPACE]),
    "unigram": METASPACE,
    "WordPiece": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
    "none": None,
}
WORDS = ["a", "the", "s", ".", "é", "世界", "##s", "ing</w>", "<0x4g>", "Ġthe"]
WORDS += ["\u2581the", "\u2581cat", "\u2581", "\u2581\u2581", "\u2581😀"]


@cache
def tokenizer_of(kind):
    if kind == "SmolLM2":
        return load_tokenizer("smollm2-135m")
    pieces = dict.fromkeys(["<unk>", "<s>", "</s>", *WORDS, *[f"<0x{byte:02X}>" for byte in range(256)]])
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    if DECODERS[kind] is not None:
        backend.decoder = DECODERS[kind]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    # Some published configurations set it; it takes blanks away before signs that come later.
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **special)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("SmolLM2")


def ids_of(tokenizer, *parts: str | bytes) -> list[int]:
    """The tokens with these spellings, and the byte tokens of these bytes."""
    names = [name for part in parts for name in ([part] if isinstance(part, str) else [f"<0x{b:02X}>" for b in part])]
    return tokenizer.convert_tokens_to_ids(names)


def whole(tokenizer, tokens, skip_special=True) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def texts_and_words():
    """Token lists: real text cut between characters, with any words between the pieces."""
    piece = st.tuples(st.sampled_from(TEXTS), st.integers(0, 40), st.integers(1, 20))
    return st.lists(st.one_of(piece, st.sampled_from(WORDS[:8])), max_size=6)


def tokens_of(tokenizer, parts) -> list[int]:
    """Texts as the tokenizer reads them, or as byte tokens."""
    tokens = []
    for part in parts:
        text = part if isinstance(part, str) else part[0][part[1] : part[1] + part[2]]
        if len(tokenizer) > 10000:
            tokens += tokenizer(text).input_ids
        else:
            tokens += ids_of(tokenizer, text if text in WORDS else text.encode())
    return tokens


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=40, deadline=None)
@given(parts=texts_and_words())
def test_whole_characters_are_shown_at_once(kind, parts):
    tokenizer = tokenizer_of(kind)
    tokens, shown, text = tokens_of(tokenizer, parts), ShownText(tokenizer), ""
    for count, token in enumerate(tokens, start=1):
        text += shown.push(token)
        now = whole(tokenizer, tokens[:count])
        assert whole(tokenizer, tokens).startswith(text) if now.endswith(UNFINISHED) else text == now
    assert shown.finish()[0] == whole(tokenizer, tokens)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=40, deadline=None)
@given(parts=texts_and_words(), strings=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_stop_strings_stop_at_the_first_token_that_completes_one(kind, parts, strings):
    tokenizer = tokenizer_of(kind)
    tokens, shown, text = tokens_of(tokenizer, parts), ShownText(tokenizer, strings), ""
    for count, token in enumerate(tokens, start=1):
        expected = whole(tokenizer, tokens[:count])
        places = [expected.find(string) for string in strings if string in expected]
        text += shown.push(token)
        if expected.endswith(UNFINISHED):  # in the middle of a character
            assert not shown.stopped
        elif places:
            assert shown.stopped and expected[: min(places)] == text and shown.finish() == (text, "")
            break
        else:
            assert expected.startswith(text) and not shown.stopped
            # Held back is only what may become a stop string.
            assert text == expected or any(string.startswith(expected[len(text) :]) for string in strings)
    else:
        final, rest = shown.finish()
        assert text + rest == final == whole(tokenizer, tokens)


FACE = "😀".encode()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (FACE + FACE[:2], "😀�"),
        (b"a\xf0b", "a�b"),
        (b"\x80\xbf" + FACE + b"\x80", "��😀�"),
        (b"a\xe4\xb8a", "a�a"),
        (b"\x80" * 20 + b"a", "�" * 20 + "a"),
    ],
)
def test_bytes_that_are_no_character_become_marks(tokenizer, data, text):
    letters = {byte: letter for letter, byte in zip(*byte_letters(), strict=True)}
    tokens = tokenizer.convert_tokens_to_ids([letters[byte] for byte in data])
    shown, streamed = ShownText(tokenizer), ""
    for token in tokens:
        streamed += shown.push(token)
    final, rest = shown.finish()
    assert streamed + rest == final == text


@pytest.mark.parametrize("kind", [name for name in DECODERS if name.startswith(("Llama", "Gemma", "GGUF"))])
@pytest.mark.parametrize(("rest", "marks"), [(["a"], "�a"), ([b"\xbd"], "��"), ([b"\xbd", "a"], "��a")])
def test_a_character_before_such_bytes_stays(kind, rest, marks):
    """Hugging Face's fallback makes marks of it too, in the whole text."""
    tokenizer = tokenizer_of(kind)
    shown, streamed = ShownText(tokenizer), ""
    for token in ids_of(tokenizer, "你".encode(), b"\xe4", *rest):
        streamed += shown.push(token)
    final, after = shown.finish()
    assert streamed + after == final == "你" + marks


def byte_letters():
    """The letters of byte-level tokens, and their bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return [*map(chr, visible), *(chr(256 + i) for i in range(len(others)))], visible + others


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.count = tokenizer, 0

    def decode(self, tokens, **options):
        self.count += len(tokens)
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("parts", [["</s>"], ["a"], ["\u2581the", FACE[:1]], [b"\x80"]])
def test_a_token_costs_the_same_however_long_the_text_is(kind, parts):
    """A model that repeats one token, its end token or half a character too, must not get slower and slower."""
    tokenizer = Counted(tokenizer_of(kind))
    tokens = ids_of(tokenizer_of(kind), *parts if kind != "SmolLM2" else ["<|im_end|>"]) * 500
    shown = ShownText(tokenizer)
    for token in tokens:
        shown.push(token)
    assert tokenizer.count <= 2 * MOST_HELD * len(tokens)


@pytest.mark.parametrize("kind", DECODERS)
def test_special_tokens_are_text_where_they_are_wanted(kind):
    tokenizer = tokenizer_of(kind)
    tokens = ids_of(tokenizer, "a", tokenizer.eos_token, "a", tokenizer.eos_token)
    for skip in (True, False):
        shown = ShownText(tokenizer, skip_special=skip)
        assert "".join(map(shown.push, tokens)) == whole(tokenizer, tokens, skip)
    assert token_text(tokenizer, tokens[1]).strip() == tokenizer.eos_token


FACE_TOKENS = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        (["<s>", "\u2581the"], ["\u2581cat", "s"], " cats"),
        (["<s>", "\u2581the"], ["s", "\u2581cat"], "s cat"),
        (["<s>", "\u2581the", "\u2581"], ["s", "\u2581cat"], "s cat"),
        (["\u2581the", *FACE_TOKENS], [*FACE_TOKENS, "\u2581cat"], "😀 cat"),
        (["\u2581the", *["</s>"] * 9], ["\u2581cat"], " cat"),
        (FACE_TOKENS * 9, ["\u2581cat"], " cat"),
        (["a", *FACE_TOKENS[:3]], [*FACE_TOKENS[3:], "\u2581cat"], "😀 cat"),  # it completes the prompt's character
        (["<s>"], ["\u2581cat", "s"], "cats"),  # nothing is before it
        ([], ["\u2581cat", "s"], "cats"),
    ],
)
def test_a_text_after_a_prompt_continues_it(prompt, tokens, text):
    """As in vLLM, prompt and text together are the decoded tokens."""
    tokenizer = tokenizer_of("Llama 2, Vicuna, Mistral")
    before, after = ids_of(tokenizer, *prompt), ids_of(tokenizer, *tokens)
    shown, stopping = ShownText(tokenizer, (), before), ShownText(tokenizer, [text], before)
    assert "".join(map(shown.push, after)) == text
    assert "".join(map(stopping.push, after)) == "" and stopping.stopped


def answer(target, prompt, params, tokens, size) -> str:
    """The text of an answer of these tokens, `size` a step, which its pieces must add up to."""
    (request,) = read_requests(target, [prompt], params, 256)
    sequence, pushed, text = ActiveSequence(request, target, 256), 0, ""
    while not sequence.result.finish_reason:
        piece = sequence.commit(tokens[pushed : pushed + size])
        assert piece.tokens == sequence.committed[len(request.prompt) + pushed :]
        assert piece.accepted == min(len(tokens[pushed : pushed + size]) - 1, len(piece.tokens))
        # The text of a step's drafted tokens alone, of which the last one may be held back.
        alone = ActiveSequence(request, target, 256)
        before = "".join(alone.commit([token]).text for token in tokens[:pushed])
        drafted = "".join(alone.commit([token]).text for token in piece.tokens[: piece.accepted])
        assert before == text and piece.text[: piece.accepted_text] == drafted[: piece.accepted_text]
        text, pushed = text + piece.text, pushed + size
    assert text == piece.generation.text
    return text


@pytest.mark.parametrize("kind", [*DECODERS][:5])
@pytest.mark.parametrize(("stops", "last"), [((), None), (("😀a",), "aé"), (("never comes", "aa"), "aé😀a😀")])
@pytest.mark.parametrize("prompt", [[5], "a"])
def test_stream_and_whole_are_equal_at_every_length(tiny_target, kind, stops, last, prompt):
    target, text = tiny_target(vocab_size=len(tokenizer_of(kind))), "aé😀a😀aa😀"
    target.tokenizer = tokenizer_of(kind)
    byte_tokens = ids_of(target.tokenizer, text.encode())
    tokens = target.tokenizer(text).input_ids if kind == "SmolLM2" else byte_tokens
    for size in (1, 2, 5):
        params = [SamplingParams(max_new_tokens=n, stop_strings=stops) for n in range(1, len(tokens) + 1)]
        texts = [answer(target, prompt, one, tokens, size) for one in params]
        assert texts[-1] == (last or text)
        for shorter in texts:  # only marks, or the beginning of what stops, do not stay
            assert text.startswith(shorter.rstrip(UNFINISHED))


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["a", "Ġâ"], "a ", ""),  # a blank, and the first byte of a character
        (["a", "Ġâ", "<|im_end|>"], " ", "a"),
        (["a", "Ġâ", *["â"] * (MOST_HELD - 2), "<|im_end|>"], " ", "a"),
        (["a", "â"], UNFINISHED, "a"),
        (["a", "Ġâ"], "b", f"a {UNFINISHED}"),
    ],
)
def test_a_stop_string_is_found_in_what_was_held_back_at_the_end(tiny_target, tokenizer, pieces, stop, text):
    target, tokens = tiny_target(vocab_size=len(tokenizer)), tokenizer.convert_tokens_to_ids(pieces)
    target.tokenizer, target.eos_token_ids = tokenizer, (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    params = SamplingParams(max_new_tokens=len(tokens), stop_strings=(stop,))
    assert answer(target, [5], params, tokens, 1) == text
    (request,) = read_requests(target, [[5]], replace(params, max_new_tokens=2), 256)
    ended = ActiveSequence(request, target, 256).commit(tokens[:2]).generation
    assert ended.finish_reason == ("length" if stop == "b" else "stop")


def test_a_stop_string_that_came_too_early_is_not_found_later(tokenizer):
    """Whatever the lengths of the others are."""
    tokens = tokenizer.convert_tokens_to_ids([*"xabcd"])
    for strings, stops in ((("ab", "a very long stop string"), False), (("bc",), True)):
        shown = ShownText(tokenizer, strings)
        for place, token in enumerate(tokens[:4]):
            shown.push(token, place >= 3)
        assert shown.stopped == stops
    shown = ShownText(tokenizer, ("a ",))
    for token in tokenizer.convert_tokens_to_ids(["a", "Ġâ"]):
        shown.push(token, False)
    assert shown.finish()[0] == f"a {UNFINISHED}"
