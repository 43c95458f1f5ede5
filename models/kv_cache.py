"""The full cache: post-RoPE keys and values of B slots in one allocation.

It does not know which rows deserve to stay: the runtime tells `commit`. Window and selected caches live in infer/.
Shapes: L layers, B slots, S capacity, T rows of a pass, R rows to keep, K key/value heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.keep_rows import keep_rows
from longdraft.kernels.rotate import HeadNorms, rotate_append
from longdraft.kernels.transfer import integers


class KVCache:
    """Keys and values [L, B, S, K, d], allocated once; lengths and prompt lengths int64 [B] on the same device.

    A pass of T rows writes its rows behind each slot's length, in every layer ("pending"); `commit` then commits some
    of them. Rows at or beyond a slot's length are undefined memory outside a pass. Only these methods write the
    tensors; `lengths` changes in place, so its address never does.
    """

    def __init__(
        self,
        n_layers: int,
        batch: int,
        capacity: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        """`capacity` counts rows a slot, the pending ones of the widest pass included."""
        shape = (n_layers, batch, capacity, n_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._slots_B1 = torch.arange(batch, device=device)[:, None]

    def slot(self, index: int, count: int = 1) -> "KVCache":
        """A cache of this one slot, or of so many from it on: the same storage and lengths, so what either does the
        other sees."""
        some, those = KVCache.__new__(KVCache), slice(index, index + count)
        some.keys, some.values = self.keys[:, those], self.values[:, those]
        some.lengths, some.prompt_lengths = self.lengths[those], self.prompt_lengths[those]
        some._slots_B1 = self._slots_B1[:count]
        return some

    @property
    def capacity(self) -> int:
        """Rows a slot can hold, pending ones included."""
        return self.keys.shape[2]

    @property
    def batch(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]

    def append(
        self, layer: int, qkv_BTNd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate the heads of q and k, [B, T, H + K, d]; those of k, and of v as they are, become pending rows.

        They go to rows lengths[b] .. lengths[b] + T - 1 of each slot; lengths stay as they are. A pass goes through the
        layers from 0 on; whether there is room is looked at once, at layer 0, and where that costs no wait.

        Args:
            qkv_BTNd: heads of q, then of k, then of v, before RoPE.
            cos_BT11F, sin_BT12F, norms: see kernels/rotate.py.
        """
        if layer == 0 and backend.is_host(self.lengths.device):
            self.check_room(qkv_BTNd.shape[1])
        own = self.keys[layer], self.values[layer], self.lengths
        return rotate_append(qkv_BTNd, cos_BT11F, sin_BT12F, *own, norms)

    def check_room(self, n_rows: int) -> None:
        """AssertionError where a pass of so many rows has no room behind the lengths, which are read on the host."""
        starts = self.lengths.tolist()
        assert max(starts) + n_rows <= self.capacity, (
            f"a pass of {n_rows} rows behind {max(starts)} committed ones needs a capacity of at least "
            f"{max(starts) + n_rows}, the cache has {self.capacity}"
        )

    def commit(self, rows_BR: Tensor | None, counts_B: Tensor) -> None:
        """Commit pending rows `rows_BR[b, :counts_B[b]]` in this order; lengths grow by `counts_B`.

        Args:
            rows_BR: int64 [B, R], strictly increasing in each slot's first `counts_B[b]` places, indices into the
                last pass; the rest is ignored. None commits the first `counts_B[b]` rows, without moving anything.
            counts_B: int64 [B], 0 <= counts <= R.
        """
        if rows_BR is not None:
            keep_rows(self.keys, self.values, self.lengths, rows_BR, counts_B)
        self.lengths += counts_B

    def fill(self, slot: int, first: int, keys_LRKd: Tensor, values_LRKd: Tensor) -> None:
        """Rows of a slot from `first` on, which are not committed by that."""
        rows = slice(first, first + keys_LRKd.shape[1])
        self.keys[:, slot, rows], self.values[:, slot, rows] = keys_LRKd, values_LRKd

    def rewind(self, lengths_B: Tensor) -> None:
        """Forget committed rows: back to `lengths_B` (int64 [B], each at most the present length)."""
        if backend.is_host(self.lengths.device):
            assert bool((lengths_B <= self.lengths).all()), f"cannot rewind {self.lengths} forward to {lengths_B}"
        self.lengths.copy_(lengths_B)

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Empty these slots (all when None) and note the lengths of the prompts to come.

        Args:
            slots: indices of slots, or None.
            prompt_lengths: one a slot reset; zero when None. RoPE types whose table depends on the length (dynamic,
                longrope) rotate every token of a prompt with the prompt's length.
        """
        where = integers(range(self.batch) if slots is None else slots, self.lengths.device)
        self.lengths.index_fill_(0, where, 0)
        lengths = torch.zeros_like(where) if prompt_lengths is None else integers(prompt_lengths, where.device)
        self.prompt_lengths.index_copy_(0, where, lengths)
