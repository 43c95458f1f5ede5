"""How each source's documents are read and turned into tokens, with the checks that the two fit together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longdraft.data_prep.chat import PLAIN, ChatEncoder, make_chat_encoder
from longdraft.data_prep.record_formats import RecordFormat, record_format_of
from longdraft.data_prep.settings import PrepareConfig, Source
from longdraft.data_prep.sources import STDLIB_CHAT, SourceFile
from longdraft.data_prep.tokenize import Encoder, make_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KINDS_WITHOUT_FIELDS = ("text", "docstrings")  # files of these kinds hold no records


@dataclass(frozen=True)
class Reader:
    """How a source's documents become tokens. kept: the fraction of its documents to keep, chosen by their hash."""

    name: str
    record_format: RecordFormat
    encoder: Encoder | ChatEncoder
    kept: float


def make_readers(
    config: PrepareConfig,
    files: Sequence[SourceFile],
    kept: Sequence[float],
    tokenizer: "PreTrainedTokenizerFast",
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """A reader for each source. kept, tokenizers: see `Reader` and `record_format_of`.

    Raises ValueError if a source's files do not fit the settings that say how to read them."""
    is_chat = [_is_chat(source, number, files) for number, source in enumerate(config.sources.values())]
    _check_mix(config, is_chat)
    chat = _chat_encoder(config, tokenizer) if any(is_chat) else None
    text = None if all(is_chat) else make_encoder(tokenizer, ends_documents=config.documents == "pack")
    readers = []
    for number, (name, source) in enumerate(config.sources.items()):
        encoder = chat if is_chat[number] else text
        assert encoder is not None
        readers.append(Reader(name, record_format_of(source, tokenizers), encoder, kept[number]))
    return readers


def _is_chat(source: Source, number: int, files: Sequence[SourceFile]) -> bool:
    """Whether a source holds conversations.

    Raises ValueError if there are text files among them, since every token of these would count, and if a field is
    named for files that hold no records."""
    of_source = [file for file in files if file.source == number]  # none if an earlier source has them all
    text = [file.name for file in of_source if file.kind == "text"]
    if source.is_chat and text:
        raise ValueError(
            f"source {source.path!r} holds {len(text)} files of plain text beside its conversations (first: {text[0]})"
            "; name the files to take (--files '*.jsonl'), and prepare the texts as another source"
        )
    if source.field_named and of_source and all(file.kind in KINDS_WITHOUT_FIELDS for file in of_source):
        raise ValueError(
            f"source {source.path!r} holds no records, so its {source.field_named} would not be read; leave it out, or "
            "name files of records (JSONL, CSV, Parquet, ...)"
        )
    return source.is_chat or source.path == STDLIB_CHAT


def _check_mix(config: PrepareConfig, is_chat: Sequence[bool]) -> None:
    if not any(is_chat):
        if config.chat_template is not None:
            raise ValueError(
                "chat_template is for conversations, and there are none; give --chat-field, or leave it out"
            )
        return
    if config.documents != "pack":
        raise ValueError(f"documents is {config.documents!r}, which cuts answers off; conversations take 'pack'")
    for chats, (name, source) in zip(is_chat, config.sources.items(), strict=True):
        if not chats and source.text_field is None and source.tokens_field is None:
            raise ValueError(
                f"source {name!r} is read as plain text, of which every token counts, beside conversations; name the "
                "field of its conversations (--chat-field), or in a recipe its text_field to mix text in"
            )


def _chat_encoder(config: PrepareConfig, tokenizer: "PreTrainedTokenizerFast") -> ChatEncoder:
    if config.chat_template is None:
        return make_chat_encoder(tokenizer)
    if str(config.chat_template) == PLAIN:
        return make_chat_encoder(tokenizer, PLAIN)
    if not config.chat_template.is_file():
        raise ValueError(
            f"chat_template {str(config.chat_template)!r} does not exist; give a Jinja file, or {PLAIN} for texts that "
            "the target has continued"
        )
    try:
        template = config.chat_template.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {config.chat_template} is no UTF-8 ({error}); convert it") from error
    return make_chat_encoder(tokenizer, template)
