"""Reference of kernels/tree_attention.py: one dense mask, fp32 softmax, plain PyTorch, any device.

It is slow and holds B x H x T x S scores. Shapes: B slots, T rows of the pass, S cache rows, H query heads, K key/value
heads (grouped: head h reads key head h // (H / K)), d head width.
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


def tree_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """See `longdraft.kernels.tree_attention.tree_attention`."""
    scores_BKGTS = _scores(q_BTHd, keys_BSKd, lengths_B, tree_mask_BTT, window)
    values_BSKd = _written(values_BSKd, lengths_B, q_BTHd.shape[1])
    # A row that may read nothing (padding of an empty slot) has no softmax, and its output is zero.
    weights_BKGTS = torch.softmax(scores_BKGTS, -1).nan_to_num(0.0)
    out_BTKGd = torch.einsum("bkgts,bskd->btkgd", weights_BKGTS, values_BSKd)
    return out_BTKGd.reshape(q_BTHd.shape).to(q_BTHd.dtype)


def log_sum_exp(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Natural log-sum-exps of the rows' scaled scores, fp32 [B, T, H]; -inf for a row that may read nothing."""
    lse_BKGT = _scores(q_BTHd, keys_BSKd, lengths_B, tree_mask_BTT, window).logsumexp(-1)
    return lse_BKGT.flatten(1, 2).transpose(1, 2).contiguous()


def _scores(
    q_BTHd: Tensor, keys_BSKd: Tensor, lengths_B: Tensor, tree_mask_BTT: Tensor | None, window: int | None
) -> Tensor:
    """Scaled scores [B, K, G, T, S] in fp32, -inf where a row may not read."""
    n_slots, n_rows, n_heads, head_dim = q_BTHd.shape
    keys_BSKd = _written(keys_BSKd, lengths_B, n_rows)
    n_keys, n_kv_heads = keys_BSKd.shape[1:3]
    q_BTKGd = q_BTHd.float().view(n_slots, n_rows, n_kv_heads, n_heads // n_kv_heads, head_dim)
    scores_BKGTS = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, keys_BSKd) * head_dim**-0.5
    mask_BTS = attended_rows(lengths_B, n_rows, n_keys, tree_mask_BTT, window)
    return scores_BKGTS.masked_fill(~mask_BTS[:, None, None], float("-inf"))


def _written(x_BSKd: Tensor, lengths_B: Tensor, n_rows: int) -> Tensor:
    """Cache rows up to the end of the longest slot, in fp32. Rows beyond a slot's own end are made zero: they may hold
    NaN, and 0 * NaN would carry it into the sum over values."""
    n_keys = int(lengths_B.max()) + n_rows
    written_BS = torch.arange(n_keys, device=x_BSKd.device) < lengths_B[:, None] + n_rows
    return x_BSKd[:, :n_keys].float().where(written_BS[:, :, None, None], 0)
