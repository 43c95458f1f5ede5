"""Text to token ids, in a form that worker processes can be handed.

Uses the Rust tokenizer inside a transformers tokenizer, so that a worker needs neither transformers nor torch. It reads
no files and cuts nothing to length; conversations are in chat.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from longdraft.data_prep import windows
from longdraft.data_prep.documents import Conversation, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Encoded:
    """Tokens that belong together: int32 [n]. spans: (start, stop) of each run of them that the loss counts."""

    name: str
    tokens: np.ndarray
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Encoder:
    """Token ids of whole documents.

    serialised: the Rust tokenizer as JSON, which other processes can be handed. bos_ids: what the tokenizer itself sets
    before a text, () where it sets nothing. eos_id: set behind a document if ends_documents.
    """

    serialised: str
    vocab_size: int
    bos_ids: tuple[int, ...]
    eos_id: int
    ends_documents: bool

    def describe(self) -> dict:
        """For plan and manifest: all that decides the tokens, but for the tokenizer's own hash."""
        return {
            "vocab_size": self.vocab_size,
            "bos_token_ids": list(self.bos_ids),
            "eos_token_id": self.eos_id,
            "documents_end_with_eos": self.ends_documents,
        }

    def encode_document(self, document: Document | Conversation) -> list[Encoded]:
        """The text as one sequence, of which every token counts."""
        assert isinstance(document, Document), document.name
        tokens = self.encode(document.text)
        return [Encoded(document.name, tokens, ((0, len(tokens)),))]

    def encode(self, text: str) -> np.ndarray:
        """int32 [n]: BOS as the tokenizer has it, the text, and EOS where `ends_documents`.

        Special tokens spelled out in the text ("<|im_end|>" in a source file) are taken as plain text: only the end of
        a document gives the id that ends a document.
        """
        tokenizer = rust_tokenizer(self.serialised)
        if len(text) <= windows.LONG:
            # encode_batch_fast is encode without character offsets; measured a quarter faster.
            ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            pieces = windows.WindowedTokenizer(tokenizer).encode(text, lambda kept: kept.ids.astype(np.int32))
            ids = np.concatenate(pieces)
        n_before, n_behind = len(self.bos_ids), int(self.ends_documents)
        tokens = np.full(n_before + len(ids) + n_behind, self.eos_id, dtype=np.int32)
        tokens[:n_before] = self.bos_ids
        tokens[n_before : n_before + len(ids)] = ids
        return tokens


@lru_cache(maxsize=8)  # reading a tokenizer takes about a second
def rust_tokenizer(serialised: str) -> Tokenizer:
    """The Rust tokenizer that this JSON spells. It cuts and pads nothing, and takes special tokens in texts as text."""
    tokenizer = Tokenizer.from_str(serialised)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def make_encoder(tokenizer: "PreTrainedTokenizerFast", ends_documents: bool) -> Encoder:
    """From a loaded transformers tokenizer. Raises ValueError where it has no Rust form or no EOS token."""
    eos_id, bos_id = checked_eos(tokenizer), tokenizer.bos_token_id
    bos_ids = (bos_id,) if isinstance(bos_id, int) and tokenizer("a")["input_ids"][0] == bos_id else ()
    return Encoder(tokenizer.backend_tokenizer.to_str(), len(tokenizer), bos_ids, eos_id, ends_documents)


def checked_eos(tokenizer: "PreTrainedTokenizerFast") -> int:
    """The EOS token's id. Raises ValueError where the tokenizer has none or no Rust form."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no Rust form (is_fast is False); load a fast tokenizer")
    eos_id = tokenizer.eos_token_id
    if not isinstance(eos_id, int):
        raise ValueError("the tokenizer has no EOS token, so documents would run into one another; set its eos_token")
    return eos_id
