"""Which rows make a step, and what the trainer reads of them: a pure function of (seed, step), no stream, no state.

Every epoch is a permutation of the rows, ordered by keyed noise of the row's index; steps run on over the borders of
epochs, so no row is lost or seen twice within one. How many ranks share a step changes nothing in what it contains.
Not here: the form on disk (data_prep/shards.py), labels (models/drafts/).
Shapes: B rows, T positions.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class Rows(Protocol):
    """What is read of a prepared folder's ShardSet."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, np.ndarray]: ...


class Batch(NamedTuple):
    """`tokens` int64 [B, T]; `pieces` int64 [B, T]: number of the document piece within its row, -1 on padding;
    `supervised` bool [B, T]: tokens that may be a label."""

    tokens: Tensor
    pieces: Tensor
    supervised: Tensor

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(field.to(device, non_blocking=True) for field in self))


@lru_cache(maxsize=4)  # a step reads from two epochs at most
def epoch_order(seed: int, epoch: int, n_rows: int) -> np.ndarray:
    """Row numbers of an epoch in the order they are read, int64 [n_rows]: sorted by 64 bits of Philox noise, key =
    (seed, epoch), one draw a row. NumPy keeps a bit generator's raw output stable over its versions."""
    noise = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_rows)
    return np.argsort(noise, kind="stable")


def step_rows(seed: int, step: int, n_rows: int, global_batch: int) -> list[int]:
    """The rows of step 0, 1, ...; `global_batch` of them."""
    first = step * global_batch
    return [
        int(epoch_order(seed, index // n_rows, n_rows)[index % n_rows]) for index in range(first, first + global_batch)
    ]


def rank_rows(rows: Sequence[int], rank: int, world_size: int, micro_batch: int) -> list[list[int]]:
    """A step's rows dealt to one rank: for each of its passes, `micro_batch` rows."""
    width = world_size * micro_batch
    assert len(rows) % width == 0, f"{len(rows)} rows do not divide by {width}"
    return [
        list(rows[start + rank * micro_batch : start + (rank + 1) * micro_batch])
        for start in range(0, len(rows), width)
    ]


def read_batch(rows: Rows, indices: Sequence[int]) -> Batch:
    """These rows as tensors on the CPU."""
    read = [rows[index] for index in indices]
    tokens_BT = torch.from_numpy(np.stack([row["tokens"] for row in read]).astype(np.int64))
    pieces_BT = torch.full_like(tokens_BT, -1)
    for b, row in enumerate(read):
        borders = row["borders"]
        pieces_BT[b, : borders[-1]] = torch.from_numpy(np.repeat(np.arange(len(borders) - 1), np.diff(borders)))
    supervised_BT = torch.from_numpy(np.stack([row["loss"] for row in read]).astype(bool))
    return Batch(tokens_BT, pieces_BT, supervised_BT)
