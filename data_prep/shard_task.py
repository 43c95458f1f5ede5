"""One task of the preparation: reads, tokenises and packs some segments of the sources, and writes them as one shard.

The shard depends on the task and the settings alone, not on the process that makes it, or when. plan.py decides what
the tasks are.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.manifest import NAMED_BAD, SPLITS
from longdraft.data_prep.pack import MODES, Piece
from longdraft.data_prep.readers import Reader
from longdraft.data_prep.segments import Segment, read_documents
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shards import Row, write_shard
from longdraft.data_prep.tokenize import Encoded
from longdraft.data_prep.work_folder import WorkFolder


@dataclass(frozen=True)
class ShardTask:
    """The documents of `split` in these segments, which become one shard.

    budgets: the most tokens that this task takes of each budget; None: no limit. Once a budget is full, the rest of its
    segments is not read, and so not counted as left out.
    """

    split: str
    number: int
    segments: tuple[Segment, ...]
    budgets: tuple[int | None, ...]
    size: int  # expected bytes of text of its split

    @property
    def name(self) -> str:
        return task_name(self.split, self.number)


def task_name(split: str, number: int) -> str:
    """The name of the task that makes shard `number` of the split."""
    return f"{split}-{number:05d}"


@dataclass(frozen=True)
class KeptDocument:
    """A document whose tokens go into rows. source: the number of its source."""

    source: int
    n_bytes: int
    encoded: list[Encoded]


def make_shard(task: ShardTask, config: PrepareConfig, readers: Sequence[Reader], folder: WorkFolder) -> None:
    """Make the task's shard, unless it has no row, and then write its completion record."""
    kept, bad, dropped = _encode_documents(task, config, readers)
    sequences = [sequence for document in kept for sequence in document.encoded]
    packed = MODES[config.documents]([len(sequence.tokens) for sequence in sequences], config.seq_len)
    rows = [_make_row(pieces, sequences) for pieces in packed]
    path = config.out / task.split / f"shard-{task.number:05d}.arrow"
    shards = [write_shard(path, rows, config.seq_len, fill_id=readers[0].encoder.eos_id)] if rows else []
    record = {
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "supervised_tokens": sum(sum(row.loss_spans[1::2]) - sum(row.loss_spans[::2]) for row in rows),
        "documents": len(kept),
        "split_by_turn": sum(len(document.encoded) > 1 for document in kept),
        "pieces": sum(len(pieces) for pieces in packed),
        "text_bytes": sum(document.n_bytes for document in kept),
        "mix": _mix(kept, packed, readers),
        "bad": Counter(document.why for document in bad),
        "bad_named": [{"document": document.name, "why": document.why} for document in bad[:NAMED_BAD]],
        "dropped": dropped,
        # For each reason, what is wrong with the first document; reasons that say everything themselves are left out.
        "hints": {document.why: f"{document.name} {document.detail}" for document in reversed(bad) if document.detail},
        "shards": shards,
    }
    folder.complete(task.name, [path for _ in shards], record)


def _mix(kept: Sequence[KeptDocument], packed: Sequence[Sequence[Piece]], readers: Sequence[Reader]) -> dict[str, dict]:
    """The number of documents and of tokens in rows, for each source that has any."""
    source_of = [document.source for document in kept for _ in document.encoded]  # of each packed sequence
    tokens = Counter()
    for pieces in packed:
        for piece in pieces:
            tokens[source_of[piece.document]] += len(piece)
    documents = Counter(document.source for document in kept)
    return {
        reader.name: {"documents": documents[number], "tokens": tokens[number]}
        for number, reader in enumerate(readers)
        if documents[number]
    }


def _encode_documents(
    task: ShardTask, config: PrepareConfig, readers: Sequence[Reader]
) -> tuple[list[KeptDocument], list[BadDocument], Counter[str]]:
    """(Kept documents with their tokens, bad documents, number of dropped documents by reason)."""
    kept: list[KeptDocument] = []
    bad: list[BadDocument] = []
    dropped: Counter[str] = Counter()
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
            if isinstance(document, BadDocument):
                bad.append(document)
                continue
            try:
                encoded = reader.encoder.encode_document(document)
            except Unusable as error:
                bad.append(BadDocument(document.name, document.digest, error.why, error.detail))
                continue
            length = sum(len(sequence.tokens) for sequence in encoded)
            cost = config.seq_len if config.documents == "first" else length
            if length < cost:
                dropped["shorter_than_seq_len"] += 1
            elif cost > room[budget]:
                dropped["beyond_max_tokens"] += 1  # a shorter one may still fit
            else:
                kept.append(KeptDocument(source, document.n_bytes, encoded))
                room[budget] -= cost
    return kept, bad, dropped


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
