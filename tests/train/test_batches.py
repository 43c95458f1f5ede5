"""The order of rows is a function of (seed, step); how rows are read; the random draws of a piece."""

from itertools import product

import numpy as np
import pytest

from longdraft.train.batches import EpochRow, draws, epoch_order, piece_key, rank_rows, read_batch, step_rows


def test_an_epoch_is_a_permutation_and_another_seed_or_epoch_another_one():
    orders = [tuple(epoch_order(seed, epoch, 50)) for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**62, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4


def test_known_order():
    assert epoch_order(3, 0, 8).tolist() == [6, 1, 5, 2, 7, 4, 3, 0]


@pytest.mark.parametrize(("n_rows", "global_batch"), [(7, 3), (5, 12), (12, 4)])
def test_steps_run_through_whole_epochs(n_rows, global_batch):
    read = [place for step in range(n_rows) for place in step_rows(9, step, n_rows, global_batch)]
    epochs = [read[start : start + n_rows] for start in range(0, len(read), n_rows)]
    assert len(epochs) == global_batch
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == [EpochRow(number, row) for row in range(n_rows)]


@pytest.mark.parametrize("n_rows", [12, 11, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 9])
def test_ranks_share_a_step_whatever_their_number(world_size, n_rows):
    """The same passes, dealt out in turn; each rank makes the same number, with an empty one where none is left."""
    rows = [EpochRow(2, row) for row in range(100, 100 + n_rows)]
    dealt = [rank_rows(rows, rank, world_size, micro_batch=2) for rank in range(world_size)]
    assert {len(passes) for passes in dealt} == {-(-n_rows // (2 * world_size))}
    turns = [part for turn in zip(*dealt, strict=True) for part in turn]
    assert [part for part in turns if part] == [rows[start : start + 2] for start in range(0, n_rows, 2)]
    assert all(passes[:-1] == [part for part in passes[:-1] if part] for passes in dealt)  # the last alone is empty


def test_a_pass_without_rows_reads_a_token_that_is_no_label():
    batch = read_batch(Two(), [])
    assert batch.tokens.tolist() == [0] and batch.supervised.tolist() == [False]
    assert batch.borders == [0, 1] and len(batch.keys) == 1


class Two:
    """Two rows with room for 8 tokens: two pieces and padding, three pieces and none."""

    rows = [
        {"tokens": np.arange(8), "borders": [0, 3, 6], "loss": [0, 1, 1, 1, 1, 0, 0, 0]},
        {"tokens": np.arange(10, 18), "borders": [0, 1, 4, 8], "loss": [1, 0, 0, 1, 1, 1, 1, 0]},
    ]
    names = [[("a", 0), ("b", 3)], [("b", 4), ("c", 0), ("d", 0)]]

    def __len__(self):
        return 2

    def __getitem__(self, index):
        row = self.rows[index]
        return {
            "tokens": row["tokens"].astype(np.int32),
            "borders": np.array(row["borders"], dtype=np.int32),
            "loss": np.array(row["loss"], dtype=bool),
        }

    def pieces(self, index):
        return self.names[index]


def test_rows_lie_end_to_end_without_their_padding():
    batch = read_batch(Two(), [EpochRow(0, 1), EpochRow(5, 0)])
    assert batch.tokens.tolist() == [*range(10, 18), *range(6)]
    assert [bool(x) for x in batch.supervised] == [bool(x) for x in [1, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]]
    assert batch.borders == [0, 1, 4, 8, 11, 14]
    names = [("b", 4, 0), ("c", 0, 0), ("d", 0, 0), ("a", 0, 5), ("b", 3, 5)]
    assert batch.keys == [piece_key(*name) for name in names]
    assert batch.tokens.dtype.is_signed and batch.tokens.element_size() == 8 and batch.supervised.dtype.itemsize == 1


def test_a_piece_has_the_same_key_wherever_it_is_packed_and_no_other_has_it():
    rows = Two()
    both, alone = read_batch(rows, [EpochRow(1, 0), EpochRow(1, 1)]), read_batch(rows, [EpochRow(1, 1)])
    assert both.keys[2:] == alone.keys
    names = list(product(("a", "b", "1", "11", ""), range(12), range(12)))
    assert len({piece_key(*name) for name in names}) == len(names)


def test_draws_are_a_function_of_seed_and_key():
    """Known numbers: every version must draw the same, or it could not resume an older run."""
    key = piece_key("book", 2, 0)
    assert key == 6239048140582160368
    assert draws(7, key, 2) == [8979140020609626891, 4894646611917071289]
    assert draws(7, key, 5)[:2] == draws(7, key, 2)
    others = [draws(8, key, 2), draws(7, piece_key("book", 2, 1), 2), draws(7, piece_key("book", 3, 0), 2)]
    assert len({tuple(numbers) for numbers in [draws(7, key, 2), *others]}) == 4
    assert draws(2**63 - 1, 2**64 - 1, 1) != draws(0, 0, 1)
