"""The order of rows is a function of (seed, step); what a row becomes."""

import numpy as np
import pytest

from longdraft.train.batches import epoch_order, rank_rows, read_batch, step_rows


def test_an_epoch_is_a_permutation_and_another_seed_or_epoch_another_one():
    orders = [tuple(epoch_order(seed, epoch, 50)) for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**62, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4


def test_known_order():
    assert epoch_order(3, 0, 8).tolist() == [6, 1, 5, 2, 7, 4, 3, 0]


@pytest.mark.parametrize(("n_rows", "global_batch"), [(7, 3), (5, 12), (12, 4)])
def test_steps_run_through_whole_epochs(n_rows, global_batch):
    read = [row for step in range(n_rows) for row in step_rows(9, step, n_rows, global_batch)]
    epochs = [read[start : start + n_rows] for start in range(0, len(read), n_rows)]
    assert len(epochs) == global_batch
    assert all(sorted(epoch) == list(range(n_rows)) for epoch in epochs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_a_step_whatever_their_number(world_size):
    rows = list(range(100, 112))
    dealt = [rank_rows(rows, rank, world_size, micro_batch=2) for rank in range(world_size)]
    assert {len(passes) for passes in dealt} == {12 // (2 * world_size)}
    assert sorted(row for passes in dealt for part in passes for row in part) == rows


def test_rows_become_tensors_with_pieces_and_padding():
    row = {
        "tokens": np.arange(8, dtype=np.int32),
        "borders": np.array([0, 3, 6], dtype=np.int32),
        "loss": np.array([0, 1, 1, 1, 1, 0, 0, 0], dtype=bool),
    }
    batch = read_batch([row, row], [1, 0])
    assert batch.tokens.tolist() == [list(range(8))] * 2
    assert batch.pieces[0].tolist() == [0, 0, 0, 1, 1, 1, -1, -1]
    assert batch.supervised[1].tolist() == [bool(x) for x in row["loss"]]
