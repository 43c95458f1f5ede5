"""LongSpec's own cache: a ring of the last tokens' keys and values, and the rows of the tree that is being drafted.

A slot has one allocation for both, the ring first, so that a pass attends to one piece of memory under one mask. The
absolute position of a token gives its row in the ring. Keys are rotated before they come here, so the order of rows
does not matter. infer/longspec_passes.py computes what is written.
Shapes: B slots, R rows of the ring, N rows of the tree so far, T queries, G = H / K, H query heads, K key/value heads,
d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.footprint import Buffer

# Positions that can be taken back before the ring has overwritten older ones that then are in the window again.
SLACK = 64


class WindowCache:
    """Keys and values [B, R + rows of a tree, K, d] of the draft's dtype and device, allocated once.

    R is the window plus SLACK. `positions` int64 [B, R]: the position of the token in each row of the ring, or -1.
    """

    def __init__(self, draft: LongSpec, batch: int, tree_rows: int):
        """`tree_rows`: the most nodes of one tree that are queries."""
        config, weight = draft.config, draft.self_o.weight
        self.window = window_of(draft)
        self.ring = self.window + SLACK
        shape = (batch, self.ring + tree_rows, config.n_kv_heads, config.head_dim)
        # Zeros, because masked rows are still multiplied by 0, and uninitialised memory may be NaN.
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.full((batch, self.ring), -1, dtype=torch.int64, device=weight.device)
        self._slots_B1 = torch.arange(batch, device=weight.device)[:, None]

    @property
    def batch(self) -> int:
        """Number of slots."""
        return self.keys.shape[0]

    @staticmethod
    def allocations(draft: LongSpec, batch: int, tree_rows: int) -> list[Buffer]:
        """What the constructor allocates."""
        config, ring = draft.config, window_of(draft) + SLACK
        rows = (2, batch, ring + tree_rows, config.n_kv_heads, config.head_dim)
        return [(rows, draft.self_o.weight.dtype), ((batch, ring), torch.int64)]

    def start(self, slot: int) -> None:
        """Empty this slot's ring."""
        self.positions[slot].fill_(-1)

    def write(self, positions_BT: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> None:
        """Write keys and values of the tokens at these positions (int64, at least 0, one span of at most R a slot).

        They replace rows that are R positions older. A slot with fewer tokens than others may repeat a position:
        writing the same token again changes nothing.
        """
        places_BT = positions_BT % self.ring
        self.keys[self._slots_B1, places_BT] = k_BTKd
        self.values[self._slots_B1, places_BT] = v_BTKd
        self.positions[self._slots_B1, places_BT] = positions_BT

    def write_tree(self, first: int, k_BTKd: Tensor, v_BTKd: Tensor) -> None:
        """Write rows first .. first + T - 1 of the tree that is being drafted."""
        rows = slice(self.ring + first, self.ring + first + k_BTKd.shape[1])
        self.keys[:, rows], self.values[:, rows] = k_BTKd, v_BTKd

    def open_rows(self, queries_B: Tensor, ends_B: Tensor) -> Tensor:
        """bool [B, R]: the ring's rows with positions queries[b] - window .. min(queries[b], ends[b] - 1).

        Args:
            queries_B: int64, absolute position of the queries.
            ends_B: int64, the first position that is not read from the ring: there the tree begins, or the text ends.
        """
        first_B, last_B = (queries_B - self.window).clamp(min=0), torch.minimum(queries_B, ends_B - 1)
        return (self.positions >= first_B[:, None]) & (self.positions <= last_B[:, None])

    def attend(self, q_BTHd: Tensor, ring_BR: Tensor, tree_BTN: Tensor) -> Tensor:
        """Attention over the ring's open rows (`open_rows`) and, of the first N tree rows, those in each query's mask.

        Returns [B, T, H, d] in q's dtype. Every query must read at least one row, its own.
        """
        batch, n_rows, n_heads, head_dim = q_BTHd.shape
        n_kv_heads, n_keys = self.keys.shape[2], self.ring + tree_BTN.shape[2]
        groups = n_heads // n_kv_heads
        # Query groups are folded into the query length, so that keys and values are read once and never repeated.
        q_BKGTd = q_BTHd.view(batch, n_rows, n_kv_heads, groups, head_dim).permute(0, 2, 3, 1, 4)
        mask_BTS = torch.cat([ring_BR[:, None].expand(-1, n_rows, -1), tree_BTN], dim=2)
        out_BKQd = scaled_dot_product_attention(
            q_BKGTd.reshape(batch, n_kv_heads, groups * n_rows, head_dim),
            self.keys[:, :n_keys].transpose(1, 2),
            self.values[:, :n_keys].transpose(1, 2),
            attn_mask=mask_BTS.repeat(1, groups, 1)[:, None],
        )
        out_BKGTd = out_BKQd.view(batch, n_kv_heads, groups, n_rows, head_dim)
        return out_BKGTd.permute(0, 3, 1, 2, 4).reshape(batch, n_rows, n_heads, head_dim)


def window_of(draft: LongSpec) -> int:
    """How many rows before its own a query reads: the configured window, at most the number of positions."""
    return min(draft.config.window, draft.config.max_positions)
