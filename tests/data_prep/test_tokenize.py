import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from longdraft.data_prep import tokenize
from longdraft.data_prep.documents import Document
from longdraft.data_prep.tokenize import encode_text, make_encoder, rust_tokenizer


def encode(tokenizer, text, ends_documents=True):
    """The token ids of a text, int32 [n]."""
    (encoded,) = make_encoder(tokenizer, ends_documents).encode_document(Document("d", b"", text))
    assert encoded.spans == ((0, len(encoded.tokens)),) and encoded.tokens.dtype == np.int32
    return encoded.tokens


def test_documents_end_with_eos_and_begin_as_the_tokenizer_says(tiny_tokenizer, bos_tokenizer):
    text_ids = tiny_tokenizer("a ship", add_special_tokens=False)["input_ids"]
    assert encode(tiny_tokenizer, "a ship").tolist() == [*text_ids, tiny_tokenizer.eos_token_id]
    assert encode(tiny_tokenizer, "a ship", ends_documents=False).tolist() == text_ids
    whole = [bos_tokenizer.bos_token_id, *text_ids, bos_tokenizer.eos_token_id]
    assert encode(bos_tokenizer, "a ship").tolist() == whole


def test_spelled_out_special_tokens_are_text(tiny_tokenizer):
    text = "ends <|end|> here, starts <|start|>"
    ids = encode(tiny_tokenizer, text, ends_documents=False).tolist()
    assert not {tiny_tokenizer.eos_token_id, tiny_tokenizer.bos_token_id} & set(ids)
    assert tiny_tokenizer.decode(ids) == text
    # The caller's tokenizer is unchanged.
    assert tiny_tokenizer.eos_token_id in tiny_tokenizer(text)["input_ids"]


def test_call_time_state_of_the_tokenizer_does_not_matter(tiny_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(tiny_tokenizer))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer("x", truncation=True, max_length=4, padding="max_length")
    text = "a longer text than four tokens"
    expected = encode(tiny_tokenizer, text)
    assert (encode(tokenizer, text) == expected).all()


def test_unusable_tokenizers_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="no Rust form"):
        make_encoder(SimpleNamespace(is_fast=False), ends_documents=True)  # type: ignore[arg-type]
    tokenizer = pickle.loads(pickle.dumps(tiny_tokenizer))
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        make_encoder(tokenizer, ends_documents=True)


PROSE = (
    "The ship's log of 1843, kept by hand: it'll say \"fair winds\", and then\n\n    nothing -- for 12 days.\r\n"
    "def f(x):\n\treturn {'a': x, \"b\": [1, 22, 333]}  # größer als é\n日本語の文章は、空白がない。🙂👩‍👩‍👧‍👦\n"
)
LONG_TEXTS = {
    "prose": PROSE * 9,
    "one line": PROSE.replace("\n", " ") * 9,
    "no blank": "".join(PROSE.split()) * 9,
    "blanks": "a" + " " * 700 + "b" + "\n" * 700 + "c" + " \n" * 300,
    "letters": "acgt" * 400,
}


@pytest.mark.parametrize("kind", ["byte level", "smollm2", "always", "first"])
@pytest.mark.parametrize("name", LONG_TEXTS)
def test_the_parts_of_a_long_text_are_decoded_to_it(tiny_tokenizer, smollm2, sentencepiece, monkeypatch, kind, name):
    text, size = LONG_TEXTS[name], 200
    theirs = {"byte level": tiny_tokenizer, "smollm2": smollm2}.get(kind)
    theirs = theirs or sentencepiece(kind, ["▁a", "▁t", "he"])
    serialised = theirs.backend_tokenizer.to_str()
    tokenizer, whole = rust_tokenizer(serialised), encode_text(serialised, text)
    monkeypatch.setattr(tokenize, "LONG", size)
    ids = encode_text(serialised, text)
    assert tokenizer.decode(ids) == tokenizer.decode(whole) == text
    # Only around the cuts are there other tokens than those of one call.
    assert len(text) > 2 * size and len(ids) - len(whole) <= 2 * (text.count("\n") + len(text) // size)


def test_the_ends_of_a_long_text_are_marked_once(bos_tokenizer, monkeypatch):
    whole = encode(bos_tokenizer, PROSE * 9)
    monkeypatch.setattr(tokenize, "LONG", 200)
    ids = encode(bos_tokenizer, PROSE * 9).tolist()
    assert ids[0] == bos_tokenizer.bos_token_id and ids[-1] == bos_tokenizer.eos_token_id
    assert bos_tokenizer.decode(ids) == bos_tokenizer.decode(whole.tolist())
