"""Attention of a pass (one token, a chunk of a prompt, a tree) over the cache rows before it and its own rows, and of a
draft over the target's cache.

Why ours on a GPU: flash-attn's kernels know no ancestors, so with them a tree would take a pass over the cache, one
over the tree and a merge. Our Triton kernel takes one pass and a merge of runs, and reads no length to the host.
Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, d head width.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.attention import masked_attention, with_sinks
from longdraft.kernels.chain_attention import ChainPlan, chain_attention, first_read, merge
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree import MOST_ROWS, attended_rows, pack_tree


@dataclass
class PassPlan(ChainPlan):
    """What all layers of a pass share, with the tree and its masks."""

    tree_mask_BTT: Tensor | None = None  # as for `tree_attention`
    _masks: dict[tuple, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    @cached_property
    def tree(self) -> tuple[Tensor, Tensor]:
        """The ancestors of the pass's rows as bits, int64 [B, T, 2], and the rows' depths, int32 [B, T]."""
        return pack_tree(self.tree_mask_BTT, len(self.lengths_B), self.n_rows, self.lengths_B.device)

    def mask(self, slot: int, first: int, stop: int, groups: int, window: int | None, dtype: torch.dtype):
        """One slot's additive mask [G * T, stop - first] over cache rows first .. stop - 1, where row g * T + t is for
        row t of the pass, and bool [G * T, 1]: the rows that may read nothing (None if there are none)."""
        assert self.tree_mask_BTT is not None, "a chain needs no mask"
        key = (slot, first, stop, groups, window, dtype)
        if key not in self._masks:
            tree_1TT, length_1 = self.tree_mask_BTT[slot : slot + 1], self.lengths_B[slot : slot + 1]
            open_TS = attended_rows(length_1, self.n_rows, stop, tree_1TT, window)[0, :, first:]
            empty_T1 = ~open_TS.any(-1, keepdim=True)
            # An empty row reads everything, and its output is then dropped: the softmax of nothing would be NaN.
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
    """Attention in which a row reads all committed rows of its slot and the pass's own rows that the tree opens to it.

    Up to 128 rows go through the C kernels on a CPU and through Triton on a GPU. Other passes go to `chain_attention`
    if they are a chain of several rows, to `wide_tree` if they are a tree without a window on a GPU, and else through
    PyTorch, slot by slot.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows. Rows [0, lengths[b]) are committed and [lengths[b], lengths[b] + T) are the
            pass's own, already written; rows beyond are never read (they may be NaN). Their strides may differ.
        lengths_B: int64, committed rows of each slot.
        tree_mask_BTT: bool; [b, i, j] is whether row i reads row j of the pass, an ancestor or itself. None is a chain:
            j <= i.
        window: a row reads the last `window` tokens of its own history, itself included; None for all.
        plan: the pass's plan with the same lengths and tree, to share masks between layers; None makes one.
        sinks_H: attention sinks (kernels/attention.py); None for none.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for a row that may read nothing.
    """
    n_rows = q_BTHd.shape[1]
    if n_rows <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.rows_with_sinks(q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, window, sinks_H)
    plan = plan or PassPlan(lengths_B, n_rows, tree_mask_BTT)
    if (triton := triton_for(q_BTHd)) is not None:
        inputs = q_BTHd, keys_BSKd, values_BSKd, lengths_B, *plan.tree
        out_BTHd, lse_BTH = triton.tree_attention(*inputs, tree_mask_BTT is not None, window)
        return with_sinks(out_BTHd, lse_BTH, sinks_H)
    if plan.tree_mask_BTT is None and n_rows > 1:
        return chain_attention(q_BTHd, keys_BSKd, values_BSKd, plan, window, sinks_H)
    triton = backend.triton_kernels("tree_attention", q_BTHd.device.type)
    if triton is not None and window is None and tree_mask_BTT is not None:
        return wide_tree(triton, q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, sinks_H)
    slots = enumerate(zip(q_BTHd, keys_BSKd, values_BSKd, strict=True))
    outputs = [_slot_attention(q, keys, values, plan, b, window) for b, (q, keys, values) in slots]
    out_BTHd = outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
    if sinks_H is None:
        return out_BTHd
    # PyTorch's attention does not return log-sum-exps, so the scores are computed once more.
    _, lse_BTH = tree_attention_reference(q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, window)
    return with_sinks(out_BTHd, lse_BTH, sinks_H)


def triton_for(q_BTHd: Tensor) -> Any | None:
    """The module triton/tree_attention.py if it serves passes of this many rows on this device, else None."""
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
    """A tree of more than MOST_ROWS nodes, by functions like those of triton/tree_attention.py.

    They read the committed rows, MOST_ROWS nodes at a time. The pass's own rows are few: PyTorch reads them under the
    tree's mask, and the two are merged by log-sum-exp.
    """
    parts = [triton.cross_attention(q, keys_BSKd, values_BSKd, lengths_B) for q in q_BTHd.split(MOST_ROWS, 1)]
    committed = [torch.cat(part, 1) for part in zip(*parts, strict=True)]
    slots_B1 = torch.arange(len(lengths_B), device=lengths_B.device)[:, None]
    rows_BT = lengths_B[:, None] + torch.arange(q_BTHd.shape[1], device=lengths_B.device)
    own = masked_attention(q_BTHd.float(), keys_BSKd[slots_B1, rows_BT], values_BSKd[slots_B1, rows_BT], tree_mask_BTT)
    out_BTHd, lse_BTH = merge(own, committed)
    out_BTHd = out_BTHd.where(~lse_BTH.isneginf()[..., None], 0.0).to(q_BTHd.dtype)
    return with_sinks(out_BTHd, lse_BTH, sinks_H)


def cross_attention(q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor) -> Tensor:
    """Attention of a draft's rows over another model's cache: every row of slot b reads the cache rows [0, lengths[b]).

    Up to 128 rows go through the C kernels on a CPU and Triton on a GPU; all else through PyTorch, slot by slot.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows in q's dtype. K divides H: head h reads key head h // G. Rows beyond a length
            are never read (they may be NaN). Their strides may differ.
        lengths_B: int64, committed rows of each slot.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for a slot of length 0.
    """
    if q_BTHd.shape[1] <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.attention_rows(q_BTHd, keys_BSKd, values_BSKd, lengths_B, None, blind=True)
    # Of the flash kernels only flash-attn's `flash_attn_with_kvcache` cuts a long cache into runs as this one does.
    if (triton := triton_for(q_BTHd)) is not None:
        return triton.cross_attention(q_BTHd, keys_BSKd, values_BSKd, lengths_B)[0]
    slots = zip(q_BTHd, keys_BSKd, values_BSKd, lengths_B.tolist(), strict=True)
    return torch.stack([_folded(q, keys[:length], values[:length]) for q, keys, values, length in slots])


def _slot_attention(
    q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, plan: PassPlan, slot: int, window: int | None
) -> Tensor:
    """One slot, whose keys are one slice of the cache."""
    n_rows, n_heads, _ = q_THd.shape
    first, stop = first_read(plan.starts[slot], window), plan.starts[slot] + n_rows
    keys_SKd, values_SKd = keys_SKd[first:stop], values_SKd[first:stop]
    if n_rows == 1 and plan.tree_mask_BTT is None:
        return _folded(q_THd, keys_SKd, values_SKd)
    masks = plan.mask(slot, first, stop, n_heads // keys_SKd.shape[1], window, q_THd.dtype)
    return _folded(q_THd, keys_SKd, values_SKd, *masks)


def _folded(
    q_THd: Tensor, keys_SKd: Tensor, values_SKd: Tensor, mask_QS: Tensor | None = None, empty_Q1: Tensor | None = None
) -> Tensor:
    """PyTorch's attention [T, H, d] over these keys, or zeros without any. Query groups are folded into the query
    length, Q = G * T, so that keys and values are read once, not repeated. mask_QS, empty_Q1: as of `PassPlan.mask`."""
    if not len(keys_SKd):
        return torch.zeros_like(q_THd)
    n_rows, n_heads, head_dim = q_THd.shape
    n_kv_heads = keys_SKd.shape[1]
    q_KQd = q_THd.reshape(n_rows, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(n_kv_heads, -1, head_dim)
    operands = q_KQd[None], keys_SKd.transpose(0, 1)[None], values_SKd.transpose(0, 1)[None]
    out_1KQd = scaled_dot_product_attention(*operands, attn_mask=mask_QS)
    if empty_Q1 is not None:
        out_1KQd = out_1KQd.masked_fill(empty_Q1, 0.0)
    out_KGTd = out_1KQd.view(n_kv_heads, -1, n_rows, head_dim)
    return out_KGTd.permute(2, 0, 1, 3).reshape(n_rows, n_heads, head_dim)


def tree_attention_reference(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    tree_mask_BTT: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`tree_attention` by one dense mask, with the natural log-sum-exps of the scaled scores, fp32 [B, T, H]."""
    n_rows = q_BTHd.shape[1]
    n_keys = int(lengths_B.max()) + n_rows
    mask_BTS = attended_rows(lengths_B, n_rows, n_keys, tree_mask_BTT, window)
    return masked_attention(q_BTHd, keys_BSKd[:, :n_keys], values_BSKd[:, :n_keys], mask_BTS)


def cross_attention_reference(
    q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor
) -> tuple[Tensor, Tensor]:
    """`cross_attention` by one dense mask, with the natural log-sum-exps of the scaled scores, fp32 [B, T, H]."""
    mask_BS = torch.arange(keys_BSKd.shape[1], device=q_BTHd.device) < lengths_B[:, None]
    mask_BTS = mask_BS[:, None].expand(-1, q_BTHd.shape[1], -1)
    return masked_attention(q_BTHd, keys_BSKd, values_BSKd, mask_BTS)
