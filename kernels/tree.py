"""A token tree on the device: which rows its nodes read, the path that the target accepts, keeping that path's rows.

Shapes: B slots, T rows of the pass, S cache rows, N tree nodes, P = max_depth + 1 places of a path, L layers,
R rows to keep, K key/value heads, d head width.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels import backend

MOST_ROWS = 128  # of a tree: a row's ancestors are the bits of two int64 words


def attended_rows(
    lengths_B: Tensor, n_rows: int, n_keys: int, tree_mask_BTT: Tensor | None, window: int | None
) -> Tensor:
    """Bool [B, T, S]: which of the first `n_keys` cache rows each row of the pass may read.

    Every row may read the committed rows (index < length). Among the pass's own rows a chain is causal and a tree
    follows its mask. With a window of w a row reads the last w tokens of its own history, itself included, where a
    node's place is the length plus its number of ancestors in the pass.
    """
    device = lengths_B.device
    chain_TT = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device).tril()
    own_BTT = chain_TT.expand(len(lengths_B), -1, -1) if tree_mask_BTT is None else tree_mask_BTT
    key_S = torch.arange(n_keys, device=device)
    offset_BS = key_S - lengths_B[:, None]  # index within the pass; negative for committed rows
    in_pass_BS = (offset_BS >= 0) & (offset_BS < n_rows)
    gather_BTS = offset_BS.clamp(0, n_rows - 1)[:, None, :].expand(-1, n_rows, -1)
    allowed_BTS = own_BTT.gather(2, gather_BTS) & in_pass_BS[:, None, :] | (offset_BS < 0)[:, None, :]
    if window is None:
        return allowed_BTS
    depth_BT = own_BTT.sum(-1).sub(1).clamp(min=0)
    key_depth_BS = torch.where(in_pass_BS, depth_BT.gather(1, offset_BS.clamp(0, n_rows - 1)), offset_BS)
    return allowed_BTS & (key_depth_BS[:, None, :] > depth_BT[:, :, None] - window)


def pack_tree(tree_mask_BTT: Tensor) -> Tensor:
    """The tree for Triton: int64 [B, T, 2], where bit j of row i's two words says whether it reads row j of the pass.
    At most MOST_ROWS rows."""
    n_rows, device = tree_mask_BTT.shape[1], tree_mask_BTT.device
    assert n_rows <= MOST_ROWS, f"a tree of {n_rows} rows has more than the {MOST_ROWS} that fit two words of ancestors"
    padded_BT2W = pad(tree_mask_BTT, (0, MOST_ROWS - n_rows)).unflatten(-1, (2, 64))
    weights_W = torch.ones(64, dtype=torch.int64, device=device) << torch.arange(64, device=device)
    return (padded_BT2W * weights_W).sum(-1)


@dataclass
class PassPlan:
    """What the attention of all layers of a pass shares, so that none computes it again."""

    lengths_B: Tensor  # int64, committed rows of each slot
    n_rows: int  # T
    tree_mask_BTT: Tensor | None = None  # as in `attended_rows`

    @cached_property
    def bits_BT2(self) -> Tensor | None:
        """The tree, from `pack_tree`; None for a chain."""
        return None if self.tree_mask_BTT is None else pack_tree(self.tree_mask_BTT)

    @cached_property
    def depth_BT(self) -> Tensor:
        """How many ancestors each row has in the pass, int32 [B, T]; 0 for a row that reads nothing."""
        if self.tree_mask_BTT is None:
            row_T = torch.arange(self.n_rows, dtype=torch.int32, device=self.lengths_B.device)
            return row_T.repeat(len(self.lengths_B), 1)
        return (self.tree_mask_BTT.sum(-1) - 1).clamp(min=0).to(torch.int32)

    @cached_property
    def path_BTT(self) -> Tensor | None:
        """int32, each row's ancestors and itself in the order of their depths, then zeros; None for a chain."""
        mask_BTT = self.tree_mask_BTT
        if mask_BTT is None:
            return None
        depth_BTT = self.depth_BT.long()[:, None].expand(mask_BTT.shape)
        row_BTT = torch.arange(self.n_rows, dtype=torch.int32, device=mask_BTT.device).expand(mask_BTT.shape)
        place_BTT = torch.where(mask_BTT, depth_BTT, self.n_rows)  # the place after the last is cut off
        return pad(torch.zeros_like(row_BTT), (0, 1)).scatter(2, place_BTT, row_BTT)[..., :-1].contiguous()

    @cached_property
    def parent_BT(self) -> Tensor:
        """Each row's parent, int64; -1 for one without."""
        if self.path_BTT is None:
            return self.depth_BT.long() - 1
        parent_BT = self.path_BTT.gather(2, (self.depth_BT.long() - 1).clamp(min=0)[..., None])[..., 0].long()
        return torch.where(self.depth_BT > 0, parent_BT, -1)

    def recent_rows(self, count: int) -> Tensor | None:
        """Each row's last ancestors and itself, int64 [B, T, count], by depth; rows before the pass are negative, and
        -1 is the last of them. None for a chain, where row t's are t - count + 1 to t."""
        if self.path_BTT is None:
            return None
        place_BTC = self.depth_BT.long()[..., None] + torch.arange(1 - count, 1, device=self.depth_BT.device)
        return torch.where(place_BTC < 0, place_BTC, self.path_BTT.long().gather(2, place_BTC.clamp(min=0)))

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor]:
        """The borders of each slot's queries and keys for `backend.varlen_attention`, int32 [2] and [B, 2]: 0 and the
        number of rows; 0 and the number of keys. Made without waiting for the device."""
        keys_B2 = pad((self.lengths_B + self.n_rows)[:, None], (1, 0)).to(torch.int32)
        return torch.arange(2, dtype=torch.int32, device=self.lengths_B.device) * self.n_rows, keys_B2


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each tree from its root: at a node, go to the child that carries the node's choice, or stop.

    Reads nothing on the host.

    Args:
        tokens_BN, parents_BN: int64, one trie per slot. Node 0 is the root. A parent is -1 for the root, -2 for
            padding, and otherwise an index smaller than the node's. Siblings carry different tokens.
        choices_BN: int64, the target's token after each node.
        active_B: bool; the other slots get a count of 0.
        max_depth: limit on the path's nodes below the root, however deep the tree is.
    Returns:
        Nodes [B, P], tokens [B, P] and counts [B], all int64: the path's nodes (the root first), the choice at each,
        and how many nodes there are. Places after a path's end repeat its last node and choice, so every place is a
        node's index. An inactive slot has the path that it would take if it were active.
    """
    node_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    leads_BNN = (parents_BN[:, None] == node_N[:, None]) & (tokens_BN[:, None] == choices_BN[:, :, None])
    found_BN, child_BN = leads_BNN.max(dim=2)
    next_BN = torch.where(found_BN, child_BN, node_N)  # the end of a path leads to itself
    path = [torch.zeros_like(tokens_BN[:, :1])]
    for _ in range(max_depth):
        path.append(next_BN.gather(1, path[-1]))
    nodes_BP = torch.cat(path, 1)
    n_steps_B = (nodes_BP[:, 1:] > nodes_BP[:, :-1]).sum(1)
    return nodes_BP, choices_BN.gather(1, nodes_BP), (1 + n_steps_B) * active_B


def keep_rows(keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor) -> None:
    """Move row lengths[b] + rows[b, i] of slot b to row lengths[b] + i, for i < counts[b].

    This works in place without a copy: rows are strictly increasing, so rows[i] >= i, and a row that moves to place i
    overwrites no row that a later place still reads, as those lie above i. Moving in the order i = 0, 1, ... is
    therefore enough, for each column by itself.

    On a CPU this goes slot by slot and only where rows move, on other devices by one indexed copy for all slots.

    Args:
        keys_LBSKd, values_LBSKd: of any strides but the last, which is 1. Only rows lengths[b] and above change.
        lengths_B: int64, committed rows of each slot; not changed.
        rows_BR: int64, at least 0 and strictly increasing in a slot's first counts[b] places; the rest is ignored.
        counts_B: int64 in [0, R]. A slot in which nothing moves costs nothing.
    """
    if rows_BR.shape[1] == 0:
        return
    if backend.is_host(keys_LBSKd.device):
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
    """`keep_rows` by one indexed copy for all slots, without a read on the host.

    Places after a slot's count repeat its last move, or copy a row onto itself if it has none.
    """
    slots_B1 = torch.arange(len(lengths_B), device=rows_BR.device)[:, None]
    places_BR = torch.arange(rows_BR.shape[1], device=rows_BR.device).minimum((counts_B[:, None] - 1).clamp(min=0))
    source_BR = torch.where(counts_B[:, None] > 0, rows_BR.gather(1, places_BR), 0) + lengths_B[:, None]
    target_BR = places_BR + lengths_B[:, None]
    for cache_LBSKd in (keys_LBSKd, values_LBSKd):
        cache_LBSKd[:, slots_B1, target_BR] = cache_LBSKd[:, slots_B1, source_BR]
