"""Packs documents into rows of a fixed length: a document is cut into pieces, a row holds pieces of several documents.

This module sees only lengths. The caller moves the tokens and everything that belongs to them.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

# A piece that is cut off to fill a row has at least this fraction of a row, because it starts without its context.
MIN_FRACTION = 1 / 32


@dataclass(frozen=True, order=True)
class Piece:
    """Tokens [start, stop) of a document; `number` counts the pieces of that document from 0."""

    document: int
    number: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def pack(lengths: Sequence[int], seq_len: int) -> list[list[Piece]]:
    """Pack every token of every document into rows of at most `seq_len` tokens; nothing is dropped.

    lengths: tokens of each document. A document longer than a row is cut into full rows and a remainder. Remainders and
    short documents are placed, longest first, each into the fullest row that has space (best-fit decreasing). Then rows
    with only remainders, emptiest first, are cut up to fill the space in other rows, as long as this saves a row:
    otherwise a few long documents (books) would leave some rows half empty. A document that fits in a row is never cut,
    and no cut leaves a piece shorter than MIN_FRACTION of a row.
    Rows are sorted by their first piece, and the pieces in a row by document.
    """
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for document, length in enumerate(lengths):
        for number, start in enumerate(range(0, length, seq_len)):
            piece = Piece(document, number, start, min(start + seq_len, length))
            rows.append([piece]) if len(piece) == seq_len else rests.append(piece)
    rows += _redistribute(best_fit(rests, seq_len), seq_len)
    return sorted(sorted(row) for row in _numbered(rows))


def best_fit(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Put whole pieces into rows of at most `seq_len` tokens: longest first, each into the fullest row with space."""
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for piece in sorted(pieces, key=lambda piece: (-len(piece), piece.document)):
        at = bisect.bisect_left(open_rows, (len(piece), -1))
        if at == len(open_rows):
            rows.append([])
            room, row = seq_len, len(rows) - 1
        else:
            room, row = open_rows.pop(at)
        rows[row].append(piece)
        if room > len(piece):
            bisect.insort(open_rows, (room - len(piece), row))
    return rows


def _redistribute(rows: list[list[Piece]], seq_len: int) -> list[list[Piece]]:
    """Save rows by cutting up their pieces to fill the space in the other rows."""
    least = max(1, int(seq_len * MIN_FRACTION))
    rows = sorted(rows, key=lambda row: (-_used(row), row))
    rooms = [seq_len - _used(row) for row in rows]
    for i in reversed(range(len(rows))):
        if any(piece.start == 0 for piece in rows[i]):
            continue  # a document that fits in a row is not cut
        if sum(rooms) - rooms[i] < _used(rows[i]):
            break  # the remaining rows are even fuller
        rooms_after = [*rooms]
        rooms_after[i] = 0
        placed = _cut_to_fit(rows[i], rooms_after, least)
        if placed is not None:
            for piece, row in placed:
                rows[row].append(piece)
            rows[i], rooms = [], rooms_after
    return [row for row in rows if row]


def _cut_to_fit(pieces: Sequence[Piece], rooms: list[int], least: int) -> list[tuple[Piece, int]] | None:
    """Place all tokens of the pieces as (piece, row), and update `rooms`; None if they do not fit."""
    placed = []
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            row = max(range(len(rooms)), key=rooms.__getitem__)
            rest = piece.stop - start
            size = min(rest, rooms[row])
            if size < rest:
                size = min(size, rest - least)  # what remains must not be too short either
                if size < least:
                    return None
            placed.append((replace(piece, start=start, stop=start + size), row))
            rooms[row] -= size
            start += size
    return placed


def _numbered(rows: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """The same pieces, numbered from 0 within each document in the order of its text."""
    counts: Counter[int] = Counter()
    numbers = {}
    for piece in sorted((piece for row in rows for piece in row), key=lambda piece: (piece.document, piece.start)):
        numbers[piece.document, piece.start] = counts[piece.document]
        counts[piece.document] += 1
    return [[replace(piece, number=numbers[piece.document, piece.start]) for piece in row] for row in rows]


def _used(row: Sequence[Piece]) -> int:
    return sum(map(len, row))
