"""Record formats: a record holds a text, a conversation, a question and its answer, or token ids.

A format's `documents` turns the record `name`, a mapping from field names to values, into documents. It raises
`Unusable` or UnicodeError for a record that it cannot use. `fields` are the fields that it reads if a record has them.
records.py reads the records.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.documents import (
    Conversation,
    Document,
    TokenDocument,
    Unusable,
    messages_digest,
    read_messages,
    read_options,
    read_tools,
)
from longdraft.data_prep.recipe import Source, fields_of
from longdraft.data_prep.tokenize import rust_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_FIELD = "text"
UNFINISHED, TOOLS, SYSTEM, OPTIONS = "unfinished", "tools", "system", "chat_template_kwargs"
TOKENIZER = "tokenizer_sha256"


@dataclass(frozen=True)
class TextFormat:
    """One field holds the text."""

    text_field: str = TEXT_FIELD

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.text_field,)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        return [_document(name, _text(record, self.text_field))]


@dataclass(frozen=True)
class ChatFormat:
    """One field holds the list of messages; if there are any, `tools` holds the functions that the assistant may call,
    `system` the text of a system message, and `chat_template_kwargs` further variables for the chat template.
    answered: whether at least one message must be the assistant's.

    A record whose field `unfinished` is true (`longdraft prepare regenerate --unfinished keep`) ends in an answer that
    was cut off."""

    chat_field: str
    answered: bool = True

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.chat_field, UNFINISHED, TOOLS, SYSTEM, OPTIONS)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        system = record.get(SYSTEM)
        system = system if isinstance(system, str) else ""
        messages = read_messages(_present(record, self.chat_field), self.answered, system)
        unfinished = record.get(UNFINISHED) is True and messages[-1]["role"] == "assistant"
        tools, options = read_tools(record.get(TOOLS)), read_options(record.get(OPTIONS))
        return [Conversation(name, messages_digest(messages), messages, unfinished, tools, options)]


@dataclass(frozen=True)
class QuestionAnswerFormat:
    """Two templates with field names in braces make a question and its answer. A field may be empty or null."""

    prompt: str
    answer: str

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fields_of(self.prompt) + fields_of(self.answer)))

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        present = {field: _present(record, field) for field in self.fields}
        texts = {field: "" if value is None else _text(record, field) for field, value in present.items()}
        content = {"user": self.prompt.format_map(texts), "assistant": self.answer.format_map(texts)}
        if not content["user"].strip():
            raise Unusable("empty")
        messages = read_messages([{"role": role, "content": text} for role, text in content.items()])
        return [Conversation(name, messages_digest(messages), messages)]


@dataclass(frozen=True)
class TokenIdsFormat:
    """A field holds token ids of another tokenizer, which are turned back into text, without special tokens.

    Each span (start, stop) of the ids is a document; without a field of spans, all ids are one document. Data sets are
    cut at a number of tokens, so a span may begin or end within a character; the part of that character is omitted.
    serialised: the Rust tokenizer that made the ids, as JSON.
    """

    tokens_field: str
    spans_field: str | None
    serialised: str = field(repr=False)

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.tokens_field,) if self.spans_field is None else (self.tokens_field, self.spans_field)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        tokenizer = rust_tokenizer(self.serialised)
        ids = _integers(_present(record, self.tokens_field), "not_token_ids", (), tokenizer.get_vocab_size() - 1)
        spans = np.array([[0, len(ids)]])
        if self.spans_field is not None:
            spans = _integers(_present(record, self.spans_field), "not_spans", (2,), len(ids))
            if (np.diff(spans) < 0).any():
                raise Unusable("not_spans")
        found = []
        for number, (begin, end) in enumerate(spans.tolist(), start=1):
            text = tokenizer.decode(ids[begin:end].tolist(), skip_special_tokens=True).strip("\ufffd")
            if text:
                found.append(_document(name if len(spans) == 1 else f"{name}.{number}", text))
        if not found:
            raise Unusable("empty")
        return found


@dataclass(frozen=True)
class TargetTokensFormat:
    """One field holds token ids of the target, and another the spans of them that the loss counts, in order. If a
    record names a tokenizer by its hash in `tokenizer_sha256`, it must be the target's.

    All records that are equal up to their first span are in one split: other answers to the same prompt, for example.
    """

    tokens_field: str
    loss_field: str
    vocab_size: int
    tokenizer_hash: str

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.tokens_field, self.loss_field, TOKENIZER)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[TokenDocument]:
        if record.get(TOKENIZER) not in (None, self.tokenizer_hash):
            raise Unusable("other_tokenizer", "has token ids of another tokenizer than the target's")
        ids = _integers(_present(record, self.tokens_field), "not_token_ids", (), self.vocab_size - 1)
        spans = _integers(_present(record, self.loss_field), "not_spans", (2,), len(ids))
        lengths = np.diff(spans.ravel())  # of the spans and what is between them
        if lengths.min() < 0 or not lengths[::2].all():
            raise Unusable("not_spans")
        tokens = ids.astype(np.int32)
        digest = hashlib.sha256(tokens[: int(spans[0, 0]) or None].tobytes()).digest()
        return [TokenDocument(name, digest, tokens, tuple(map(tuple, spans.tolist())))]


RecordFormat = TextFormat | ChatFormat | QuestionAnswerFormat | TokenIdsFormat | TargetTokensFormat


def record_format_of(
    source: Source,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
    vocab_size: int,
    tokenizer_hash: str,
) -> RecordFormat:
    """The format of a source's records. tokenizers: by name, the tokenizers that sources of token ids refer to.
    vocab_size, tokenizer_hash: of the target's tokenizer."""
    if source.chat_field is not None:
        return ChatFormat(source.chat_field)
    if source.prompt is not None and source.answer is not None:
        return QuestionAnswerFormat(source.prompt, source.answer)
    if source.tokens_field is not None and source.tokenizer is not None:
        serialised = tokenizers[source.tokenizer].backend_tokenizer.to_str()
        return TokenIdsFormat(source.tokens_field, source.spans_field, serialised)
    if source.target_tokens_field is not None and source.loss_field is not None:
        return TargetTokensFormat(source.target_tokens_field, source.loss_field, vocab_size, tokenizer_hash)
    return TextFormat(TEXT_FIELD if source.text_field is None else source.text_field)


def _document(name: str, text: str) -> Document:
    if not text:
        raise Unusable("empty")
    return Document(name, hashlib.sha256(text.encode()).digest(), text)


def _present(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        remedy = "name the right one (--text-field or --chat-field; in a recipe text_field, chat_field, prompt, ...)"
        raise Unusable("missing_field", f"has no field {name!r} but {list(record)[:20]}; {remedy}")
    value = record[name]
    # A text file, an MDS shard or a table without a type for texts gives bytes.
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _text(record: Mapping[str, Any], name: str) -> str:
    text = _present(record, name)
    if not isinstance(text, str):
        raise Unusable("field_not_text")
    return text


def _integers(value: Any, why: str, columns: tuple[int, ...], most: int) -> np.ndarray:
    """The value as int64 [n, *columns], from 0 to `most`. Raises Unusable(why) if it is something else."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.zeros(0)
    fits = array.dtype.kind in "iu" and array.ndim and array.size and array.shape[1:] == columns
    if not fits or array.min() < 0 or array.max() > most:
        raise Unusable(why)
    return array.astype(np.int64)
