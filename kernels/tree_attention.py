"""Attention of a pass (one token, a chunk of a prompt, a tree) over the cache rows before it and its own rows, and of a
draft over the target's cache.

Why ours on a GPU: flash-attn's kernels have no tree masks, so a tree would take a pass over the cache, one over the
tree and a merge. Our Triton kernel takes one pass and a merge of runs, and copies no length to the host.
Shapes: B slots, T rows of the pass, S cache capacity, H query heads, K key/value heads, G = H / K, d head width.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.attention import masked_attention, with_sinks
from longdraft.kernels.chain_attention import chain_attention
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree import MOST_ROWS, PassPlan, attended_rows


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
    """Attention in which a row reads its slot's committed rows and, of the pass's own, those that the tree allows.

    Up to 128 rows go through the C kernels on a CPU and through Triton on a GPU (in half precision with
    LONGDRAFT_EXACT=1 through triton/exact_attention.py). Otherwise a chain goes to `chain_attention` and a tree to the
    reference.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows. Rows [0, lengths[b]) are committed and [lengths[b], lengths[b] + T) are the
            pass's own, already written; rows beyond are never read (they may be NaN). Their strides may differ.
        lengths_B: int64, committed rows of each slot.
        tree_mask_BTT: bool; [b, i, j] says whether row i reads row j of the pass, an ancestor or itself. None is a
            chain: j <= i.
        window: a row reads the last `window` tokens of its own history, itself included; None for all.
        plan: the pass's plan with the same lengths and tree; None makes one.
        sinks_H: attention sinks (kernels/attention.py); None for none.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for a row that may read nothing.
    """
    n_rows = q_BTHd.shape[1]
    if n_rows <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd):
        return rows.rows_with_sinks(q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT, window, sinks_H)
    plan = plan or PassPlan(lengths_B, n_rows, tree_mask_BTT)
    exact = backend.exact_kernels("exact_attention", q_BTHd) if n_rows <= MOST_ROWS else None
    if (triton := exact or triton_for(q_BTHd)) is not None:
        tree = plan.bits_BT2 if exact is None else plan.path_BTT
        inputs = q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree, plan.depth_BT
        out_BTHd, lse_BTH = triton.tree_attention(*inputs, window)
        return with_sinks(out_BTHd, lse_BTH, sinks_H)
    if tree_mask_BTT is None:
        return chain_attention(q_BTHd, keys_BSKd, values_BSKd, plan, window, sinks_H)
    inputs = q_BTHd, keys_BSKd, values_BSKd, lengths_B, tree_mask_BTT
    return with_sinks(*tree_attention_reference(*inputs, window), sinks_H)


def triton_for(q_BTHd: Tensor) -> Any | None:
    """The module triton/tree_attention.py if it supports passes of this many rows on this device, else None."""
    if q_BTHd.shape[1] > MOST_ROWS:
        return None
    return backend.triton_kernels("tree_attention", q_BTHd.device.type)


def tune(
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    windows: Iterable[int | None],
    dtype: torch.dtype,
    device: torch.device,
    capacity: int,
    n_slots: int,
    widths: Iterable[int],
    log: Callable[[str], object],
) -> None:
    """Measure, once per GPU, the blocks and runs of keys that make `tree_attention` fastest on a cache like this one.

    The choices are kept in a file (kernels/triton/tuning.py) and used for all later passes of such a shape in this
    process; outputs change by rounding. A shape that has been launched before keeps its choice. So this is called
    before the first pass, with the GPU current; it takes up to a minute and the memory of one layer of the cache.

    Nothing happens on a CPU, without Triton, in fp32, with heads wider than 128, with LONGDRAFT_EXACT=1, if caches are
    short, or if there is no memory for it.

    Args:
        windows: those of the layers, None for a layer without; each is measured once.
        capacity, n_slots: rows of the cache and sequences. widths: numbers of rows of the passes to come.
        log: called before anything is measured, and with the time that it took.
    """
    probe, triton = torch.empty(0, dtype=dtype, device=device), backend.triton_kernels("tree_attention", device.type)
    if triton is not None and backend.exact_kernels("exact_attention", probe) is None:
        shape = n_heads, n_kv_heads, head_dim, dict.fromkeys(windows), dtype, probe.device, capacity, n_slots
        triton.tune(*shape, widths, log)


def cross_attention(q_BTHd: Tensor, keys_BSKd: Tensor, values_BSKd: Tensor, lengths_B: Tensor) -> Tensor:
    """Attention of a draft's rows over another model's cache: every row of slot b reads the cache rows [0, lengths[b]).

    Up to 128 rows go through the C kernels on a CPU and Triton on a GPU; all else through the reference.

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
    n_keys = max(1, int(lengths_B.max()))
    return cross_attention_reference(q_BTHd, keys_BSKd[:, :n_keys], values_BSKd[:, :n_keys], lengths_B)[0]


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
