"""What a record holds for us: a text, a conversation in one of two forms, or ids of another tokenizer.

A form takes a record (fields by name) to documents; what it cannot use it refuses as `Unusable`. Not here: where
records stand (sources.py, records.py), tokens of the target (tokenize.py, chat.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from longdraft.data_prep.documents import Conversation, Document, Unusable, check_messages, messages_digest
from longdraft.data_prep.settings import Source, fields_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_FIELD = "text"


class RecordFormat(Protocol):
    """How a record is read. fields: those that it needs. named_by: what names them, for messages."""

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def named_by(self) -> str: ...

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        """Raises Unusable."""
        ...


@dataclass(frozen=True)
class TextFormat:
    """One field is the text."""

    text_field: str = TEXT_FIELD
    named_by = "--text-field (in a recipe text_field) names the field of the text"

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.text_field,)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        text = _text(record, self.text_field)
        return [Document(name, hashlib.sha256(text.encode()).digest(), text)]


@dataclass(frozen=True)
class ChatFormat:
    """One field is the list of messages; answered: at least one of them must be the assistant's."""

    chat_field: str
    answered: bool = True
    named_by = "--chat-field (in a recipe chat_field) names the field of the messages"

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.chat_field,)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        messages = check_messages(_present(record, self.chat_field), self.answered)
        return [Conversation(name, messages_digest(messages), messages)]


@dataclass(frozen=True)
class QuestionAnswerFormat:
    """Texts with fields in braces make a question and its answer."""

    prompt: str
    answer: str
    named_by = "prompt and answer of the recipe name the fields in braces"

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(fields_of(self.prompt, "prompt") + fields_of(self.answer, "answer")))

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        texts = {field: _text(record, field) for field in self.fields}
        roles = (("user", self.prompt), ("assistant", self.answer))
        messages = check_messages([{"role": role, "content": text.format_map(texts)} for role, text in roles])
        return [Conversation(name, messages_digest(messages), messages)]


@dataclass(frozen=True)
class TokenIdsFormat:
    """Ids of another tokenizer, turned back to text, without its special tokens; a document a span.

    Where a span begins or ends within a character (sets are cut to a length in tokens), what is left of it goes too.
    serialised: the Rust tokenizer that made the ids.
    """

    tokens_field: str
    spans_field: str | None
    serialised: str = field(repr=False)
    named_by = "tokens_field and spans_field of the recipe name the fields of the ids"

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.tokens_field,) if self.spans_field is None else (self.tokens_field, self.spans_field)

    def documents(self, name: str, record: Mapping[str, Any]) -> Sequence[Document | Conversation]:
        ids = _integers(_present(record, self.tokens_field))
        if ids.ndim != 1 or (ids < 0).any() or (ids >= self._size).any():
            raise Unusable("not_token_ids")
        spans = np.array([[0, len(ids)]])
        if self.spans_field is not None:
            spans = _integers(_present(record, self.spans_field), "not_spans")
            if spans.ndim != 2 or spans.shape[1] != 2 or (np.diff(spans, axis=1) < 0).any():
                raise Unusable("not_spans")
            if (spans < 0).any() or (spans > len(ids)).any():
                raise Unusable("not_spans")
        found = []
        for number, (begin, end) in enumerate(spans.tolist(), start=1):
            text = self._tokenizer.decode(ids[begin:end].tolist(), skip_special_tokens=True).strip("\ufffd")
            if text:
                digest = hashlib.sha256(text.encode()).digest()
                found.append(Document(name if len(spans) == 1 else f"{name}.{number}", digest, text))
        if not found:
            raise Unusable("empty")
        return found

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.serialised)

    @cached_property
    def _size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __getstate__(self) -> dict:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}


def record_format_of(source: Source, tokenizers: "Mapping[str, PreTrainedTokenizerFast]") -> RecordFormat:
    """The form of a source's records. tokenizers: by name, those that sources of token ids name."""
    if source.chat_field is not None:
        return ChatFormat(source.chat_field)
    if source.prompt is not None:
        assert source.answer is not None
        return QuestionAnswerFormat(source.prompt, source.answer)
    if source.tokens_field is not None:
        assert source.tokenizer is not None
        tokenizer = tokenizers[source.tokenizer]
        if not tokenizer.is_fast:
            raise ValueError(f"tokenizer {source.tokenizer!r} of {source.path} has no Rust form; name a fast one")
        return TokenIdsFormat(source.tokens_field, source.spans_field, tokenizer.backend_tokenizer.to_str())
    return TextFormat(source.text_field or TEXT_FIELD)


def _present(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise Unusable("missing_field", field=name)
    if isinstance(record[name], bytes):
        raise Unusable("bad_utf8")
    return record[name]


def _text(record: Mapping[str, Any], name: str) -> str:
    text = _present(record, name)
    if not isinstance(text, str):
        raise Unusable("field_not_text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        raise Unusable("bad_utf8") from None
    if not text:
        raise Unusable("empty")
    return text


def _integers(value: Any, why: str = "not_token_ids") -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise Unusable(why) from None
    if array.dtype.kind not in "iu":
        raise Unusable(why if array.size else "empty")
    return array.astype(np.int64)
