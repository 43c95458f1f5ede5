"""The configuration of a preparation: its sources, how their records are read, and its settings."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from longdraft.models.files import from_home
from longdraft.models.schema import Bool, Float, Int, Schema, Str

STDLIB, STDLIB_CHAT = "stdlib", "stdlib-chat"  # the sources that every machine has
WAYS_TO_READ = ("text_field", "chat_field", "prompt", "tokens_field", "target_tokens_field")


def fields_of(template: str) -> tuple[str, ...]:
    """The fields that a template names in braces, in order and without repetitions. Raises ValueError for any other
    brace, and for a template without fields."""
    names = dict.fromkeys(re.findall(r"{(\w+)}", template.replace("{{", "").replace("}}", "")), "")
    try:
        template.format_map(names)
    except (ValueError, LookupError):
        names = {}
    if not names:
        raise ValueError(f"{template!r}: name at least one field as {{field}}, and write any other brace twice")
    return tuple(names)


Template = Annotated[Str, AfterValidator(lambda template: fields_of(template) and template)]


class Source(Schema):
    """One source of a mix: where it is, which of its files to read, and how to read a record.

    path: a file, a folder, "stdlib", "stdlib-chat", or a data set of the Hugging Face hub, "owner/name[@revision]".
    files: patterns of file names within it ("data/train-*"); () selects every file with a known suffix.

    How a record (a JSONL line, a table row, an MDS sample) is read, one of:
      text_field: the field that holds a text; the loss counts every token;
      chat_field: the field that holds a list of messages; the loss counts the answers;
      prompt, answer: two templates with fields in braces ("Summarise:\\n\\n{report}"), a conversation with one answer;
      tokens_field: the field that holds token ids of the model `tokenizer`, which are turned back into text.
        spans_field: the field with (start, stop) of each document among the ids; None: all ids are one document;
      target_tokens_field, loss_field: the field that holds token ids of the target, which become a sequence as they
        are, and the field with (start, stop) of each span of these that the loss counts.

    weight: the source's part of `PrepareConfig.max_tokens`, relative to the other sources' weights. streaming: read
    only the needed parts of a hub data set, without storing its files.
    """

    path: Annotated[Str, Field(min_length=1), AfterValidator(from_home)]
    files: tuple[Str, ...] = ()
    text_field: Str | None = None
    chat_field: Str | None = None
    prompt: Template | None = None
    answer: Template | None = None
    tokens_field: Str | None = None
    spans_field: Str | None = None
    target_tokens_field: Str | None = None
    loss_field: Str | None = None
    tokenizer: Str | None = None
    weight: Annotated[Float, Field(gt=0)] = 1.0
    streaming: Bool = False

    @model_validator(mode="after")
    def _one_way_to_read(self) -> Self:
        given = {name for name, value in self if value is not None}
        if len(ways := [name for name in WAYS_TO_READ if name in given]) > 1:
            raise ValueError(f"{', '.join(ways)} are given for {self.path}; a record is read in one way: keep only one")
        for one, other in (("prompt", "answer"), ("answer", "prompt"), ("tokens_field", "tokenizer"),
                           ("tokenizer", "tokens_field"), ("spans_field", "tokens_field"),
                           ("target_tokens_field", "loss_field"), ("loss_field", "target_tokens_field")):  # fmt: skip
            if one in given and other not in given:
                raise ValueError(f"{one} of {self.path} needs {other}, which is missing")
        return self

    @property
    def field_named(self) -> str | None:
        """The name of the setting that says how records are read; None if the source has none."""
        return next((name for name in WAYS_TO_READ if getattr(self, name) is not None), None)

    @property
    def is_chat(self) -> bool:
        """Whether the source holds conversations."""
        return self.field_named in ("chat_field", "prompt") or self.path == STDLIB_CHAT


class PrepareConfig(Schema):
    """What to prepare. Every field except `out` and `workers` affects the content of the shards.

    sources: by name. out: the folder to make. seq_len: tokens per row. documents: "pack" cuts long documents into rows;
    "first" keeps only the first row of each and drops shorter ones. chat_template: a Jinja file, "plain" (chat.py), or
    None for the tokenizer's own. heldout_share: the fraction of documents that are held out. max_tokens: the limit for
    both splits together, without padding; the document that reaches it is cut.
    """

    sources: Annotated[dict[Str, Source], Field(min_length=1)]
    out: Path
    seq_len: Annotated[Int, Field(ge=2, le=1 << 24)]  # at most 64 MiB
    documents: Literal["pack", "first"] = "pack"
    chat_template: Path | None = None
    heldout_share: Annotated[Float, Field(ge=0, lt=1)] = 0.05
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    seed: Int = 0
    workers: Annotated[Int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _settings_fit_the_sources(self) -> Self:
        check_outside(self.out, (source.path for source in self.sources.values()))
        if self.chat_template is not None and not any(source.is_chat for source in self.sources.values()):
            raise ValueError("chat_template is for conversations; give --chat-field, or omit it")
        if self.max_tokens is None and any(source.weight != 1 for source in self.sources.values()):
            raise ValueError("max_tokens is missing, but weights divide it among the sources; set it")
        return self


def check_outside(out: Path, sources: Iterable[str]) -> None:
    """Raises ValueError if the folder to make lies in a source, since its files would then be read as source files."""
    for source in map(Path, sources):
        if source.is_dir() and out.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"out: {out} lies in the source {source} and would be read with it; choose another")


def same_way(paths: Sequence[str], **fields: Any) -> dict[str, Source]:
    """Sources that share these settings, named by the last part of their paths (numbered if it repeats)."""
    sources: dict[str, Source] = {}
    for path in dict.fromkeys(paths):
        name = stem = Path(path).name or path
        while name in sources:
            name = f"{stem}-{len(sources) + 1}"
        sources[name] = Source(path=path, **fields)
    return sources
