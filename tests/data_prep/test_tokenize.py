import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from longdraft.data_prep.documents import Document
from longdraft.data_prep.segments import read_documents, scan
from longdraft.data_prep.settings import Source
from longdraft.data_prep.sources import list_files
from longdraft.data_prep.tokenize import make_encoder


def test_documents_end_with_eos_and_begin_as_the_tokenizer_says(tiny_tokenizer, bos_tokenizer):
    plain = make_encoder(tiny_tokenizer, ends_documents=True).encode("a ship")
    text_ids = tiny_tokenizer("a ship", add_special_tokens=False)["input_ids"]
    assert plain.dtype == np.int32
    assert plain.tolist() == [*text_ids, tiny_tokenizer.eos_token_id]
    assert make_encoder(tiny_tokenizer, ends_documents=False).encode("a ship").tolist() == text_ids
    encoder = make_encoder(bos_tokenizer, ends_documents=True)
    assert encoder.encode("a ship").tolist() == [bos_tokenizer.bos_token_id, *text_ids, bos_tokenizer.eos_token_id]


def test_spelled_out_special_tokens_are_text(tiny_tokenizer):
    text = "ends <|end|> here, starts <|start|>"
    ids = make_encoder(tiny_tokenizer, ends_documents=False).encode(text).tolist()
    assert not {tiny_tokenizer.eos_token_id, tiny_tokenizer.bos_token_id} & set(ids)
    assert tiny_tokenizer.decode(ids) == text
    # The caller's tokenizer is unchanged.
    assert tiny_tokenizer.eos_token_id in tiny_tokenizer(text)["input_ids"]


def test_call_time_state_of_the_tokenizer_does_not_matter(tiny_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(tiny_tokenizer))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer("x", truncation=True, max_length=4, padding="max_length")
    text = "a longer text than four tokens"
    expected = make_encoder(tiny_tokenizer, ends_documents=True).encode(text)
    assert (make_encoder(tokenizer, ends_documents=True).encode(text) == expected).all()


def test_encoder_survives_pickling(tiny_tokenizer):
    encoder = make_encoder(tiny_tokenizer, ends_documents=True)
    before = encoder.encode("a ship")
    assert (pickle.loads(pickle.dumps(encoder)).encode("a ship") == before).all()


def test_unusable_tokenizers_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="no Rust form"):
        make_encoder(SimpleNamespace(is_fast=False), ends_documents=True)  # type: ignore[arg-type]
    tokenizer = pickle.loads(pickle.dumps(tiny_tokenizer))
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS"):
        make_encoder(tokenizer, ends_documents=True)


def test_smollm2_gives_the_standard_library_back(smollm2):
    encoder = make_encoder(smollm2, ends_documents=False)
    assert (encoder.bos_ids, encoder.vocab_size) == ((), 49152)
    files = [file for file in list_files([Source("stdlib")]) if "/encodings/" in file.name or "/json/" in file.name]
    for file in files:
        (document,) = read_documents(scan([file], 1 << 20)[1][0])
        assert isinstance(document, Document)
        ids = encoder.encode(document.text).tolist()
        decoded = smollm2.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert decoded.encode() == Path(file.path).read_bytes(), file.name
