"""Reference of kernels/keep_rows.py: one row after the other, with lengths and rows read on the host."""

from torch import Tensor


def keep_rows(keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor) -> None:
    """See `longdraft.kernels.keep_rows.keep_rows`."""
    for slot, (length, count) in enumerate(zip(lengths_B.tolist(), counts_B.tolist(), strict=True)):
        for place, row in enumerate(rows_BR[slot, :count].tolist()):
            for cache_LBSKd in (keys_LBSKd, values_LBSKd):
                cache_LBSKd[:, slot, length + place] = cache_LBSKd[:, slot, length + row].clone()
