"""The most frequent tokens of a split, against a plain count over its rows."""

from collections import Counter

import numpy as np
import pytest
import torch

from longdraft.data_prep.shards import Row, ShardSet
from longdraft.train.methods.build import frequent_tokens

VOCAB, SEQ_LEN, FILLER = 50, 16, 7


@pytest.fixture
def rows(tmp_path, prepare) -> ShardSet:
    """Three shards, one of them empty, of rows with up to 15 fillers; 7 is the filler and, rarely, a token."""
    generator = np.random.Generator(np.random.Philox(key=np.array([4, 0], dtype=np.uint64)))
    shards = []
    for n_rows in (9, 0, 14):
        made = []
        for _ in range(n_rows):
            used = int(generator.integers(1, SEQ_LEN + 1))
            tokens = (generator.integers(0, 40, used) ** 2 // 40).astype(np.int32)  # small ids are frequent
            made.append(Row(tokens, sorted({0, used // 2, used}), [0, used], ["d"] * 2, [0, 1]))
        shards.append(made)
    prepare(tmp_path / "rows", SEQ_LEN, *shards, fill_id=FILLER)
    return ShardSet(tmp_path / "rows")


def counted(rows) -> Counter:
    count = Counter()
    for i in range(len(rows)):
        count.update(rows[i]["tokens"][: rows[i]["borders"][-1]].tolist())
    return count


AMONG = [*range(3, 12), 48]
# Ids without a logit are ignored, and a frequent or repeated id takes no second place.
ENDS = (49, 48, 0, 49, VOCAB, -1)


@pytest.mark.parametrize(
    ("n", "always", "among"),
    [*((n, (), None) for n in (1, 5, 17, VOCAB)), (6, ENDS, None), *((n, (49,), AMONG) for n in (2, 7, 11))],
)
def test_the_most_frequent(rows, n, always, among):
    """Of equally frequent ones the smaller id; those that end a sequence in any case. Of `among`, tokens that no row
    holds can be taken too, after all others."""
    count, ends = counted(rows), {token for token in always if 0 <= token < VOCAB}
    assert count[48] == count[49] == 0 and count.most_common(1)[0][0] == 0
    ranked = sorted(ends.union(among or range(VOCAB)), key=lambda token: (token not in ends, -count[token], token))
    given = VOCAB, n, always, None if among is None else torch.tensor(among)
    found = frequent_tokens(rows, *given)
    assert found.dtype == torch.int64 and found.tolist() == sorted(ranked[:n])
    assert torch.equal(found, frequent_tokens(ShardSet(rows.folder), *given))


def test_used_tokens_are_the_rows_without_filler(rows):
    parts = list(rows.used_tokens())
    every = [rows[i]["tokens"][: rows[i]["borders"][-1]] for i in range(len(rows))]
    assert np.array_equal(np.concatenate(parts), np.concatenate(every))
    assert {part.dtype for part in parts} == {np.dtype("int32")}


@pytest.mark.parametrize(
    ("n", "always", "among"), [(0, (), None), (VOCAB + 1, (), None), (2, (1, 2, 3), None), (4, (), [1, 2, 3])]
)
def test_a_size_that_cannot_be(rows, n, always, among):
    with pytest.raises(ValueError, match=f"^draft_vocab_size: {n};"):
        frequent_tokens(rows, VOCAB, n, always, None if among is None else torch.tensor(among))


def test_tokens_beyond_the_vocabulary(rows):
    with pytest.raises(ValueError, match=r"^data\.path: "):
        frequent_tokens(rows, max(counted(rows)), 2)
