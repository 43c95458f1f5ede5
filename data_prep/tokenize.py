"""Turns text into token ids, with an encoder that can be pickled for worker processes. chat.py handles conversations.

It uses the Rust tokenizer inside a transformers tokenizer, so that a worker needs neither transformers nor torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from longdraft.data_prep.documents import Conversation, Document, TokenDocument

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The most characters in one call of the Rust tokenizer, which holds over a hundred bytes for each of them.
LONG = 1 << 21


@dataclass(frozen=True)
class Encoded:
    """A sequence of tokens, int32 [n]. spans: (start, stop) of each span of tokens that the loss counts."""

    name: str
    tokens: np.ndarray
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoder:
    """Turns whole documents into token ids.

    serialised: the Rust tokenizer as JSON. bos_ids: the ids that the tokenizer puts before a text, () if none.
    eos_id: appended to each document if `ends_documents`.
    """

    serialised: str
    vocab_size: int
    bos_ids: tuple[int, ...]
    eos_id: int
    ends_documents: bool

    def describe(self) -> dict:
        """The settings that affect the tokens, besides the tokenizer's own hash, for plan and manifest."""
        return {
            "vocab_size": self.vocab_size,
            "bos_token_ids": list(self.bos_ids),
            "eos_token_id": self.eos_id,
            "documents_end_with_eos": self.ends_documents,
        }

    def encode_document(self, document: Document | Conversation | TokenDocument) -> list[Encoded]:
        """The text as one sequence: `bos_ids`, the text, and EOS if `ends_documents`. The loss counts every token.
        Token ids are a sequence as they are.

        Special tokens spelled out in the text ("<|im_end|>" in a source file) are plain text: the EOS id
        stands only at the end of a document.
        """
        if isinstance(document, TokenDocument):
            return [Encoded(document.name, document.tokens, document.spans)]
        assert isinstance(document, Document), document.name
        text = encode_text(self.serialised, document.text)
        tokens = np.array([*self.bos_ids, *text, *([self.eos_id] if self.ends_documents else [])], dtype=np.int32)
        return [Encoded(document.name, tokens, ((0, len(tokens)),))]


def encode_text(serialised: str, text: str) -> list[int]:
    """Token ids of a text, tokenised in parts of at most LONG characters: decoded and joined, the parts are the text.

    A part ends after a line end if possible, so that at most one token is cut. Each part after the first is tokenised
    with a line end before it, whose tokens are then dropped, because some tokenizers put a blank before the beginning
    of a text.
    """
    tokenizer = rust_tokenizer(serialised)
    if len(text) <= LONG:
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    ids, begin = list[int](), 0
    while begin < len(text):
        end = begin + LONG
        if end < len(text):
            end = text.rfind("\n", begin, end) + 1 or end
        for lead in ("\n", "") if begin else ("",):
            encoding = tokenizer.encode(lead + text[begin:end], add_special_tokens=False)
            places = list(zip(encoding.ids, encoding.offsets, strict=True))
            if not any(start < len(lead) < stop for _, (start, stop) in places):
                break  # no token holds both the line end and characters of the part
        ids += [token for token, (_, stop) in places if stop > len(lead)]
        begin = end
    return ids


@lru_cache(maxsize=8)  # reading a tokenizer takes about a second
def rust_tokenizer(serialised: str) -> Tokenizer:
    """The Rust tokenizer of this JSON. It neither truncates nor pads, and treats special tokens in a text as text."""
    tokenizer = Tokenizer.from_str(serialised)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def make_encoder(tokenizer: "PreTrainedTokenizerFast", ends_documents: bool) -> Encoder:
    """The encoder for a loaded transformers tokenizer. Raises ValueError if it has no EOS token or no Rust form."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no Rust form (is_fast is False); load a fast tokenizer")
    bos_id, eos_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise ValueError("the tokenizer has no EOS token, so documents would run into one another; set its eos_token")
    bos_ids = (bos_id,) if isinstance(bos_id, int) and tokenizer("a")["input_ids"][0] == bos_id else ()
    return Encoder(tokenizer.backend_tokenizer.to_str(), len(tokenizer), bos_ids, eos_id, ends_documents)
