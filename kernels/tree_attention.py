"""Attention of a pass (one token, a chunk of a prompt, a tree) over the cache rows before it and its own rows.

The plain reference is reference/tree_attention.py. On a GPU with Triton triton_impl/tree_attention.py serves passes of
up to 128 rows and reads no length to the host; flash-attn's kernels know no ancestors, so that theirs would be a pass
over the cache, one over the tree and a merge. On a CPU cpu_impl/rows.py serves. More rows that are a chain are
chain_attention.py's; PyTorch's attention does the rest.
Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, d head width.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.chain_attention import ChainPlan, chain_attention, first_read, merge
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.reference.tree_attention import MOST_ROWS, attended_rows, log_sum_exp, pack_tree
from longdraft.kernels.sinks import with_sinks

# Above this many committed rows one mask over everything costs more than two calls and a merge.
SPLIT_FROM = 1024


@dataclass
class PassPlan(ChainPlan):
    """What all layers of one pass share: the lengths on the host and the masks, so that no layer repeats them."""

    tree_mask_BTT: Tensor | None = None
    _masks: dict[tuple, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @cached_property
    def tree(self) -> tuple[Tensor, Tensor]:
        """int64 [B, T, 2] ancestors as bits and int32 [B, T] depths of the pass's rows."""
        return pack_tree(self.tree_mask_BTT, len(self.lengths_B), self.n_rows, self.lengths_B.device)

    def mask(self, slot: int, first: int, stop: int, groups: int, window: int | None, dtype: torch.dtype):
        """Additive mask [G * T, stop - first] of cache rows first .. stop - 1, row g * T + t for row t of the pass,
        and bool [G * T, 1] of the rows that may read nothing (None where there is none)."""
        assert self.tree_mask_BTT is not None, "a chain needs no mask"
        key = (slot, first, stop, groups, window, dtype)
        if key not in self._masks:
            tree_1TT, length_1 = self.tree_mask_BTT[slot : slot + 1], self.lengths_B[slot : slot + 1]
            open_TS = attended_rows(length_1, self.n_rows, stop, tree_1TT, window)[0, :, first:]
            empty_T1 = ~open_TS.any(-1, keepdim=True)
            # An empty row reads everything, finitely, and its output is then dropped: softmax of nothing is NaN.
            additive = torch.zeros(open_TS.shape, dtype=dtype, device=open_TS.device)
            additive.masked_fill_(~(open_TS | empty_T1), float("-inf"))
            empty = empty_T1.repeat(groups, 1) if bool(empty_T1.any()) else None
            self._masks[key] = additive.repeat(groups, 1), empty
        return self._masks[key]


def tree_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None = None,
    window: int | None = None,
    plan: PassPlan | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Row i of slot b reads all committed rows and the pass's own rows that the tree opens to it.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows; [0, lengths[b]) are committed, [lengths[b], lengths[b] + T) are the pass's
            own, already written; what lies beyond is never read (it may be NaN). Their strides may differ.
        lengths_B: int64, committed rows of each slot.
        tree_mask_BTT: bool, [b, i, j]: row i reads row j of the pass (ancestors and itself); None: j <= i.
        window: a row sees the last `window` tokens of its own history, itself included; None for all.
        plan: of the same lengths and tree, to share masks between layers; made here when None.
        sinks_H: scores of kernels/sinks.py, where there are any.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zero for a row that may read nothing.
    """
    n_slots, n_rows = q_BTHd.shape[:2]
    if n_rows <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.rows_with_sinks(q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, window, sinks_H)
    plan = plan or PassPlan(lengths_B, n_rows, tree_mask_BTT)
    if (triton := triton_for(q_BTHd)) is not None:
        given = q_BTHd, keys_BSKd, values_BSKd, lengths_B, *plan.tree
        out_BTHd, lse_BTH = triton.tree_attention(*given, tree_mask_BTT is not None, window)
        return with_sinks(out_BTHd, lse_BTH, sinks_H)
    if plan.tree_mask_BTT is None and n_rows > 1:
        return chain_attention(q_BTHd, keys_BSKd, values_BSKd, plan, window, sinks_H)
    triton = backend.triton_kernels("tree_attention", q_BTHd.device.type)
    if triton is not None and window is None and tree_mask_BTT is not None:
        return wide_tree(triton, q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, sinks_H)
    outputs = [
        _slot_attention(q_BTHd[b : b + 1], keys_BSKd[b : b + 1], values_BSKd[b : b + 1], plan, b, window)
        for b in range(n_slots)
    ]
    out_BTHd = outputs[0] if n_slots == 1 else torch.cat(outputs)
    if sinks_H is None:
        return out_BTHd
    # PyTorch's attention keeps its sums to itself: the scores are computed once more.
    lse_BTH = log_sum_exp(q_BTHd, keys_BSKd, lengths_B, tree_mask_BTT, window)
    return with_sinks(out_BTHd, lse_BTH, sinks_H)


def triton_for(q_BTHd: Tensor) -> Any | None:
    """triton_impl/tree_attention.py, where it serves passes of so many rows on this device."""
    if q_BTHd.shape[1] > MOST_ROWS:
        return None
    return backend.triton_kernels("tree_attention", q_BTHd.device.type)


def wide_tree(
    triton: Any,
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """A tree of more than MOST_ROWS nodes by functions like those of triton_impl/tree_attention.py: they read the
    committed rows, so many nodes at a time; the pass's own are few, and the mask is of these alone."""
    n_slots, n_rows, _, head_dim = q_BTHd.shape
    parts = [triton.cross_attention(q, keys_BSKd, values_BSKd, lengths_B) for q in q_BTHd.split(MOST_ROWS, 1)]
    old_BTHd, old_lse_BTH = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    rows_BT = lengths_B[:, None] + torch.arange(n_rows, device=lengths_B.device)
    slots_B1 = torch.arange(n_slots, device=lengths_B.device)[:, None]
    keys_BTKd, values_BTKd = keys_BSKd[slots_B1, rows_BT].float(), values_BSKd[slots_B1, rows_BT].float()
    q_BTKGd = q_BTHd.float().unflatten(2, (keys_BSKd.shape[2], -1))
    scores_BKGTT = torch.einsum("btkgd,bskd->bkgts", q_BTKGd, keys_BTKd) * head_dim**-0.5
    scores_BKGTT.masked_fill_(~tree_mask_BTT[:, None, None], float("-inf"))
    old_lse_BKGT = old_lse_BTH.transpose(1, 2).unflatten(1, q_BTKGd.shape[2:4])
    lse_BKGT = torch.logaddexp(scores_BKGTT.logsumexp(-1), old_lse_BKGT)
    base_BKGT1 = lse_BKGT.masked_fill(lse_BKGT.isneginf(), 0.0)[..., None]  # of a row that may read nothing
    out_BTKGd = torch.einsum("bkgts,bskd->btkgd", (scores_BKGTT - base_BKGT1).exp(), values_BTKd)
    share_BTH1 = (old_lse_BKGT[..., None] - base_BKGT1).exp().flatten(1, 2).transpose(1, 2)
    out_BTHd = (out_BTKGd.flatten(2, 3) + share_BTH1 * old_BTHd.float()).to(q_BTHd.dtype)
    return with_sinks(out_BTHd, lse_BKGT.flatten(1, 2).transpose(1, 2), sinks_H)


def _slot_attention(
    q_1THd: Tensor, keys_1SKd: Tensor, values_1SKd: Tensor, plan: PassPlan, slot: int, window: int | None
) -> Tensor:
    """One slot: its rows are one contiguous slice of the cache, and query groups fold into the query length."""
    _, n_rows, n_heads, head_dim = q_1THd.shape
    n_kv_heads = keys_1SKd.shape[2]
    groups = n_heads // n_kv_heads
    length = plan.starts[slot]
    first = first_read(length, window)
    stop = length + n_rows
    keys_1KSd = keys_1SKd[:, first:stop].transpose(1, 2)
    values_1KSd = values_1SKd[:, first:stop].transpose(1, 2)
    if n_rows == 1 and plan.tree_mask_BTT is None:
        # [1, 1, H, d] is [1, K, G, d] as it lies: no copy.
        q_1KGd = q_1THd.reshape(1, n_kv_heads, groups, head_dim)
        out_1KGd = scaled_dot_product_attention(q_1KGd, keys_1KSd, values_1KSd)
        return out_1KGd.reshape(1, 1, n_heads, head_dim)
    q_1KQd = q_1THd.view(n_rows, n_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
    q_1KQd = q_1KQd.reshape(1, n_kv_heads, groups * n_rows, head_dim)
    prefix = length - first
    if prefix >= SPLIT_FROM and window is None and q_1THd.device.type == "cpu":
        out_1KQd = _split(q_1KQd, keys_1KSd, values_1KSd, prefix, plan, slot, groups)
    else:
        mask_QS, empty_Q1 = plan.mask(slot, first, stop, groups, window, q_1THd.dtype)
        out_1KQd = scaled_dot_product_attention(q_1KQd, keys_1KSd, values_1KSd, attn_mask=mask_QS)
        if empty_Q1 is not None:
            out_1KQd = out_1KQd.masked_fill(empty_Q1, 0.0)
    out_KGTd = out_1KQd.view(n_kv_heads, groups, n_rows, head_dim)
    return out_KGTd.permute(2, 0, 1, 3).reshape(1, n_rows, n_heads, head_dim)


def _split(
    q_1KQd: Tensor, keys_1KSd: Tensor, values_1KSd: Tensor, prefix: int, plan: PassPlan, slot: int, groups: int
) -> Tensor:
    """The committed rows without a mask, the pass's own with one, merged by log-sum-exp."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    old_1KQd, old_lse_1KQ = flash(q_1KQd, keys_1KSd[:, :, :prefix], values_1KSd[:, :, :prefix])
    stop = prefix + plan.n_rows
    mask_QT, empty_Q1 = plan.mask(slot, prefix, stop, groups, None, q_1KQd.dtype)
    new_1KQd, new_lse_1KQ = flash(q_1KQd, keys_1KSd[:, :, prefix:], values_1KSd[:, :, prefix:], attn_mask=mask_QT)
    if empty_Q1 is not None:
        new_lse_1KQ = new_lse_1KQ.masked_fill(empty_Q1[:, 0], float("-inf"))
    return merge((new_1KQd, new_lse_1KQ), (old_1KQd, old_lse_1KQ))[0]
