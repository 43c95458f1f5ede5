import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longdraft.data_prep.pack import Piece, best_fit, pack
from longdraft.data_prep.prepare import SHARD_TEXT_BYTES

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
@example(([9, 1], 10))  # the second piece fills the first one's row to the last token
def test_pack_keeps_rows_short_full_and_sorted(case):
    lengths, seq_len = case
    rows = pack(lengths, seq_len)
    used = [sum(map(len, row)) for row in rows]
    assert all(0 < n <= seq_len for n in used)
    assert all(len(piece) > 0 for row in rows for piece in row)
    assert rows == sorted(sorted(row) for row in rows)
    # A document that fits in a row is whole. Of a longer one, only the rest shares a row with others.
    assert all(len(p) == lengths[p.document] for row in rows for p in row if lengths[p.document] <= seq_len)
    assert all(
        row == [p] and len(p) == seq_len for row in rows for p in row if p.number < lengths[p.document] // seq_len
    )
    # Best fit never opens a row for a piece that fits in an open one, so no two rows could be joined.
    assert all(a + b > seq_len for i, a in enumerate(used) for b in used[i + 1 :])


@given(st.lists(st.integers(1, 4000), max_size=25), st.sampled_from([64, 100, 500]))
def test_what_is_left_of_long_documents_is_cut_only_to_save_a_row(lengths, seq_len):
    rows = pack(lengths, seq_len)
    alone = best_fit([Piece(i, 0, 0, n % seq_len) for i, n in enumerate(lengths) if n % seq_len], seq_len)
    n_saved = len(alone) + sum(n // seq_len for n in lengths) - len(rows)
    pieces = [piece for row in rows for piece in row]
    n_cuts = len(pieces) - sum(-(-n // seq_len) for n in lengths)
    assert n_saved > 0 or (n_saved, n_cuts) == (0, 0)
    # A piece is shorter than a 32nd of a row only if its document has no more left.
    assert all(len(p) >= min(seq_len // 32, lengths[p.document] % seq_len or seq_len) for p in pieces)


def documents_of_a_shard(rng, median: int, sigma: float, n_bytes: int, bytes_a_token: float) -> list[int]:
    """Lognormal lengths in tokens, as many as make up the text of a shard."""
    lengths: list[int] = []
    while sum(lengths) * bytes_a_token < n_bytes:
        lengths.append(max(20, int(rng.lognormal(np.log(median), sigma))))
    return lengths


def filler(lengths: list[int], seq_len: int) -> float:
    return 1 - sum(lengths) / (seq_len * len(pack(lengths, seq_len)))


# Roughly PG-19's lengths in shards as data sets beyond 256 MB have them, some 40 books each, and chats.
@pytest.mark.parametrize(("median", "sigma", "seq_len", "n_bytes", "most"), [
    (90_000, 0.6, 8192, SHARD_TEXT_BYTES[1], 0.01), (90_000, 0.9, 32768, SHARD_TEXT_BYTES[1], 0.01),
    (600, 1.0, 2048, SHARD_TEXT_BYTES[0], 0.05), (600, 1.0, 4096, SHARD_TEXT_BYTES[0], 0.05),
])  # fmt: skip
def test_little_filler(median, sigma, seq_len, n_bytes, most):
    rng = np.random.default_rng(0)
    shards = [documents_of_a_shard(rng, median, sigma, n_bytes, 4.2) for _ in range(4)]
    assert max(filler(lengths, seq_len) for lengths in shards) < most


@pytest.mark.parametrize(("lengths", "seq_len", "rows"), [
    ([], 8, []),
    ([10, 3, 5, 8], 8, [[Piece(0, 0, 0, 8)], [Piece(0, 1, 8, 10)], [Piece(1, 0, 0, 3), Piece(2, 0, 0, 5)],
                        [Piece(3, 0, 0, 8)]]),
    # Three rests of 60 in rows of 100: one is cut in two, and the third row is saved.
    ([160, 160, 160], 100, [[Piece(0, 0, 0, 100)], [Piece(0, 1, 100, 160), Piece(2, 1, 100, 140)],
                            [Piece(1, 0, 0, 100)], [Piece(1, 1, 100, 160), Piece(2, 2, 140, 160)],
                            [Piece(2, 0, 0, 100)]]),
    # Documents of 60 tokens are not cut.
    ([60, 60, 60], 100, [[Piece(0, 0, 0, 60)], [Piece(1, 0, 0, 60)], [Piece(2, 0, 0, 60)]]),
])  # fmt: skip
def test_pack_by_hand(lengths, seq_len, rows):
    assert pack(lengths, seq_len) == rows
