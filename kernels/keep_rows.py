"""Move the accepted path's keys and values to the front of the pass's rows, in all layers, in place.

Shapes: L layers, B slots, S cache capacity, R rows to keep, K key/value heads, d head width.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend


def keep_rows(keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor) -> None:
    """Move row lengths[b] + rows[b, i] of slot b to row lengths[b] + i, for i < counts[b].

    This works in place without a copy: rows are strictly increasing, so rows[i] >= i, and a row that moves to place i
    overwrites no row that a later place still reads, as those lie above i. Moving in the order i = 0, 1, ... is
    therefore enough, for each column by itself.

    On a GPU this is one Triton launch, whose grid depends on shapes alone. Elsewhere PyTorch does it: on a CPU slot by
    slot and only where rows move, on other devices by one indexed copy.

    Args:
        keys_LBSKd, values_LBSKd: of any strides but the last, which is 1. Only rows lengths[b] and above change.
        lengths_B: int64, committed rows of each slot; not changed.
        rows_BR: int64, at least 0 and strictly increasing in a slot's first counts[b] places; the rest is ignored.
        counts_B: int64 in [0, R]. A slot in which nothing moves costs nothing.
    """
    if rows_BR.shape[1] == 0:
        return
    if (triton := backend.triton_kernels("keep_rows", keys_LBSKd.device.type)) is not None:
        triton.keep_rows(keys_LBSKd, values_LBSKd, lengths_B, rows_BR, counts_B)
    elif backend.is_host(keys_LBSKd.device):
        _by_slot(keys_LBSKd, values_LBSKd, lengths_B, rows_BR, counts_B)
    else:
        keep_rows_reference(keys_LBSKd, values_LBSKd, lengths_B, rows_BR, counts_B)


def _by_slot(keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor) -> None:
    """For a CPU: move only rows that change their place, which in most steps are none."""
    lengths, counts, rows = lengths_B.tolist(), counts_B.tolist(), rows_BR.tolist()
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        first = next((place for place in range(count) if rows[slot][place] != place), count)
        if first == count:
            continue
        source_R = length + rows_BR[slot, first:count]
        for cache_LBSKd in (keys_LBSKd, values_LBSKd):
            rows_LSKd = cache_LBSKd[:, slot]
            rows_LSKd[:, length + first : length + count] = rows_LSKd[:, source_R]


def keep_rows_reference(
    keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor
) -> None:
    """`keep_rows` in plain PyTorch: one indexed copy for all slots, without a read on the host.

    Places behind a slot's count repeat its last move, or copy a row onto itself if it has none.
    """
    slots_B1 = torch.arange(len(lengths_B), device=rows_BR.device)[:, None]
    places_BR = torch.arange(rows_BR.shape[1], device=rows_BR.device).minimum((counts_B[:, None] - 1).clamp(min=0))
    source_BR = torch.where(counts_B[:, None] > 0, rows_BR.gather(1, places_BR), 0) + lengths_B[:, None]
    target_BR = places_BR + lengths_B[:, None]
    for cache_LBSKd in (keys_LBSKd, values_LBSKd):
        cache_LBSKd[:, slots_B1, target_BR] = cache_LBSKd[:, slots_B1, source_BR]
