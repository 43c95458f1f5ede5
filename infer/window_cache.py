"""LongSpec's own cache: a ring of the last tokens' keys and values, and the rows of the tree that is being drafted.

Both lie in one allocation a slot, the ring first, so that a pass attends to one piece of memory under one mask. A row
of the ring goes by the absolute position of its token, and keys are rotated before they come here, so the order within
the ring means nothing. Not here: what is written (infer/drafters/longspec.py).
Shapes: B slots, R rows of the ring, N rows of the tree so far, T queries, G = H / K, H query heads, K key/value heads,
d head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.models.drafts.longspec import LongSpec

# Positions that can be taken back without the ring having lost an older one that is in the window again.
SLACK = 64


class WindowCache:
    """Keys and values [B, R + rows of a tree, K, d] of the draft's dtype and device, allocated once.

    R is the window plus SLACK. `positions` int64 [B, R] says whose a row of the ring is, -1 where nobody's.
    """

    def __init__(self, draft: LongSpec, batch: int, tree_rows: int):
        """`tree_rows`: the most rows that one tree's queries take."""
        config, weight = draft.config, draft.self_o.weight
        self.window = window_of(draft)
        self.ring = self.window + SLACK
        shape = (batch, self.ring + tree_rows, config.n_kv_heads, config.head_dim)
        # Zeros: rows that a mask closes are still multiplied by 0, and memory of unknown content may be NaN.
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.positions = torch.full((batch, self.ring), -1, dtype=torch.int64, device=weight.device)
        self._slots_B1 = torch.arange(batch, device=weight.device)[:, None]

    @property
    def batch(self) -> int:
        """Number of slots."""
        return self.keys.shape[0]

    @staticmethod
    def bytes(draft: LongSpec, batch: int, tree_rows: int) -> int:
        """What the constructor allocates."""
        config, ring = draft.config, window_of(draft) + SLACK
        row = 2 * config.n_kv_heads * config.head_dim * draft.self_o.weight.element_size()
        return batch * ((ring + tree_rows) * row + ring * 8)

    def start(self, slot: int) -> None:
        """Empty this slot's ring."""
        self.positions[slot].fill_(-1)

    def write(self, positions_BT: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> None:
        """Keys and values of the tokens at these positions (int64, at least 0, one span of at most R a slot).

        What stood in their places is R positions older. Writing a position again with the same token changes nothing,
        so slots of which less is to be written may repeat one.
        """
        places_BT = positions_BT % self.ring
        self.keys[self._slots_B1, places_BT] = k_BTKd
        self.values[self._slots_B1, places_BT] = v_BTKd
        self.positions[self._slots_B1, places_BT] = positions_BT

    def write_tree(self, first: int, k_BTKd: Tensor, v_BTKd: Tensor) -> None:
        """Rows first .. first + T - 1 of the tree that is being drafted."""
        rows = slice(self.ring + first, self.ring + first + k_BTKd.shape[1])
        self.keys[:, rows], self.values[:, rows] = k_BTKd, v_BTKd

    def open_rows(self, queries_B: Tensor, ends_B: Tensor) -> Tensor:
        """bool [B, R]: the ring's rows of positions queries[b] - window .. min(queries[b], ends[b] - 1).

        Args:
            queries_B: int64, absolute position of the queries.
            ends_B: int64, the position from on which the tree's rows are read instead, or nothing stands yet.
        """
        first_B, last_B = (queries_B - self.window).clamp(min=0), torch.minimum(queries_B, ends_B - 1)
        return (self.positions >= first_B[:, None]) & (self.positions <= last_B[:, None])

    def attend(self, q_BTHd: Tensor, ring_BR: Tensor, tree_BTN: Tensor) -> Tensor:
        """Queries over the ring's open rows (`open_rows`) and those of the first N tree rows that are open to each.

        Returns [B, T, H, d] in q's dtype. Every query must have at least one open row, its own.
        """
        batch, n_rows, n_heads, head_dim = q_BTHd.shape
        n_kv_heads, n_keys = self.keys.shape[2], self.ring + tree_BTN.shape[2]
        groups = n_heads // n_kv_heads
        # Query groups fold into the query length: keys and values are read once and never repeated.
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
    """Rows before a query's own that it reads: no window is longer than the positions that there are."""
    return min(draft.config.window, draft.config.max_positions)
