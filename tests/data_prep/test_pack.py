from hypothesis import given
from hypothesis import strategies as st

from longdraft.data_prep.pack import MODES, Piece, first, pack

lengths_and_row = st.tuples(st.lists(st.integers(1, 200), max_size=60), st.integers(2, 64))


@given(lengths_and_row)
def test_pack_places_every_token_once_and_in_order(case):
    lengths, seq_len = case
    rows = pack(lengths, seq_len)
    for document, length in enumerate(lengths):
        pieces = sorted(piece for row in rows for piece in row if piece.document == document)
        assert [piece.number for piece in pieces] == list(range(len(pieces)))
        assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == length


@given(lengths_and_row)
def test_pack_keeps_rows_short_full_and_sorted(case):
    lengths, seq_len = case
    rows = pack(lengths, seq_len)
    used = [sum(map(len, row)) for row in rows]
    assert all(0 < n <= seq_len for n in used)
    assert all(len(piece) > 0 for row in rows for piece in row)
    assert rows == sorted(sorted(row) for row in rows)
    # A document is cut only where a row ends: all its pieces but the last are whole rows.
    assert all(len(row) == 1 and len(row[0]) == seq_len for row in rows for p in row if p.stop < lengths[p.document])
    # Best fit never opens a row that an open one had room for, so no two rows could be one.
    assert all(a + b > seq_len for i, a in enumerate(used) for b in used[i + 1 :])


@given(lengths_and_row)
def test_first_takes_one_row_of_each_long_document(case):
    lengths, seq_len = case
    expected = [[Piece(i, 0, 0, seq_len)] for i, length in enumerate(lengths) if length >= seq_len]
    assert first(lengths, seq_len) == expected


def test_pack_by_hand():
    assert pack([10, 3, 5, 8], 8) == [
        [Piece(0, 0, 0, 8)],
        [Piece(0, 1, 8, 10)],
        [Piece(1, 0, 0, 3), Piece(2, 0, 0, 5)],
        [Piece(3, 0, 0, 8)],
    ]


def test_pack_wastes_little_on_short_documents():
    lengths = [1 + (i * 7919) % 700 for i in range(3000)]
    rows = pack(lengths, 512)
    assert 1 - sum(lengths) / (512 * len(rows)) < 0.01


def test_nothing_gives_no_rows():
    for mode in MODES.values():
        assert mode([], 8) == []
