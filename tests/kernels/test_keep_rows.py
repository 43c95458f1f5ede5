"""kernels/tree.py: every implementation against moves from a copy, on caches that hold NaN after the pass."""

import pytest
import torch

from longdraft.kernels.tree import keep_rows
from longdraft.kernels.tree import keep_rows_reference as reference

LAYERS, PASS = 3, 9  # rows of the pass
# lengths, rows (-7 and 10**12 are beyond the counts, where any number may be), counts
CASES = {
    "one row": ([4], [[0]], [1]),
    "one row from elsewhere": ([0], [[5, -7]], [1]),
    "nothing": ([3, 0], [[-7, -7], [10**12, 2]], [0, 0]),
    "in place": ([3, 0], [[0, 1, 2], [0, 1, -7]], [3, 2]),
    "each into the one before": ([0, 2, 6], [[1, 2, 3, 4, 5, 6, 7, 8]] * 3, [8, 5, 1]),
    "ragged": ([7, 0, 1, 3], [[0, 2, 3, 8], [0, -7, 10**12, 0], [-7, 4, 4, 4], [0, 1, 4, 5]], [4, 1, 0, 4]),
    "all": ([2], [[0, 1, 2, 3, 4, 5, 6, 7, 8]], [9]),
}


@pytest.fixture(params=["for any device", "on the host"])
def implementation(request):
    return reference if request.param == "for any device" else keep_rows


def made(lengths, n_kv, width, dtype=torch.float32):
    """Keys and values of different strides, random up to the pass's end and NaN after it."""
    generator = torch.Generator().manual_seed(1)
    shape = LAYERS, len(lengths), max(lengths) + PASS + 2, n_kv, width
    keys = torch.randn(shape[2], shape[1], shape[0], n_kv, width, generator=generator).permute(2, 1, 0, 3, 4).to(dtype)
    values = torch.randn(*shape[:4], width + 3, generator=generator).to(dtype)[..., 1:-2]
    for slot, length in enumerate(lengths):
        keys[:, slot, length + PASS :] = values[:, slot, length + PASS :] = float("nan")
    return keys, values


def moved(cache, lengths, rows, counts):
    """The expected cache: sources are read from a copy, so the order of moves cannot matter."""
    after = cache.clone()
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for place, row in enumerate(rows[slot][:count]):
            after[:, slot, length + place] = cache[:, slot, length + row]
    return after


@pytest.mark.parametrize("name", CASES)
def test_rows_move_in_place_and_all_else_stays(implementation, name):
    lengths, rows, counts = CASES[name]
    caches = made(lengths, 3, 5)
    wanted = [moved(cache, lengths, rows, counts) for cache in caches]
    given = torch.tensor(lengths), torch.tensor(rows), torch.tensor(counts)
    implementation(*caches, *given)
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
    assert given[0].tolist() == lengths, "lengths are the caller's"


def test_strided_rows_and_no_rows_at_all(implementation):
    lengths, rows, counts = CASES["ragged"]
    caches = made(lengths, 2, 16)
    wanted = [moved(cache, lengths, rows, counts) for cache in caches]
    across = torch.tensor(rows).T.contiguous().T
    twice = torch.tensor(lengths).repeat_interleave(2)[::2], across, torch.tensor(counts).repeat_interleave(3)[::3]
    implementation(*caches, *twice)
    keep_rows(*caches, twice[0], across[:, :0], torch.zeros_like(twice[2]))
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
