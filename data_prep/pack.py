"""Documents to rows of a fixed length. Works on lengths alone: who calls moves the tokens and all that goes with them.

Legend: a document is cut into pieces, a row holds pieces of several documents.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass


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
    Rows are sorted by their first piece, pieces in a row by document.
    """
    rows: list[list[Piece]] = []
    rests: list[Piece] = []
    for document, length in enumerate(lengths):
        n_full = length // seq_len
        rows += [[Piece(document, i, i * seq_len, (i + 1) * seq_len)] for i in range(n_full)]
        if length % seq_len:
            rests.append(Piece(document, n_full, n_full * seq_len, length))
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for piece in sorted(rests, key=lambda piece: (-len(piece), piece.document)):
        at = bisect.bisect_left(open_rows, (len(piece), -1))
        if at == len(open_rows):
            rows.append([])
            room, row = seq_len, len(rows) - 1
        else:
            room, row = open_rows.pop(at)
        rows[row].append(piece)
        if room > len(piece):
            bisect.insort(open_rows, (room - len(piece), row))
    return sorted(sorted(row) for row in rows)


def first(lengths: Sequence[int], seq_len: int) -> list[list[Piece]]:
    """One row for each document of at least `seq_len` tokens: its first `seq_len` (TokenSwift's recipe on PG-19).

    The rest of a long document and every shorter document is left out; the caller counts them.
    """
    return [[Piece(document, 0, 0, seq_len)] for document, length in enumerate(lengths) if length >= seq_len]


MODES = {"pack": pack, "first": first}
