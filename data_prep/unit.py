"""One unit of the preparation: some segments of the sources, read, tokenised, packed and written as one shard.

A function of the unit and the settings alone: which process does it, and when, changes nothing. What the units are is
decided in prepare.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from longdraft.data_prep.chat import ChatEncoder
from longdraft.data_prep.documents import BadDocument, Conversation, Document, Unusable
from longdraft.data_prep.folder import NAMED_BAD, SPLITS, record_path
from longdraft.data_prep.pack import MODES, Piece
from longdraft.data_prep.settings import PrepareConfig
from longdraft.data_prep.shards import Row, write_json, write_shard
from longdraft.data_prep.sources import Segment, read_documents
from longdraft.data_prep.tokenize import Encoded, Encoder


@dataclass(frozen=True)
class Unit:
    """The work behind one shard: the documents of `split` in these segments, `max_tokens` of them at most."""

    split: str
    number: int
    segments: tuple[Segment, ...]
    max_tokens: int | None
    size: int  # bytes of text that are expected to be its split's


def make_shard(unit: Unit, config: PrepareConfig, encoder: Encoder | ChatEncoder) -> None:
    """Read, tokenise, pack and write one unit; its record is written last and says that the shard is whole."""
    kept, bad, dropped = _encode_unit(unit, config, encoder)
    sequences = [sequence for _, encoded in kept for sequence in encoded]
    packed = MODES[config.documents]([len(sequence.tokens) for sequence in sequences], config.seq_len)
    rows = [_make_row(pieces, sequences) for pieces in packed]
    shard = None
    if rows:
        path = config.out / unit.split / f"shard-{unit.number:05d}.arrow"
        shard = write_shard(path, rows, config.seq_len, fill_id=encoder.eos_id)
    record = {
        "shard": shard,
        "rows": len(rows),
        "tokens": sum(len(row.tokens) for row in rows),
        "supervised_tokens": sum(sum(row.loss_spans[1::2]) - sum(row.loss_spans[::2]) for row in rows),
        "documents": len(kept),
        "split_by_turn": sum(len(encoded) > 1 for _, encoded in kept),
        "pieces": sum(len(pieces) for pieces in packed),
        "text_bytes": sum(document.n_bytes for document, _ in kept),
        "bad": dict(sorted(Counter(document.why for document in bad).items())),
        "bad_named": [{"document": document.name, "why": document.why} for document in bad[:NAMED_BAD]],
        "dropped": dict(sorted(dropped.items())),
    }
    write_json(record_path(config.out, unit.split, unit.number), record)


def _encode_unit(
    unit: Unit, config: PrepareConfig, encoder: Encoder | ChatEncoder
) -> tuple[list[tuple[Document | Conversation, list[Encoded]]], list[BadDocument], Counter[str]]:
    """(documents kept with their tokens, bad documents, number of dropped ones by reason)."""
    kept: list[tuple[Document | Conversation, list[Encoded]]] = []
    bad: list[BadDocument] = []
    dropped: Counter[str] = Counter()
    room = unit.max_tokens
    for document in _documents_of(unit, config):
        if isinstance(document, BadDocument):
            bad.append(document)
            continue
        try:
            encoded = encoder.encode_document(document)
        except Unusable as error:
            bad.append(BadDocument(document.name, document.digest, error.why))
            continue
        length = sum(len(sequence.tokens) for sequence in encoded)
        cost = config.seq_len if config.documents == "first" else length
        if length < cost:
            dropped["shorter_than_seq_len"] += 1
        elif room is not None and cost > room:
            # A shorter one may still fit; the share that is left ends the search.
            dropped["beyond_max_tokens"] += 1
            if room < (unit.max_tokens or 0) // 50:
                break
        else:
            kept.append((document, encoded))
            room = None if room is None else room - cost
    return kept, bad, dropped


def _documents_of(unit: Unit, config: PrepareConfig) -> Iterator[Document | Conversation | BadDocument]:
    for segment in unit.segments:
        for document in read_documents(segment, config.text_field, config.chat_field):
            # By the text's hash: two copies of one document, wherever they stand, are always on the same side.
            heldout = uniform(config.seed, document.digest) < config.heldout_share
            if SPLITS[heldout] == unit.split:
                yield document


def _make_row(pieces: Sequence[Piece], sequences: Sequence[Encoded]) -> Row:
    parts = [sequences[piece.document].tokens[piece.start : piece.stop] for piece in pieces]
    borders = [0, *np.cumsum([len(part) for part in parts]).tolist()]
    loss_spans: list[int] = []
    for piece, border in zip(pieces, borders, strict=False):  # the last border ends the last piece
        for begin, end in sequences[piece.document].spans:
            begin, end = (border + min(max(place, piece.start), piece.stop) - piece.start for place in (begin, end))
            if begin == end:
                continue
            if loss_spans and loss_spans[-1] == begin:
                loss_spans[-1] = end
            else:
                loss_spans += [begin, end]
    return Row(
        tokens=np.concatenate(parts),
        borders=borders,
        loss_spans=loss_spans,
        documents=[sequences[piece.document].name for piece in pieces],
        pieces=[piece.number for piece in pieces],
    )


def uniform(seed: int, key: bytes) -> float:
    """Uniform in [0, 1), a function of its arguments alone."""
    return int.from_bytes(sha256(b"%d:" % seed + key).digest()[:6], "big") / 2**48
