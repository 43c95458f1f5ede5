"""The target's full KV cache: keys (after RoPE) and values of B slots in one allocation.

The caller of `commit` decides which rows stay.
Shapes: L layers, B slots, S capacity, T tokens of a pass, R rows to keep, H query heads, K key/value heads, d head
width, F = d / 2. A row is one token's keys and values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.tree import keep_rows
from longdraft.models.decoder_config import DeltaConfig
from longdraft.models.delta_states import DeltaStates


class KVCache:
    """Keys and values [L, B, S, K, d], allocated once; lengths and prompt lengths int64 [B] on the same device.

    A pass of T tokens writes T rows after each slot's committed ones, in every layer. They are pending until `commit`
    commits some of them. Outside of a pass, rows at or beyond a slot's length are undefined. Only the methods here
    write the tensors. `lengths` changes in place, so its address stays the same.
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
        delta: DeltaConfig | None = None,
    ):
        """capacity: rows per slot, including the pending ones of the widest pass. delta: of the layers with linear
        attention, which are not among `n_layers`."""
        shape = (n_layers, batch, capacity, n_kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        if self.values.is_cuda:
            self.values.zero_()  # flash kernels multiply values beyond a slot's last by 0, which keeps NaN
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.delta = None if delta is None else DeltaStates(delta, batch, dtype, device)

    def slot(self, index: int, count: int = 1) -> "KVCache":
        """A view of `count` slots from `index` on, as a cache: it shares their memory and lengths with this one."""
        view, slots = KVCache.__new__(KVCache), slice(index, index + count)
        view.keys, view.values = self.keys[:, slots], self.values[:, slots]
        view.lengths, view.prompt_lengths = self.lengths[slots], self.prompt_lengths[slots]
        view.delta = None if self.delta is None else self.delta.slot(slots)
        return view

    @property
    def capacity(self) -> int:
        """How many rows a slot can hold, including pending ones."""
        return self.keys.shape[2]

    @property
    def batch(self) -> int:
        """Number of slots."""
        return self.keys.shape[1]

    def append(
        self, layer: int, qkv_BTNd: Tensor, cos_BT11F: Tensor, sin_BT12F: Tensor, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate q and k, write k and v of one layer as pending rows, and return the rotated q and k.

        They go to rows lengths[b] .. lengths[b] + T - 1 of each slot; the lengths stay. A pass appends to the layers
        from 0 on. Room is only checked at layer 0, and only if the check does not wait for a device.

        Args:
            qkv_BTNd: the heads of q, then of k, then of v, before RoPE; N = H + 2 K.
            cos_BT11F, sin_BT12F, norms: see kernels/rotate.py.
        Returns: q and k after RoPE, [B, T, H + K, d].
        """
        if layer == 0 and backend.is_host(self.lengths.device):
            self.check_room(qkv_BTNd.shape[1])
        layer_cache = self.keys[layer], self.values[layer], self.lengths
        return rotate(qkv_BTNd, cos_BT11F, sin_BT12F, norms, layer_cache)

    def check_room(self, n_rows: int) -> None:
        """Assert that a pass of `n_rows` tokens fits after the committed rows. Reads the lengths on the host."""
        starts = self.lengths.tolist()
        assert max(starts) + n_rows <= self.capacity, (
            f"a pass of {n_rows} rows after {max(starts)} committed ones needs a capacity of at least "
            f"{max(starts) + n_rows}, the cache has {self.capacity}"
        )

    def commit(self, rows_BR: Tensor | None, counts_B: Tensor) -> None:
        """Commit the pending rows `rows_BR[b, :counts_B[b]]` of each slot, in this order.

        Args:
            rows_BR: int64 indices into the last pass, strictly increasing among a slot's first `counts_B[b]`; the rest
                is ignored. None commits the first `counts_B[b]` rows, without moving anything.
            counts_B: int64, 0 <= counts <= R; the lengths grow by it.
        """
        if rows_BR is not None:
            keep_rows(self.keys, self.values, self.lengths, rows_BR, counts_B)
        if self.delta is not None:
            self.delta.commit(rows_BR, counts_B)
        self.lengths += counts_B

    def fill(self, slot: int, first: int, keys_LRKd: Tensor, values_LRKd: Tensor) -> None:
        """Write rows of a slot from row `first` on, without committing them."""
        rows = slice(first, first + keys_LRKd.shape[1])
        self.keys[:, slot, rows], self.values[:, slot, rows] = keys_LRKd, values_LRKd

    def rewind(self, lengths_B: Tensor, states: DeltaStates | None = None) -> None:
        """Drop committed rows: go back to `lengths_B` (int64, each at most the present length).

        states: those of linear attention at these lengths, which cannot go back by itself.
        """
        assert (self.delta is None) == (states is None), "states: of linear attention, at the lengths"
        if self.delta is not None and states is not None:
            self.delta.follow(states)
        self.lengths.copy_(lengths_B)

    def reset(self, slots: Sequence[int] | None = None, prompt_lengths: Sequence[int] | Tensor | None = None) -> None:
        """Empty slots, and record the lengths of their next prompts.

        Args:
            slots: their indices; None: all.
            prompt_lengths: one per slot that is emptied; None: zeros. RoPE types whose table depends on the length
                (dynamic, longrope) rotate every token of a prompt with the table for the whole prompt.
        """
        for place, slot in enumerate(range(self.batch) if slots is None else slots):
            self.lengths[slot].fill_(0)
            if self.delta is not None:
                self.delta.reset(slot)
            self.prompt_lengths[slot].fill_(0 if prompt_lengths is None else prompt_lengths[place])
