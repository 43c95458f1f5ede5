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
from longdraft.data_prep.sources import SourceFile
from longdraft.data_prep.tasks import NAMED_BAD, add_up
from longdraft.data_prep.tokenize import LONG, Encoded, Encoder, make_encoder
from longdraft.models.files import WorkFolder, damage_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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


def task_name(split: str, number: int) -> str:
    """The name of the task that makes shard `number` of the split."""
    return f"{split}-{number:05d}"


def empty_record() -> dict[str, Any]:
    """The record of a task without documents, which has the fields of a split's manifest and `hints`.

    split_by_turn: conversations of several sequences. in_parts: texts too long for one call of the tokenizer. mix:
    documents and tokens of each source. bad, dropped: documents by reason. hints: for each reason why documents are
    bad, what is wrong with one of them.
    """
    counts = ("rows", "tokens", "supervised_tokens", "documents", "split_by_turn", "in_parts", "pieces", "text_bytes")
    by_reason = {"bad": Counter(), "bad_named": [], "dropped": Counter(), "hints": {}}
    return {**dict.fromkeys(counts, 0), "mix": {}, **by_reason, "shards": []}


def make_readers(
    config: PrepareConfig,
    files: Sequence[SourceFile],
    kept: Sequence[float],
    tokenizer: "PreTrainedTokenizerFast",
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """A reader for each source. kept, tokenizers: see `Reader` and `record_format_of`.

    Raises ValueError if a source's files do not fit the settings that say how to read them."""
    sources = config.sources.values()
    for number, source in enumerate(sources):
        texts = [file.name for file in files if file.source == number and file.kind in ("text", "docstrings")]
        if source.field_named and texts:
            raise ValueError(
                f"source {source.path!r} names {source.field_named}, and {len(texts)} of its files hold no records "
                f"(first: {texts[0]}); leave it out, or name files of records (--files '*.jsonl')"
            )
    encoders: dict[bool, Encoder | ChatEncoder] = {}
    for is_chat in {source.is_chat for source in sources}:
        if is_chat:
            encoders[is_chat] = ChatEncoder(tokenizer, _template(config.chat_template))
        else:
            encoders[is_chat] = make_encoder(tokenizer, ends_documents=config.documents == "pack")
    return [
        Reader(name, record_format_of(source, tokenizers), encoders[source.is_chat], fraction)
        for (name, source), fraction in zip(config.sources.items(), kept, strict=True)
    ]


def _template(path: Path | None) -> str | None:
    if path is None or str(path) == PLAIN:
        return None if path is None else PLAIN
    with damage_named(path, remedy=f"give a Jinja file, or {PLAIN} for texts that the target has continued"):
        return path.read_text(encoding="utf-8")


def make_shards_of(task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder) -> None:
    """Write the task's shards, none if it has no row, and then its record."""
    records = [empty_record()]
    split_folder = config.out / task.split
    for record, sequences in _contents(task, config, readers):
        packed = MODES[config.documents]([len(sequence.tokens) for sequence in sequences], config.seq_len)
        rows = [_make_row(pieces, sequences) for pieces in packed]
        record["rows"], record["pieces"] = len(rows), sum(map(len, packed))
        record["tokens"] = sum(len(row.tokens) for row in rows)
        record["supervised_tokens"] = sum(sum(row.loss_spans[1::2]) - sum(row.loss_spans[::2]) for row in rows)
        if rows:
            split_folder.mkdir(exist_ok=True)
            part = f"-{len(records) - 1:03d}" if len(records) > 1 else ""
            path = split_folder / f"shard-{task.number:05d}{part}.arrow"
            record["shards"] = [write_shard(path, rows, config.seq_len, fill_id=readers[0].encoder.eos_id)]
        records.append(record)
    total = add_up(records)
    folder.write(task.name, total, [split_folder / shard["file"] for shard in total["shards"]])


def _contents(
    task: ShardTask, config: PrepareConfig, readers: Sequence[Reader]
) -> Iterator[tuple[dict[str, Any], list[Encoded]]]:
    """For each shard of the task, its record, in which the documents are counted, and their sequences of tokens."""
    record, sequences = empty_record(), list[Encoded]()
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
                _count_bad(document.name, error, record)
                continue
            length = sum(len(sequence.tokens) for sequence in encoded)
            cost = config.seq_len if config.documents == "first" else length
            if length < cost:
                record["dropped"]["shorter_than_seq_len"] += 1
            elif cost > room[budget]:
                record["dropped"]["beyond_max_tokens"] += 1  # a shorter one may still fit
            else:
                sequences += encoded
                room[budget] -= cost
                record["documents"] += 1
                record["split_by_turn"] += len(encoded) > 1
                record["in_parts"] += isinstance(document, Document) and len(document.text) > LONG
                record["text_bytes"] += document.n_bytes
                record["mix"].setdefault(reader.name, Counter()).update(documents=1, tokens=cost)
            if segment.n_documents is None and record["text_bytes"] >= task.shard_bytes:
                yield record, sequences
                record, sequences = empty_record(), []
    yield record, sequences


def _count_bad(name: str, error: Unusable, record: dict[str, Any]) -> None:
    record["bad"][error.why] += 1
    if len(record["bad_named"]) < NAMED_BAD:
        record["bad_named"].append({"document": name, "why": error.why})
    if error.detail:  # reasons that say everything themselves have none
        record["hints"].setdefault(error.why, f"{name} {error.detail}")


def _is_wanted(document: Document | Conversation | BadDocument, split: str, config: PrepareConfig, kept: float) -> bool:
    """Whether the document belongs to this split and to the fraction of documents that is kept."""
    if kept < 1 and uniform(config.seed, b"share:" + document.digest) >= kept:
        return False
    # The text's hash decides, so all copies of a document are always in the same split.
    heldout = uniform(config.seed, document.digest) < config.heldout_share
    return SPLITS[heldout] == split


def _make_row(pieces: Sequence[Piece], sequences: Sequence[Encoded]) -> Row:
    """The row that these pieces make, with their spans moved to the row's places."""
    tokens = [sequences[piece.document].tokens[piece.start : piece.stop] for piece in pieces]
    borders = [0, *np.cumsum([len(run) for run in tokens]).tolist()]
    in_loss = np.zeros(borders[-1], dtype=bool)
    for piece, border in zip(pieces, borders, strict=False):  # borders has one entry more, the end of the row
        for start, stop in sequences[piece.document].spans:
            shift = border - piece.start
            in_loss[max(start, piece.start) + shift : max(min(stop, piece.stop) + shift, 0)] = True
    return Row(
        tokens=np.concatenate(tokens),
        borders=borders,
        loss_spans=np.flatnonzero(np.diff(in_loss, prepend=False, append=False)).tolist(),
        documents=[sequences[piece.document].name for piece in pieces],
        pieces=[piece.number for piece in pieces],
    )


def uniform(seed: int, key: bytes) -> float:
    """A number in [0, 1), uniformly distributed over keys, that depends on the arguments alone."""
    return int.from_bytes(sha256(b"%d:" % seed + key).digest()[:6], "big") / 2**48
