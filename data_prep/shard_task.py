"""One task of a preparation: reads, tokenises and packs some segments of the sources, and writes them as shards.

The shards depend only on the task and the settings, not on the process or the time. prepare.py decides what the tasks
are.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.data_prep.chat import PLAIN, ChatEncoder
from longdraft.data_prep.documents import BadDocument, TokenDocument, Unusable
from longdraft.data_prep.formats import RecordFormat, record_format_of
from longdraft.data_prep.pack import Piece, pack
from longdraft.data_prep.recipe import PrepareConfig
from longdraft.data_prep.records import Segment, read_documents
from longdraft.data_prep.shards import SPLITS, Row, write_shard
from longdraft.data_prep.tokenize import Encoded, Encoder, make_encoder
from longdraft.models.files import WorkFolder, damage_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARD_TOKENS = 1 << 23  # the document that reaches this ends a shard, so that a task of any size fits in memory


@dataclass(frozen=True)
class Reader:
    """How the documents of the source `name` become tokens."""

    name: str
    record_format: RecordFormat
    encoder: Encoder | ChatEncoder


@dataclass(frozen=True)
class ShardTask:
    """The documents of `split` in these segments, which become one shard, or several if they are long.

    budgets: the most tokens that this task uses from each source. Once one is used up, the rest of the source's
    segments is not read.
    """

    split: str
    number: int
    segments: tuple[Segment, ...]
    budgets: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


def empty_record() -> dict[str, Any]:
    """The record of a task without documents, which has the fields of a split's manifest.

    mix: documents and tokens of each source. bad, dropped: documents by reason. examples: for each reason the name of
    the first document, with details if there are any.
    """
    counts = dict.fromkeys(("rows", "tokens", "supervised_tokens", "documents", "pieces"), 0)
    return {**counts, "mix": {}, "bad": Counter(), "dropped": Counter(), "examples": {}, "shards": []}


def make_readers(
    config: PrepareConfig,
    tokenizer: "PreTrainedTokenizerFast",
    tokenizer_hash: str,
    tokenizers: "Mapping[str, PreTrainedTokenizerFast]",
) -> list[Reader]:
    """A reader for each source. tokenizers: see `record_format_of`."""
    path, sources = config.chat_template, config.sources.items()
    template = None if path is None else str(path)
    if path is not None and template != PLAIN:
        with damage_named(path, remedy="give --chat-template another file, or plain"):
            template = path.read_text(encoding="utf-8")

    def encoder(is_chat: bool) -> Encoder | ChatEncoder:
        return ChatEncoder(tokenizer, template) if is_chat else make_encoder(tokenizer, config.documents == "pack")

    encoders = {is_chat: encoder(is_chat) for is_chat in {source.is_chat for _, source in sources}}
    return [
        Reader(name, record_format_of(source, tokenizers, len(tokenizer), tokenizer_hash), encoders[source.is_chat])
        for name, source in sources
    ]


def make_shards_of(task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder) -> None:
    """Write the task's shards (none if it has no row), then its record."""
    record, sequences, n_tokens = empty_record(), list[Encoded](), 0
    for sequence in _sequences(task, config, readers, record):
        sequences.append(sequence)
        n_tokens += len(sequence.tokens)
        if n_tokens >= SHARD_TOKENS:
            _write(sequences, task, config, readers[0].encoder.eos_id, record)
            sequences, n_tokens = [], 0
    if sequences:
        _write(sequences, task, config, readers[0].encoder.eos_id, record)
    folder.write(task.name, record, [config.out / task.split / shard["file"] for shard in record["shards"]])


def _write(
    sequences: Sequence[Encoded], task: ShardTask, config: PrepareConfig, fill_id: int, record: dict[str, Any]
) -> None:
    """Pack the sequences into rows, write these as the task's next shard, and count them in the record."""
    packed = pack([len(sequence.tokens) for sequence in sequences], config.seq_len)
    rows = [_make_row(pieces, sequences) for pieces in packed]
    record["rows"] += len(rows)
    record["pieces"] += sum(map(len, packed))
    record["tokens"] += sum(len(row.tokens) for row in rows)
    record["supervised_tokens"] += sum(sum(row.loss_spans[1::2]) - sum(row.loss_spans[::2]) for row in rows)
    part = f"-{len(record['shards']):03d}" if record["shards"] else ""
    path = config.out / task.split / f"shard-{task.number:05d}{part}.arrow"
    path.parent.mkdir(exist_ok=True)
    record["shards"].append(write_shard(path, rows, config.seq_len, fill_id))


def _sequences(
    task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], record: dict[str, Any]
) -> Iterator[Encoded]:
    """The token sequences of the task's documents, which are counted in the record.

    The sequence that reaches the budget of its source is cut there.
    """
    room = [*task.budgets]  # tokens left in each source's budget
    least, most = (config.seq_len, config.seq_len) if config.documents == "first" else (1, math.inf)
    for segment in task.segments:
        source = segment.file.source
        reader, documents = readers[source], read_documents(segment, readers[source].record_format)
        while room[source] >= least and (document := next(documents, None)) is not None:
            # The text's hash decides, so all copies of a document are in the same split.
            is_heldout = uniform(config.seed, document.digest) < config.heldout_share
            if SPLITS[is_heldout] != task.split:
                continue
            try:
                if isinstance(document, BadDocument):
                    raise Unusable(document.why, document.detail)
                encoded = reader.encoder.encode_document(document)
            except Unusable as error:
                record["bad"][error.why] += 1
                record["examples"].setdefault(error.why, f"{document.name} {error.detail}".strip())
                continue
            if len(encoded[0].tokens) < least:
                record["dropped"]["shorter_than_seq_len"] += 1
                record["examples"].setdefault("shorter_than_seq_len", document.name)
                continue
            cuts = list[Encoded]()
            for sequence in encoded:
                cut = _beginning(sequence, min(room[source], most))
                parts = _windows(cut, config.seq_len) if isinstance(document, TokenDocument) else [cut]
                room[source] -= sum(len(part.tokens) for part in parts)
                cuts += [part for part in parts if part.spans]  # otherwise the whole answer was cut off
            record["documents"] += bool(cuts)
            counts = record["mix"].setdefault(reader.name, {"documents": 0, "tokens": 0})
            counts["documents"] += bool(cuts)
            counts["tokens"] += sum(len(cut.tokens) for cut in cuts)
            yield from cuts


def _beginning(sequence: Encoded, limit: float) -> Encoded:
    """The sequence, or its first `limit` tokens if it has more."""
    n = int(min(limit, len(sequence.tokens)))
    spans = tuple((start, min(stop, n)) for start, stop in sequence.spans if start < n)
    return replace(sequence, tokens=sequence.tokens[:n], spans=spans)


def _windows(sequence: Encoded, seq_len: int) -> list[Encoded]:
    """The sequence or, if a row is too short for it, windows that end where an answer ends, so that an answer stands
    behind as much of what precedes it as fits. Each token that the loss counts is counted in one of them."""
    windows, spans = list[Encoded](), [*sequence.spans]
    if len(sequence.tokens) <= seq_len:
        return [sequence]
    while spans:
        start, stop = spans[-1]
        begin = max(0, stop - seq_len)
        whole = [span for span in spans if span[0] >= begin] or [(begin, stop)]
        spans = [span for span in spans if span[0] < begin]
        if start < begin:  # this answer alone is longer than a row
            spans[-1] = start, begin
        shifted = tuple((first - begin, last - begin) for first, last in whole)
        windows.insert(0, Encoded(f"{sequence.name}@{begin}", sequence.tokens[begin:stop], shifted))
    return windows


def _make_row(pieces: Sequence[Piece], sequences: Sequence[Encoded]) -> Row:
    """The row of these pieces, with their spans shifted to positions in the row."""
    tokens = [sequences[piece.document].tokens[piece.start : piece.stop] for piece in pieces]
    borders = [0, *np.cumsum([len(run) for run in tokens]).tolist()]
    in_loss = np.zeros(borders[-1], dtype=bool)
    for piece, border in zip(pieces, borders, strict=False):  # borders has one more entry, the end of the row
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
