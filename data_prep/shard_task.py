"""One task of a preparation: reads, tokenises and packs some segments of the sources, and writes them as shards.

The shards depend on the task and the settings alone, not on the process that makes them, or when. prepare.py decides
what the tasks are.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.formats import RecordFormat, record_format_of
from longdraft.data_prep.pack import MODES, Piece
from longdraft.data_prep.recipe import PrepareConfig
from longdraft.data_prep.records import Segment, read_documents
from longdraft.data_prep.shards import SPLITS, Row, write_shard
from longdraft.data_prep.sources import STDLIB_CHAT, SourceFile
from longdraft.data_prep.tasks import NAMED_BAD, add_up
from longdraft.data_prep.tokenize import LONG, Encoded, Encoder, make_encoder
from longdraft.models.files import WorkFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# The fields of a task's record and of a split's manifest, with their values for no documents. hints: for each reason
# why documents are bad, what is wrong with one of them. in_parts: texts too long for one call of the tokenizer.
COUNTS = ("rows", "tokens", "supervised_tokens", "documents", "split_by_turn", "in_parts", "pieces", "text_bytes")
EMPTY_RECORD: dict[str, Any] = dict.fromkeys(COUNTS, 0)
EMPTY_RECORD |= {"mix": {}, "bad": {}, "bad_named": [], "dropped": {}, "hints": {}, "shards": []}


@dataclass(frozen=True)
class Reader:
    """How a source's documents become tokens. kept: the fraction of its documents to keep, chosen by their hash."""

    name: str
    record_format: RecordFormat
    encoder: Encoder | ChatEncoder
    kept: float


@dataclass(frozen=True)
class ShardTask:
    """The documents of `split` in these segments.

    They become one shard, or several if they lie in files whose text is not known before it is read: a shard then ends
    with the document that reaches `shard_bytes` of text.

    budgets: the most tokens that this task takes of each budget; None: no limit. Once a budget is full, the rest of its
    segments is not read, and so not counted as left out. size: expected bytes of text of its split.
    """

    split: str
    number: int
    segments: tuple[Segment, ...]
    budgets: tuple[int | None, ...]
    size: int
    shard_bytes: int

    @property
    def name(self) -> str:
        return task_name(self.split, self.number)


@dataclass(frozen=True)
class KeptDocument:
    """A document whose tokens go into rows. source: the name of its source. n_tokens: how many tokens go there."""

    source: str
    n_bytes: int
    n_tokens: int
    is_long: bool
    encoded: list[Encoded]


def task_name(split: str, number: int) -> str:
    """The name of the task that makes shard `number` of the split."""
    return f"{split}-{number:05d}"


def make_readers(
    config: PrepareConfig,
    files: Sequence[SourceFile],
    kept: Sequence[float],
    tokenizer: "PreTrainedTokenizerFast",
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """A reader for each source. kept, tokenizers: see `Reader` and `record_format_of`.

    Raises ValueError if a source's files do not fit the settings that say how to read them."""
    is_chat = [source.is_chat or source.path == STDLIB_CHAT for source in config.sources.values()]
    for number, source in enumerate(config.sources.values()):
        texts = [file.name for file in files if file.source == number and file.kind in ("text", "docstrings")]
        if source.field_named and texts:
            raise ValueError(
                f"source {source.path!r} names {source.field_named}, and {len(texts)} of its files hold no records "
                f"(first: {texts[0]}); leave it out, or name files of records (--files '*.jsonl')"
            )
    if config.chat_template is not None and not any(is_chat):
        raise ValueError("chat_template is for conversations, and there are none; give --chat-field, or leave it out")
    if config.documents != "pack" and any(is_chat):
        raise ValueError(f"documents is {config.documents!r}, which cuts answers off; conversations take 'pack'")
    chat = ChatEncoder(tokenizer, _template(config.chat_template)) if any(is_chat) else None
    text = None if all(is_chat) else make_encoder(tokenizer, ends_documents=config.documents == "pack")
    readers = []
    for number, (name, source) in enumerate(config.sources.items()):
        encoder = chat if is_chat[number] else text
        assert encoder is not None
        readers.append(Reader(name, record_format_of(source, tokenizers), encoder, kept[number]))
    return readers


def _template(path: Path | None) -> str | None:
    if path is None or str(path) == PLAIN:
        return None if path is None else PLAIN
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template: {path} cannot be read ({error}); give a Jinja file, or {PLAIN} for texts that the target "
            "has continued"
        ) from error


def make_shards_of(task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder) -> None:
    """Write the task's shards, none if it has no row, and then its record."""
    left_out = {"bad": Counter(), "bad_named": [], "dropped": Counter(), "hints": {}}
    records = []
    for documents in _kept_documents(task, config, readers, left_out):
        part = f"-{len(records):03d}" if records else ""
        path = config.out / task.split / f"shard-{task.number:05d}{part}.arrow"
        records.append(_write(path, documents, config, readers))
    record = add_up([EMPTY_RECORD, *records, left_out])
    folder.write(task.name, record, [config.out / task.split / shard["file"] for shard in record["shards"]])


def _write(path: Path, kept: Sequence[KeptDocument], config: PrepareConfig, readers: Sequence[Reader]) -> dict:
    """Pack the documents into a shard, unless they make no row. Returns its counts."""
    sequences = [sequence for document in kept for sequence in document.encoded]
    packed = MODES[config.documents]([len(sequence.tokens) for sequence in sequences], config.seq_len)
    rows = [_make_row(pieces, sequences) for pieces in packed]
    mix: dict[str, dict] = {}
    for document in kept:
        of_source = mix.setdefault(document.source, {"documents": 0, "tokens": 0})
        of_source["documents"] += 1
        of_source["tokens"] += document.n_tokens
    if rows:
        path.parent.mkdir(exist_ok=True)
    return {
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "supervised_tokens": sum(sum(row.loss_spans[1::2]) - sum(row.loss_spans[::2]) for row in rows),
        "documents": len(kept),
        "split_by_turn": sum(len(document.encoded) > 1 for document in kept),
        "in_parts": sum(document.is_long for document in kept),
        "pieces": sum(len(pieces) for pieces in packed),
        "text_bytes": sum(document.n_bytes for document in kept),
        "mix": mix,
        "shards": [write_shard(path, rows, config.seq_len, fill_id=readers[0].encoder.eos_id)] if rows else [],
    }


def _kept_documents(
    task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], left_out: dict[str, Any]
) -> Iterator[list[KeptDocument]]:
    """The documents of each shard. left_out: counts what is bad or dropped, with the fields of EMPTY_RECORD."""
    kept, n_bytes = list[KeptDocument](), 0
    room = [math.inf if budget is None else budget for budget in task.budgets]  # tokens left in each budget
    for segment in task.segments:
        source = segment.file.source
        budget, reader = config.budget_of(source), readers[source]
        # With no more room than this, looking for a document that still fits is not worth it.
        full_at = config.seq_len - 1 if config.documents == "first" else (task.budgets[budget] or 0) // 50
        documents = read_documents(segment, reader.record_format)
        while room[budget] > full_at and (document := next(documents, None)) is not None:
            if not _is_wanted(document, task.split, config, reader.kept):
                continue
            try:
                if isinstance(document, BadDocument):
                    raise Unusable(document.why, document.detail)
                encoded = reader.encoder.encode_document(document)
            except Unusable as error:
                _count_bad(document.name, error, left_out)
                continue
            length = sum(len(sequence.tokens) for sequence in encoded)
            cost = config.seq_len if config.documents == "first" else length
            if length < cost:
                left_out["dropped"]["shorter_than_seq_len"] += 1
            elif cost > room[budget]:
                left_out["dropped"]["beyond_max_tokens"] += 1  # a shorter one may still fit
            else:
                is_long = isinstance(document, Document) and len(document.text) > LONG
                kept.append(KeptDocument(reader.name, document.n_bytes, cost, is_long, encoded))
                room[budget], n_bytes = room[budget] - cost, n_bytes + document.n_bytes
            if segment.n_documents is None and n_bytes >= task.shard_bytes:
                yield kept
                kept, n_bytes = [], 0
    yield kept


def _count_bad(name: str, error: Unusable, left_out: dict[str, Any]) -> None:
    left_out["bad"][error.why] += 1
    if len(left_out["bad_named"]) < NAMED_BAD:
        left_out["bad_named"].append({"document": name, "why": error.why})
    if error.detail:  # reasons that say everything themselves have none
        left_out["hints"].setdefault(error.why, f"{name} {error.detail}")


def _is_wanted(document: Document | Conversation | BadDocument, split: str, config: PrepareConfig, kept: float) -> bool:
    """Whether the document belongs to this split and to the fraction of documents that is kept."""
    if kept < 1 and uniform(config.seed, b"share:" + document.digest) >= kept:
        return False
    # The text's hash decides, so all copies of a document are always in the same split.
    heldout = uniform(config.seed, document.digest) < config.heldout_share
    return SPLITS[heldout] == split


def _make_row(pieces: Sequence[Piece], sequences: Sequence[Encoded]) -> Row:
    """The row that these pieces make, with their spans moved to the row's places and joined where they touch."""
    tokens = [sequences[piece.document].tokens[piece.start : piece.stop] for piece in pieces]
    borders = [0, *np.cumsum([len(run) for run in tokens]).tolist()]
    loss_spans: list[int] = []
    for piece, border in zip(pieces, borders, strict=False):  # borders has one entry more, the end of the row
        for begin, end in sequences[piece.document].spans:
            begin, end = (border + min(max(place, piece.start), piece.stop) - piece.start for place in (begin, end))
            if begin == end:
                continue
            if loss_spans and loss_spans[-1] == begin:
                loss_spans[-1] = end
            else:
                loss_spans += [begin, end]
    return Row(
        tokens=np.concatenate(tokens),
        borders=borders,
        loss_spans=loss_spans,
        documents=[sequences[piece.document].name for piece in pieces],
        pieces=[piece.number for piece in pieces],
    )


def uniform(seed: int, key: bytes) -> float:
    """A number in [0, 1), uniformly distributed over keys, that depends on the arguments alone."""
    return int.from_bytes(sha256(b"%d:" % seed + key).digest()[:6], "big") / 2**48
