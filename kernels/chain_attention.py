"""Attention of many rows that form a chain: the chunks of a prompt over a cache, and whole packed sequences.

Over a cache (`chain_attention`):

- On a GPU in half precision, one flash kernel for all rows (lower-right causal, windows included): the fastest that is
  installed (`backend.prompt_attention_for`). It is called directly because on the newest GPUs PyTorch itself would
  choose cuDNN, which makes a plan for every length of keys, and reads a chunk of a prompt only under a dense mask.
- On a GPU without a suitable flash kernel, as in fp32, the Triton kernel of tree attention, MOST_ROWS rows at a time.
- On a CPU with bf16 instructions, the C kernels, MOST_ATTENTION_ROWS rows at a time, with the bits of decoding.
- Elsewhere PyTorch, slot by slot (`causal_attention`, which also has gradients).

Shapes: B slots, T rows of the pass, S cache capacity or keys, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.attention import attention_with_sinks, merge, with_sinks
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree import MOST_ROWS, PassPlan

# Queries per call where a mask is needed: bounds the mask at this many rows by the keys that they may read.
BLOCK = 512


def chain_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    plan: PassPlan,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention in which row t of slot b reads the cache rows [0, lengths[b] + t], the last `window` of them.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows. The pass's own are at [lengths[b], lengths[b] + T), already written; rows
            beyond do not count. On a GPU their values must be finite, as kernels may multiply them by 0; elsewhere
            they may be NaN. Their strides may differ.
        plan: the plan of the pass.
        window: number of rows a row reads at most, itself included; None for all.
        sinks_H: attention sinks (kernels/attention.py); None for none.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    if (flash := backend.prompt_attention_for(q_BTHd, window)) is not None:
        return by_flash(attention_with_sinks(flash, sinks_H), q_BTHd, keys_BSKd, values_BSKd, plan, window)
    if (triton := backend.triton_kernels("tree_attention", q_BTHd.device.type)) is not None:
        return in_slices(triton, q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, window, sinks_H)
    if rows.attends_chains(q_BTHd):
        return rows.rows_with_sinks(q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, None, window, sinks_H)
    outputs = []
    for b, length in enumerate(plan.lengths_B.tolist()):
        first = 0 if window is None else max(0, length - window + 1)
        slot, read = slice(b, b + 1), slice(first, length + plan.n_rows)
        qkv = q_BTHd[slot], keys_BSKd[slot, read], values_BSKd[slot, read]
        outputs.append(causal_attention(*qkv, window, sinks_H, in_two_parts=q_BTHd.device.type == "cpu"))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def by_flash(
    attention: Callable[..., Tensor],
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    plan: PassPlan,
    window: int | None,
) -> Tensor:
    """`chain_attention` by a function like `backend.varlen_attention`, a call per slot; the host reads no length."""
    q_borders, k_borders_B2 = plan.borders
    n_rows, capacity = q_BTHd.shape[1], keys_BSKd.shape[1]
    slots = zip(q_BTHd, keys_BSKd, values_BSKd, k_borders_B2, strict=True)
    outputs = [attention(q, k, v, q_borders, k_ends, n_rows, capacity, window) for q, k, v, k_ends in slots]
    return outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)


def in_slices(
    triton: Any,
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`chain_attention` by functions like those of triton/tree_attention.py, MOST_ROWS rows at a time. For each slice
    the pass's earlier rows count as committed."""
    outputs = []
    for start in range(0, q_BTHd.shape[1], MOST_ROWS):
        q = q_BTHd[:, start : start + MOST_ROWS]
        chain = PassPlan(lengths_B + start, q.shape[1])
        out, lse = triton.tree_attention(q, keys_BSKd, values_BSKd, chain.lengths_B, None, chain.depth_BT, window)
        outputs.append(with_sinks(out, lse, sinks_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def causal_attention(
    q_BTHd: Tensor,
    k_BSKd: Tensor,
    v_BSKd: Tensor,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    in_two_parts: bool = False,
) -> Tensor:
    """Causal attention in which query t reads keys 0 .. S - T + t, the last `window` of them.

    Where a GPU has a flash kernel, and for sinks on a GPU, this is `chain_attention`. Elsewhere PyTorch runs, in blocks
    of queries under a small mask where one is needed.

    Args:
        q_BTHd: queries after RoPE.
        k_BSKd, v_BSKd: keys and values. K divides H: head h reads key head h // (H / K).
        window: number of keys a query reads at most, its own token's included if S = T; None for all.
        sinks_H: attention sinks (kernels/attention.py); None for none. With sinks nothing has a gradient.
        in_two_parts: without a window no mask is made: the keys before the queries' own and the causal square after
            them are merged. For a CPU, without a gradient.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    (n_slots, n_queries), n_keys = q_BTHd.shape[:2], k_BSKd.shape[1]
    triton = None if sinks_H is None else backend.triton_kernels("tree_attention", q_BTHd.device.type)
    if triton is not None or backend.varlen_attention_for(q_BTHd) is not None:
        lengths_B = torch.full((n_slots,), n_keys - n_queries, device=q_BTHd.device)
        return chain_attention(q_BTHd, k_BSKd, v_BSKd, PassPlan(lengths_B, n_queries), window, sinks_H)
    q_BHTd, k_BKSd, v_BKSd = (x.transpose(1, 2) for x in (q_BTHd, k_BSKd, v_BSKd))
    before, window = n_keys - n_queries, n_keys if window is None else window
    if n_queries == 1:
        parts = [_attend(q_BHTd, k_BKSd[:, :, -window:], v_BKSd[:, :, -window:])]
    elif window >= n_keys and (before == 0 or in_two_parts):
        part = _attend(q_BHTd, k_BKSd[:, :, before:], v_BKSd[:, :, before:], is_causal=True)
        if before:
            part = merge(part, _attend(q_BHTd, k_BKSd[:, :, :before], v_BKSd[:, :, :before]))
        parts = [part]
    else:
        parts = _blockwise(q_BHTd, k_BKSd, v_BKSd, window)
    outputs = [
        with_sinks(out_BHTd.transpose(1, 2), None if sinks_H is None else lse_BHT.transpose(1, 2), sinks_H)
        for out_BHTd, lse_BHT in parts
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _attend(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """PyTorch's attention, and on a CPU its log-sum-exps [B, H, T]. options: `attn_mask` or `is_causal`."""
    if q_BHTd.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_BHTd, k_BKSd, v_BKSd, **options)
    grouped = q_BHTd.shape[1] != k_BKSd.shape[1]
    return scaled_dot_product_attention(q_BHTd, k_BKSd, v_BKSd, enable_gqa=grouped, **options), None


def _blockwise(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, window: int) -> list[tuple[Tensor, Any]]:
    """`_attend` for BLOCK queries at a time, under a mask over the keys that any of them reads."""
    n_queries, before = q_BHTd.shape[2], k_BKSd.shape[2] - q_BHTd.shape[2]
    blocks, shape, mask = [], None, None
    for start in range(0, n_queries, BLOCK):
        stop = min(start + BLOCK, n_queries)
        first = max(0, before + start - window + 1)
        # Under a window most blocks have the same mask. They share it, because autograd keeps it for the backward pass.
        if shape != (shape := (stop - start, before + stop - first)):
            last_T1 = torch.arange(shape[1] - shape[0], shape[1], device=q_BHTd.device)[:, None]
            key_S = torch.arange(shape[1], device=q_BHTd.device)
            closed_TS = (key_S > last_T1) | (key_S <= last_T1 - window)
            mask = torch.zeros(shape, dtype=q_BHTd.dtype, device=q_BHTd.device).masked_fill_(closed_TS, float("-inf"))
        keys = slice(first, before + stop)
        blocks.append(_attend(q_BHTd[:, :, start:stop], k_BKSd[:, :, keys], v_BKSd[:, :, keys], attn_mask=mask))
    return blocks
