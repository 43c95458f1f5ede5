"""Which rows each row of a pass may read: the committed ones, and of the pass's own its ancestors.

Shapes: B slots, T rows of the pass, S cache rows.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

MOST_ROWS = 128  # of a tree whose ancestors fit two words of bits


def attended_rows(
    lengths_B: Tensor, n_rows: int, n_keys: int, tree_mask_BTT: Tensor | None, window: int | None
) -> Tensor:
    """Bool [B, T, S]: which of the first `n_keys` cache rows each row of the pass may read.

    Committed rows (index < length) are open to all rows. Among the pass's own rows a chain is causal and a tree follows
    its mask. With a window of w a row reads the last w tokens of its own history, itself included, where a node's place
    is the length plus its number of ancestors in the pass.
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


def pack_tree(tree_mask_BTT: Tensor | None, n_slots: int, n_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tree for Triton: int64 [B, T, 2], where bit j of row i's two words is whether it reads row j of the pass, and
    depths, int32 [B, T]. A mask of None is a chain. A row that reads nothing has depth 0. At most MOST_ROWS rows."""
    assert n_rows <= MOST_ROWS, f"a tree of {n_rows} rows has more than the {MOST_ROWS} that fit two words of ancestors"
    if tree_mask_BTT is None:
        tree_mask_BTT = torch.ones(n_rows, n_rows, dtype=torch.bool, device=device).tril().expand(n_slots, -1, -1)
    padded_BT2W = pad(tree_mask_BTT, (0, MOST_ROWS - n_rows)).unflatten(-1, (2, 64))
    weights_W = torch.ones(64, dtype=torch.int64, device=device) << torch.arange(64, device=device)
    depth_BT = (tree_mask_BTT.sum(-1) - 1).clamp(min=0).to(torch.int32)
    return (padded_BT2W * weights_W).sum(-1), depth_BT
