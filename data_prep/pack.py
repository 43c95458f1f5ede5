"""Documents to rows of a fixed length. Works on lengths alone: who calls moves the tokens and all that goes with them.

Legend: a document is cut into pieces, a row holds pieces of several documents.
"""

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

# A piece that is cut off to fill a row is at least this fraction of a row, since it begins without what stood before.
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
    """Every token of every document into rows of at most `seq_len` tokens; nothing is dropped.

    lengths: tokens of each document. A document longer than a row is cut into full rows and a rest; rests and short
    documents are whole pieces and go, longest first, each into the fullest row that has room (best-fit decreasing).
    Then rows that hold nothing but rests are cut once more to fill what the others have left free, the emptiest first,
    as long as a row is saved: few long documents (books) would else leave some rows half empty. A document that fits a
    row is never cut, and no cut leaves a piece shorter than MIN_FRACTION of a row.
    Rows are sorted by their first piece, pieces in a row by document.
    """
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for document, length in enumerate(lengths):
        n_full = length // seq_len
        rows += [[Piece(document, i, i * seq_len, (i + 1) * seq_len)] for i in range(n_full)]
        if length % seq_len:
            rests.append(Piece(document, n_full, n_full * seq_len, length))
    rows += _pour(best_fit(rests, seq_len), seq_len)
    return sorted(sorted(row) for row in _numbered(rows))


def best_fit(pieces: Sequence[Piece], seq_len: int) -> list[list[Piece]]:
    """Rows of whole pieces, each of at most `seq_len` tokens: longest first, each into the fullest row with room."""
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


def _pour(rows: list[list[Piece]], seq_len: int) -> list[list[Piece]]:
    """The rows without those whose pieces, cut, fill what the others have left free."""
    least = max(1, int(seq_len * MIN_FRACTION))
    rows = sorted(rows, key=lambda row: (-_used(row), row))
    rooms = [seq_len - _used(row) for row in rows]
    for i in reversed(range(len(rows))):
        if any(piece.start == 0 for piece in rows[i]):
            continue  # a document that fits a row
        if sum(rooms) - rooms[i] < _used(rows[i]):
            break  # and fuller rows still less
        left = [*rooms]
        left[i] = 0
        placed = _cut_to_fit(rows[i], left, least)
        if placed is not None:
            for piece, row in placed:
                rows[row].append(piece)
            rows[i], rooms = [], left
    return [row for row in rows if row]


def _cut_to_fit(pieces: Sequence[Piece], rooms: list[int], least: int) -> list[tuple[Piece, int]] | None:
    """(piece, row) for all tokens of the pieces, which takes from `rooms`; None where they do not fit."""
    placed = []
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            row = max(range(len(rooms)), key=rooms.__getitem__)
            rest = piece.stop - start
            size = min(rest, rooms[row])
            if size < rest:
                size = min(size, rest - least)  # what follows is no scrap either
                if size < least:
                    return None
            placed.append((replace(piece, start=start, stop=start + size), row))
            rooms[row] -= size
            start += size
    return placed


def _numbered(rows: Sequence[Sequence[Piece]]) -> list[list[Piece]]:
    """The same pieces, each document's numbered from 0 in the order of its text."""
    counts: Counter[int] = Counter()
    numbers = {}
    for piece in sorted((piece for row in rows for piece in row), key=lambda piece: (piece.document, piece.start)):
        numbers[piece.document, piece.start] = counts[piece.document]
        counts[piece.document] += 1
    return [[replace(piece, number=numbers[piece.document, piece.start]) for piece in row] for row in rows]


def _used(row: Sequence[Piece]) -> int:
    return sum(map(len, row))


def first(lengths: Sequence[int], seq_len: int) -> list[list[Piece]]:
    """One row for each document of at least `seq_len` tokens: its first `seq_len` (TokenSwift's recipe on PG-19).

    The rest of a long document and every shorter document is left out; the caller counts them.
    """
    return [[Piece(document, 0, 0, seq_len)] for document, length in enumerate(lengths) if length >= seq_len]


MODES = {"pack": pack, "first": first}
