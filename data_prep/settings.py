"""The settings of a preparation, with their checks. launch/prepare.py makes them from a YAML file or arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from longdraft.data_prep.pack import MODES
from longdraft.models.files import from_home

MOST_SEQ_LEN = 1 << 24  # a row of 64 MiB, with as many tokens as the largest shard has bytes of text


@dataclass(frozen=True)
class Source:
    """One source of a mix: where it is, which of its files to take, and how to read a record.

    path: a file, a folder, "stdlib", "stdlib-chat", or a data set of the Hugging Face hub, "owner/name[@revision]".
    files: patterns of file names within it ("data/train-*"); () takes every file with a known suffix.
    config, split: a data set's configuration and split by the rules of `datasets` (hub.py), instead of `files`. None
    means the default configuration, and all splits.

    How a record (a JSONL line, a row of a table, a sample of MDS) is read, one of:
      text_field: the field that holds a text; the loss counts every token;
      chat_field: the field that holds a list of messages; the loss counts the answers;
      prompt, answer: two templates with fields in braces ("Summarise:\\n\\n{report}"), a conversation with one answer;
      tokens_field: the field that holds token ids of the model `tokenizer`, which are turned back into text.
        spans_field: the field with (start, stop) of each document among them; None: they are one document.

    share: fraction of the documents to take, chosen by hash. weight: the source's part of `PrepareConfig.max_tokens`,
    relative to the other sources' weights; None for all sources takes documents as they come. streaming: read what is
    needed of a data set of the hub without storing its files.
    """

    path: str
    files: tuple[str, ...] = ()
    text_field: str | None = None
    chat_field: str | None = None
    prompt: str | None = None
    answer: str | None = None
    tokens_field: str | None = None
    spans_field: str | None = None
    tokenizer: str | None = None
    share: float = 1.0
    weight: float | None = None
    streaming: bool = False
    config: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", from_home(self.path))
        if (self.prompt is None) != (self.answer is None):
            raise ValueError(f"prompt and answer of {self.path} belong together, and one of them is missing")
        formats = {"text_field": self.text_field, "chat_field": self.chat_field, "prompt and answer": self.prompt}
        formats["tokens_field"] = self.tokens_field
        if len(given := [name for name, value in formats.items() if value is not None]) > 1:
            raise ValueError(f"{', '.join(given)} are given for {self.path}; a record is read in one way, leave one")
        if (self.tokens_field is None) != (self.tokenizer is None):
            raise ValueError(f"tokens_field and tokenizer of {self.path} belong together, and one of them is missing")
        if self.spans_field is not None and self.tokens_field is None:
            raise ValueError(f"spans_field of {self.path} goes with tokens_field, which is not given")
        if self.files and (self.config, self.split) != (None, None):
            raise ValueError(f"files and config or split are given for {self.path}; each chooses the files, leave one")
        if not 0 < self.share <= 1:
            raise ValueError(f"share of {self.path} is {self.share!r}, valid: above 0, up to 1")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight of {self.path} is {self.weight!r}, valid: above 0, or leave the source out")
        for name, text in (("prompt", self.prompt), ("answer", self.answer)):
            if text is not None and not fields_of(text, name):
                raise ValueError(f"{name} of {self.path} names no field in braces: {text!r}")

    @property
    def field_named(self) -> str | None:
        """The name of the setting that says how records are read; None if the source has none."""
        fields = ("text_field", "chat_field", "prompt", "tokens_field")
        return next((name for name in fields if getattr(self, name) is not None), None)

    @property
    def is_chat(self) -> bool:
        """Whether the settings say that records are conversations."""
        return self.chat_field is not None or self.prompt is not None

    def describe(self) -> dict:
        """The settings that decide the source's content, apart from its files. Those that are not set are left out."""
        skipped = {"path", "streaming"}
        values = {name: value for name, value in vars(self).items() if name not in skipped and value not in (None, ())}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def fields_of(text: str, what: str) -> tuple[str, ...]:
    """The fields that a template names in braces, each once, in order. Raises ValueError for any other brace.

    what: the template's own name, for the message."""
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}; a brace that names no field is written twice") from error
    names = [name for _, name, form, conversion in parsed if name is not None and not form and not conversion]
    plain = [name for name in names if name and not set(name) & set(".[")]
    if len(plain) < sum(name is not None for _, name, _, _ in parsed):
        raise ValueError(f"{what} {text!r}: write a field as {{name}} alone, and any other brace twice")
    return tuple(dict.fromkeys(names))


def same_way(paths: Sequence[str], **fields: object) -> dict[str, Source]:
    """Sources that are all read with the same settings, by the last part of their paths (numbered if it repeats)."""
    sources: dict[str, Source] = {}
    for path in dict.fromkeys(paths):
        name = stem = Path(path).name or path
        while name in sources:
            name = f"{stem}-{len(sources) + 1}"
        sources[name] = Source(path, **fields)  # pyright: ignore[reportArgumentType]
    return sources


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare. Everything except `workers`, `max_bad_share` and `overwrite` decides the content of the shards.

    sources: by name. out: the folder to make; {address} in it is replaced by the plan's address (plan.py). seq_len:
    tokens of a row. documents: "pack" or "first" (see pack.py). chat_template: a Jinja file, "plain" (chat.py), or None
    for the tokenizer's own. heldout_share: fraction of the documents that are held out. max_tokens: of both splits
    together, without filler; text that it leaves unread is not counted as left out. max_bad_share: the fraction of the
    documents seen that may be bad; above it the folder is not finished. shard_bytes: text of a shard; None: it
    follows from the size of the sources.
    """

    sources: dict[str, Source]
    out: Path
    seq_len: int
    documents: str = "pack"
    chat_template: Path | None = None
    heldout_share: float = 0.05
    max_tokens: int | None = None
    max_bad_share: float = 0.01
    seed: int = 0
    workers: int = 1
    shard_bytes: int | None = None
    overwrite: bool = False

    def budget_of(self, source: int) -> int:
        """The number of a source's budget: each source has its own if they have weights, else all share budget 0."""
        first = next(iter(self.sources.values()))  # all sources have a weight, or none has
        return 0 if first.weight is None else source

    def __post_init__(self) -> None:
        checks = [
            ("seq_len", self.seq_len >= 2, "at least 2"),
            ("seq_len", self.seq_len <= MOST_SEQ_LEN, f"at most {MOST_SEQ_LEN}"),
            ("documents", self.documents in MODES, f"one of {', '.join(MODES)}"),
            ("heldout_share", 0 <= self.heldout_share < 1, "at least 0 and below 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("max_bad_share", 0 <= self.max_bad_share <= 1, "0 to 1"),
            ("workers", self.workers >= 1, "at least 1"),
            ("shard_bytes", self.shard_bytes is None or self.shard_bytes >= 1, "at least 1"),
        ]
        for name, good, valid in checks:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)!r}, valid: {valid}")
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            without = [name for name in self.sources if name not in weighted]
            raise ValueError(f"weight is missing for {', '.join(without)}; give it to every source or to none")
        if weighted and self.max_tokens is None:
            raise ValueError(
                "max_tokens is not given, and weights share it out: say how many tokens the mix is to have"
            )
