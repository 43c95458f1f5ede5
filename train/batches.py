"""The rows of a step, and what the trainer reads of them: a pure function of (seed, step), without iterator state.

Every epoch is a permutation of the rows, ordered by noise keyed with (seed, epoch). Steps cross epoch boundaries, so
each epoch reads every row exactly once. The number of ranks does not change what a step contains: the same passes are
only dealt out differently. The random draws of a document piece are the same wherever it is packed.
Shapes: N tokens of the rows of a pass, end to end; P pieces.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.data_prep.shards import ShardSet


class EpochRow(NamedTuple):
    """A row in the order of training: the epoch in which it is read, and its index."""

    epoch: int
    row: int


class Batch(NamedTuple):
    """Rows end to end, without their padding.

    `tokens` int64 [N]. `supervised` bool [N]: tokens that may be a label. `borders`, P + 1 numbers: where each document
    piece starts, and N. `keys`, P 64-bit numbers that key the random draws of each piece (`piece_key`).
    """

    tokens: Tensor
    supervised: Tensor
    borders: list[int]
    keys: list[int]


@lru_cache(maxsize=4)  # a step reads from two epochs at most
def epoch_order(seed: int, epoch: int, n_rows: int) -> np.ndarray:
    """Row indices in the order in which an epoch reads them, int64 [n_rows]: sorted by 64 bits of Philox noise with the
    key (seed, epoch), one draw for each row. NumPy keeps a bit generator's raw output stable across versions."""
    noise = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(n_rows)
    return np.argsort(noise, kind="stable")


def step_rows(seed: int, step: int, n_rows: int, global_batch: int) -> list[EpochRow]:
    """The `global_batch` rows of step 0, 1, ..."""
    first = step * global_batch
    epochs = [divmod(index, n_rows) for index in range(first, first + global_batch)]
    return [EpochRow(epoch, int(epoch_order(seed, epoch, n_rows)[at])) for epoch, at in epochs]


def rank_rows(rows: Sequence[EpochRow], rank: int, world_size: int, micro_batch: int) -> list[list[EpochRow]]:
    """One rank's passes of a step. Passes are dealt to the ranks in turn: `micro_batch` rows each, the step's last one
    with the remaining rows. All ranks get the same number of passes, since a pass is collective; a rank's last pass is
    empty if no rows are left for it."""
    width = world_size * micro_batch
    starts = range(rank * micro_batch, rank * micro_batch + -(-len(rows) // width) * width, width)
    return [list(rows[start : start + micro_batch]) for start in starts]


def read_batch(rows: ShardSet, wanted: Sequence[EpochRow]) -> Batch:
    """These rows as tensors on the CPU; without rows, a single token that is not a label."""
    if not wanted:
        return Batch(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool), [0, 1], [0])
    tokens, supervised, borders, keys = [], [], [0], []
    for epoch, index in wanted:
        row = rows[index]
        used = int(row["borders"][-1])
        tokens.append(row["tokens"][:used].astype(np.int64))
        supervised.append(row["loss"][:used].astype(bool))
        begin = borders[-1]
        borders += [begin + int(border) for border in row["borders"][1:]]
        keys += [piece_key(document, number, epoch) for document, number in rows.pieces(index)]
    return Batch(torch.from_numpy(np.concatenate(tokens)), torch.from_numpy(np.concatenate(supervised)), borders, keys)


def piece_key(document: str, number: int, epoch: int) -> int:
    """A 64-bit hash of a document piece's name and number, and of the epoch, so that each reading draws anew."""
    text = f"{document}\0{number}\0{epoch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def draws(seed: int, key: int, n: int) -> list[int]:
    """n random 64-bit numbers for a piece, a function of (seed, key) alone."""
    return np.random.Philox(key=np.array([seed, key], dtype=np.uint64)).random_raw(n).tolist()
