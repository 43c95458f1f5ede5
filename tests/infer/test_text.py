"""Streamed text and stop strings, compared with decoding all tokens again for every new one."""
# ruff: noqa: RUF001 (the letters are meant)

from functools import cache
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from longdraft.infer.generation import ActiveSequence
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.text import BYTE_OF, UNFINISHED, ShownText, TextReader
from longdraft.models.hf import load_tokenizer

TEXTS = [
    "naïve café, déjà vu: 你好，世界。これはテストです。 한국어 텍스트",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, 🇨🇭!  two  spaces\n\n\tdef f(x):\n        return {x: [1, 2]}  # ok\r\n",
    "The end. The end? THE END!!! ... <|not special|> </s> a.b.c",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ e\u0301 \u200b zero\u00a0width \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}. ",
]
STOPS = [
    "end",
    "\n\n",
    "。",
    "世界",
    "👧",
    "  ",
    "return {",
    ".b.",
    "xx",
    "!!",
    "é",
    "\u0301 ",
    UNFINISHED,
    "a",
    " the",
]
LETTERS = {byte: letter for letter, byte in BYTE_OF.items()}
SPACE, METASPACE = decoders.Replace("\u2581", " "), decoders.Metaspace()
FALLBACK, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
# Decoders by tokenizers that have them. SmolLM2's own tokenizer is byte-level, as are GPT-2's, Llama 3's and Qwen's.
DECODERS = {
    "SmolLM2": None,
    "LFM2": decoders.Sequence([decoders.ByteLevel()]),
    "Llama 2, Vicuna, Mistral": decoders.Sequence([SPACE, FALLBACK, FUSE, STRIP]),
    "Gemma": decoders.Sequence([SPACE, FALLBACK, FUSE]),
    "GGUF of Llama": decoders.Sequence([FALLBACK, FUSE, SPACE, STRIP]),
    "unigram with bytes": decoders.Sequence([FALLBACK, METASPACE]),
    "unigram": METASPACE,
    "WordPiece": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
    "none": None,
}
HAVE_BYTES = [*DECODERS][:6]
WORDS = ["a", "the", "s", ".", "é", "世界", "##s", "ing</w>", UNFINISHED, "<0x4g>", "Ġthe", "ĠðŁ", "ĺĢĠ"]
WORDS += ["\u2581the", "\u2581cat", "\u2581", "\u2581\u2581", "\u2581😀"]


@cache
def tokenizer_of(kind):
    if kind == "SmolLM2":
        return load_tokenizer("smollm2-135m")
    bytes_ = LETTERS.values() if kind == "LFM2" else [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = dict.fromkeys(["<unk>", "<s>", "</s>", *WORDS, *bytes_])
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    if DECODERS[kind] is not None:
        backend.decoder = DECODERS[kind]
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    # Some published configurations set it; it takes blanks away before signs that come later.
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **special)


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("SmolLM2")


def byte_tokens(tokenizer, data: bytes) -> list[int]:
    names = [LETTERS[byte] for byte in data]
    if "<0x00>" in vocabulary(tokenizer):
        names = [f"<0x{byte:02X}>" for byte in data]
    return tokenizer.convert_tokens_to_ids(names)


def ids_of(tokenizer, *parts: str | bytes) -> list[int]:
    """The tokens with these spellings, and those of these bytes."""
    convert = tokenizer.convert_tokens_to_ids
    return [i for part in parts for i in ([convert(part)] if isinstance(part, str) else byte_tokens(tokenizer, part))]


def text_behind(tokenizer, prompt, tokens, skip_special=True) -> str:
    reader = TextReader(tokenizer, prompt, skip_special)
    reader.push(tokens)
    return reader.finish()


def whole(tokenizer, tokens) -> str:
    """The text of all these tokens as the tokenizer decodes them, but for a run of byte tokens that is not UTF-8: of
    that it has only the bytes that are no character replaced, not all."""
    repaired = []
    tokens = [token for token in tokens if token < len(vocabulary(tokenizer)) and not is_special(tokenizer, token)]
    for is_byte, run in groupby(tokens, lambda i: is_byte_token(tokenizer, i)):
        ids = list(run)
        if is_byte:
            data = bytes(int(piece[3:5], 16) for piece in tokenizer.convert_ids_to_tokens(ids))
            ids = byte_tokens(tokenizer, data.decode("utf-8", "replace").encode())
        repaired += ids
    return tokenizer.decode(repaired, clean_up_tokenization_spaces=False)


@cache
def vocabulary(tokenizer) -> dict[str, int]:
    return tokenizer.get_vocab()


@cache
def is_special(tokenizer, token: int) -> bool:
    return token in (added := tokenizer.added_tokens_decoder) and added[token].special


@cache
def is_byte_token(tokenizer, token: int) -> bool:
    piece = tokenizer.convert_ids_to_tokens(token)
    return piece.startswith("<0x") and piece != "<0x4g>" and tokenizer.decode([token]) != piece


def finished(tokenizer, tokens) -> str:
    """Their text without a mark at its end of which bytes that follow may make a character."""
    text = whole(tokenizer, tokens)
    if not text.endswith(UNFINISHED):
        return text
    ends = [first + b"\x80" * more for first in (b"\x80", b"\x90", b"\xa0") for more in range(3)]
    lasts = all(whole(tokenizer, [*tokens, *byte_tokens(tokenizer, end)]).startswith(text) for end in ends)
    return text if lasts else text[:-1]


def texts_and_noise():
    """Token lists: pieces of real text in any order, cut anywhere, with any other tokens between them."""
    piece = st.tuples(st.sampled_from(TEXTS), st.integers(0, 40), st.integers(1, 20))
    return st.lists(st.one_of(piece, st.integers(0, 49200)), max_size=6)


def tokens_of(tokenizer, parts) -> list[int]:
    """Texts as the tokenizer reads them, or as byte tokens; other tokens are mostly words, or unknown."""
    tokens = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part if len(vocabulary(tokenizer)) > 10000 else part % 40 if part % 9 else part)
        else:
            text, start, count = part
            alone = len(vocabulary(tokenizer)) < 10000
            found = byte_tokens(tokenizer, text.encode()) if alone else tokenizer(text).input_ids
            tokens += found[start : start + count]
    return tokens


def pieces_of(tokens, steps) -> list[list[int]]:
    """The tokens divided into pieces of these lengths, over and over."""
    pieces = []
    while tokens:
        size = steps[len(pieces) % len(steps)]
        pieces, tokens = [*pieces, tokens[:size]], tokens[size:]
    return pieces


STEPS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=40, deadline=None)
@given(parts=texts_and_noise(), steps=STEPS)
def test_the_reader_is_never_behind_nor_ahead(kind, parts, steps):
    tokenizer = tokenizer_of(kind)
    tokens, reader, shown, read = tokens_of(tokenizer, parts), TextReader(tokenizer), "", 0
    for piece in pieces_of(tokens, steps):
        shown, read = shown + reader.push(piece), read + len(piece)
        assert shown == reader.text == finished(tokenizer, tokens[:read])
        text = text_behind(tokenizer, (), tokens[:read])
        assert text == whole(tokenizer, tokens[:read]) and text in (shown, shown + UNFINISHED)
    assert reader.finish() == whole(tokenizer, tokens)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=40, deadline=None)
@given(parts=texts_and_noise(), strings=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_stop_strings_stop_at_the_first_token_that_completes_one(kind, parts, strings):
    tokenizer = tokenizer_of(kind)
    tokens, shown, text = tokens_of(tokenizer, parts), ShownText(tokenizer, strings), ""
    for count, token in enumerate(tokens, start=1):
        expected = finished(tokenizer, tokens[:count])
        places = [expected.find(string) for string in strings if string in expected]
        text += shown.push(token)
        assert shown.stopped == bool(places)
        if places:
            assert expected[: min(places)] == text and shown.finish() == (text, "")
            break
        assert expected.startswith(text)
        # Held back is only what may become a stop string.
        assert text == expected or any(string.startswith(expected[len(text) :]) for string in strings)
    else:
        final, rest = shown.finish()
        assert text + rest == final == text_behind(tokenizer, (), tokens)


FACE, LONE = "😀".encode(), b"\xf0"


@pytest.mark.parametrize("kind", HAVE_BYTES)
@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([FACE, FACE], "😀😀"),
        ([FACE, FACE[:1]], "😀�"),
        ([FACE, FACE[:2]], "😀�"),
        ([FACE, FACE[:3]], "😀�"),
        ([FACE, LONE, "a"], "😀�a"),
        ([FACE, LONE, FACE], "😀�😀"),
        ([b"\x80\xbf", FACE, b"\x80"], "��😀�"),
        (["a", FACE, LONE, "</s>", FACE[1:], "a"], "a😀😀a"),  # a special token is nothing
        (["a", UNFINISHED.encode(), FACE[:2]], "a��"),  # the first one is written
        (["a", UNFINISHED.encode(), FACE], "a�😀"),
        (["a", b"\xe4\xb8", "a"], "a�a"),
        (["a", "</s>"], "a"),
        ([b"\n", FACE[:3], b"\n"], "\n�\n"),
    ],
)
def test_complete_characters_stay(kind, parts, text):
    tokenizer = tokenizer_of(kind)
    tokens = ids_of(tokenizer, *["<|im_end|>" if part == "</s>" and kind == "SmolLM2" else part for part in parts])
    reader = TextReader(tokenizer)
    assert text_behind(tokenizer, (), tokens) == text
    for token in tokens:
        reader.push([token])
        assert text.startswith(reader.text)
    assert reader.finish() == text


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.count = tokenizer, 0

    def decode(self, tokens, **options):
        self.count += len(tokens)
        return self._tokenizer.decode(tokens, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("parts", [["</s>"], ["a"], ["\u2581the", FACE[:1]], [UNFINISHED.encode()], [b"\x80"]])
def test_a_token_costs_the_same_however_long_the_text_is(kind, parts):
    """A model that repeats one token, its end token or half a character too, must not get slower and slower."""
    tokenizer = Counted(tokenizer_of(kind))
    parts = ["<|im_end|>" if part == "</s>" and kind == "SmolLM2" else part for part in parts]
    tokens = ids_of(tokenizer, *parts) * 500
    reader, tokenizer.count = TextReader(tokenizer), 0
    for token in tokens:
        reader.push([token])
    assert tokenizer.count <= 4 * len(tokens)


@pytest.mark.parametrize("kind", DECODERS)
def test_special_tokens_are_text_where_they_are_wanted(kind):
    tokenizer = tokenizer_of(kind)
    tokens = ids_of(tokenizer, "a", tokenizer.eos_token, "a", tokenizer.eos_token)
    assert text_behind(tokenizer, (), tokens) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert text_behind(tokenizer, (), tokens, skip_special=False) == tokenizer.decode(tokens)


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
def test_a_text_behind_a_prompt_goes_on_from_its(prompt, tokens, text):
    """As in vLLM, prompt and text together are the decoded tokens."""
    tokenizer = tokenizer_of("Llama 2, Vicuna, Mistral")
    before, behind = ids_of(tokenizer, *prompt), ids_of(tokenizer, *tokens)
    assert text_behind(tokenizer, before, behind) == text
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, before + behind)]
    assert decoded[0].rstrip(UNFINISHED) + text == decoded[1]
    reader, shown = TextReader(tokenizer, before), ShownText(tokenizer, (), before)
    assert "".join(map(reader.push, [[token] for token in behind])) == reader.text == text
    assert "".join(map(shown.push, behind)) == text
    stopping = ShownText(tokenizer, [text], before)
    assert "".join(map(stopping.push, behind)) == "" and stopping.stopped


@pytest.mark.parametrize(("prompt", "text"), [("a", " cat"), ([5], "cat")])
def test_the_answer_to_a_text_alone_goes_on_from_it(tiny_target, prompt, text):
    target = tiny_target(vocab_size=len(tokenizer_of("Gemma")))
    target.tokenizer = tokenizer_of("Llama 2, Vicuna, Mistral")
    (request,) = read_requests(target, [prompt], SamplingParams(), 256)
    sequence = ActiveSequence(request, target, 256)
    assert sequence.commit(ids_of(target.tokenizer, "\u2581cat")).text == text
    assert sequence.cancel().generation.text == text


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


@pytest.mark.parametrize("kind", HAVE_BYTES)
@pytest.mark.parametrize(
    ("stops", "last"),
    [
        ((), "a😀�aé�😀😀�a😀aa😀"),
        (("😀a",), "a😀�aé�😀😀�a"),
        (("�a",), "a😀"),
        (("never comes", "aa"), "a😀�aé�😀😀�a😀"),
        (("<s>", "�"), "a😀"),
    ],
)
@pytest.mark.parametrize("prompt", [[5], "a"])
def test_stream_and_whole_are_equal_at_every_length(tiny_target, kind, stops, last, prompt):
    target = tiny_target(vocab_size=len(tokenizer_of(kind)))
    target.tokenizer = tokenizer_of(kind)
    parts = "a", FACE, FACE[:2], "a", "é".encode(), UNFINISHED.encode(), FACE, FACE, b"\x80", "a", FACE, "a", "a", FACE
    tokens = ids_of(target.tokenizer, *parts)
    for size in (1, 2, 5):
        params = [SamplingParams(max_new_tokens=n, stop_strings=stops) for n in range(1, len(tokens) + 1)]
        texts = [answer(target, prompt, one, tokens, size) for one in params]
        assert texts[-1] == last
        for shorter, longer in pairwise(texts):  # only a mark, or the beginning of what stops, does not stay
            assert longer.startswith(shorter) or longer.startswith(shorter[:-1])


def test_a_stop_string_that_came_too_early_is_not_found_later(tokenizer):
    """Whatever the lengths of the others are."""
    tokens = byte_tokens(tokenizer, b"xabcd")
    for strings, stops in ((("ab", "a very long stop string"), False), (("bc",), True)):
        shown = ShownText(tokenizer, strings)
        for place, token in enumerate(tokens[:4]):
            shown.push(token, place >= 3)
        assert shown.stopped == stops
