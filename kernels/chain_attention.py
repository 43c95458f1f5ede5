"""Attention of many rows that form a chain behind the cache: the chunks and the whole prompts of a prefill.

No mask of rows x context is ever made. One of four implementations runs:

- On a GPU in half precision, one flash kernel for all rows (lower-right causal, windows included): flash-attn's if it
  is installed, else PyTorch's. It is called directly because on the newest GPUs PyTorch itself would choose cuDNN,
  which makes a plan for every length of keys.
- On a GPU where no flash kernel serves, as in fp32, the Triton kernel of tree attention, MOST_ROWS rows at a time.
- On a CPU with bf16 instructions, the C kernels, MOST_ATTENTION_ROWS rows at a time, with the bits of decoding.
- Elsewhere PyTorch, in parts without a mask or with a causal square, merged by log-sum-exp (`in_parts`).

Shapes: B slots, T rows of the pass, S cache capacity or keys, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.attention import attention_with_sinks, merge, with_sinks
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree import MOST_ROWS, pack_tree

# Queries per call where a mask is needed: bounds the mask at this many rows by the keys that they may read.
BLOCK = 512


@dataclass
class ChainPlan:
    """What all layers of a pass share, so that none computes it again."""

    lengths_B: Tensor  # int64, committed rows of each slot
    n_rows: int  # T

    @cached_property
    def starts(self) -> list[int]:
        """The lengths on the host; waits for the device."""
        return self.lengths_B.tolist()

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor]:
        """The borders of each slot's queries and keys for `backend.varlen_attention`, int32 [2] and [B, 2]: 0 and the
        number of rows; 0 and the number of keys. Made without waiting for the device."""
        keys_B2 = pad((self.lengths_B + self.n_rows)[:, None], (1, 0)).to(torch.int32)
        return torch.arange(2, dtype=torch.int32, device=self.lengths_B.device) * self.n_rows, keys_B2


def chain_attention(
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    plan: ChainPlan,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention in which row t of slot b reads the cache rows [0, lengths[b] + t], the last `window` of them.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows. The pass's own are at [lengths[b], lengths[b] + T), already written; rows
            beyond are never read (they may be NaN). Their strides may differ.
        plan: the plan of the pass.
        window: number of rows a row reads at most, itself included; None for all.
        sinks_H: attention sinks (kernels/attention.py); None for none.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    if (flash := backend.varlen_attention_for(q_BTHd)) is not None:
        return by_flash(attention_with_sinks(flash, sinks_H), q_BTHd, keys_BSKd, values_BSKd, plan, window)
    if (triton := backend.triton_kernels("tree_attention", q_BTHd.device.type)) is not None:
        return in_slices(triton, q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, window, sinks_H)
    if rows.attends_chains(q_BTHd):
        return rows.chain_rows(q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, window, sinks_H)
    outputs = []
    for b, length in enumerate(plan.starts):
        slot, read = slice(b, b + 1), slice(first_read(length, window), length + plan.n_rows)
        outputs.append(in_parts(q_BTHd[slot], keys_BSKd[slot, read], values_BSKd[slot, read], window, sinks_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def prompt_attention(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    prompt_lengths: Sequence[int],
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`chain_attention` of whole prompts of these lengths, right-padded to T rows. Output behind a prompt is arbitrary.

    On a GPU all prompts go together, on a CPU one by one, so that a prompt's result does not depend on the others. On a
    CPU, prompts of up to MOST_ATTENTION_ROWS tokens go through the C kernels, with the bits that they have in chunks.

    Args:
        q_BTHd, k_BTKd, v_BTKd: heads after RoPE, in one dtype.
        prompt_lengths: B numbers of at most T tokens.
        window, sinks_H: as for `chain_attention`.
    """
    n_prompts, n_rows = q_BTHd.shape[:2]
    if (flash := backend.varlen_attention_for(q_BTHd)) is not None:
        borders = torch.arange(n_prompts + 1, dtype=torch.int32, device=q_BTHd.device) * n_rows
        flat = (x.flatten(0, 1) for x in (q_BTHd, k_BTKd, v_BTKd))
        attend = attention_with_sinks(flash, sinks_H)
        return attend(*flat, borders, borders, n_rows, n_rows, window).view(q_BTHd.shape)
    start_B = torch.zeros(n_prompts, dtype=torch.int64, device=q_BTHd.device)
    if (triton := backend.triton_kernels("tree_attention", q_BTHd.device.type)) is not None:
        return in_slices(triton, q_BTHd, k_BTKd, v_BTKd, start_B, window, sinks_H)
    out_BTHd = q_BTHd.new_zeros(q_BTHd.shape)
    for b, count in enumerate(prompt_lengths):
        prompt = slice(b, b + 1), slice(count)
        qkv = q_BTHd[prompt], k_BTKd[prompt], v_BTKd[prompt]
        few = count <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd)
        if count and (few or rows.attends_chains(q_BTHd)):
            out_BTHd[prompt] = rows.chain_rows(*qkv, start_B[:1], window, sinks_H)
        elif count:
            out_BTHd[prompt] = in_parts(*qkv, window, sinks_H)
    return out_BTHd


def first_read(length: int, window: int | None) -> int:
    """The first cache row that is read by a row with `length` committed rows before it."""
    return 0 if window is None else max(0, length - window + 1)


def by_flash(
    attention: Callable[..., Tensor],
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    plan: ChainPlan,
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
    """`chain_attention` by functions like those of triton/tree_attention.py, MOST_ROWS rows at a time. To each
    slice the pass's rows before it count as committed."""
    outputs = []
    for start in range(0, q_BTHd.shape[1], MOST_ROWS):
        q = q_BTHd[:, start : start + MOST_ROWS]
        chain = pack_tree(None, len(q), q.shape[1], q.device)
        out, lse = triton.tree_attention(q, keys_BSKd, values_BSKd, lengths_B + start, *chain, False, window)
        outputs.append(with_sinks(out, lse, sinks_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def in_parts(
    q_1THd: Tensor, k_1SKd: Tensor, v_1SKd: Tensor, window: int | None, sinks_H: Tensor | None = None
) -> Tensor:
    """[1, T, H, d] without a mask. Query t reads keys 0 .. S - T + t, the last `window` of them.

    Rows are taken in blocks of at most `window`, so that each reads all rows of its block before it. The keys of a
    block are of three kinds: those that all of its rows read; the block's own, a causal square; and those that the
    window drops one by one from row to row, which is a causal square too if queries and keys are reversed.
    """
    n_rows, n_keys = q_1THd.shape[1], k_1SKd.shape[1]
    before, window = n_keys - n_rows, n_keys if window is None else window
    q_1HTd, k_1KSd, v_1KSd = (x.transpose(1, 2) for x in (q_1THd, k_1SKd, v_1SKd))
    # From row `window - before` on, key 0 is no longer read.
    edges = sorted({0, *range(max(0, window - before), n_rows, window), n_rows})
    outputs = []
    for start, stop in pairwise(edges):
        q, own_start, own_stop = q_1HTd[:, :, start:stop], before + start, before + stop
        part = _part(q, k_1KSd[:, :, own_start:own_stop], v_1KSd[:, :, own_start:own_stop], causal=True)
        common = max(0, own_stop - window)
        if common < own_start:
            part = merge(part, _part(q, k_1KSd[:, :, common:own_start], v_1KSd[:, :, common:own_start]))
        if common and stop - start > 1:  # the last row reads none of these keys
            dropped = slice(own_start - window + 1, common)
            backwards = (x.flip(2) for x in (q[:, :, :-1], k_1KSd[:, :, dropped], v_1KSd[:, :, dropped]))
            edge = [x.flip(2) for x in _part(*backwards, causal=True)]
            merged = merge([x[:, :, :-1] for x in part], edge)
            part = [torch.cat((x, all_rows[:, :, -1:]), 2) for x, all_rows in zip(merged, part, strict=True)]
        outputs.append(with_sinks(part[0].transpose(1, 2), part[1].transpose(1, 2), sinks_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _part(q_1HTd: Tensor, k_1KSd: Tensor, v_1KSd: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention over all of these keys, or `causal` over a square of them, and its log-sum-exps [1, H, T]."""
    if q_1HTd.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_1HTd, k_1KSd, v_1KSd, is_causal=causal)
    # This kernel knows no grouped heads: the queries of each key head become the heads of a sequence of their own.
    q_KGTd = q_1HTd[0].unflatten(0, (k_1KSd.shape[1], -1))
    keys, values = (x[0][:, None].expand(-1, q_KGTd.shape[1], -1, -1) for x in (k_1KSd, v_1KSd))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out_KGTd, lse_KGX, *_ = efficient(q_KGTd, keys, values, None, True, is_causal=causal)
    return out_KGTd.flatten(0, 1)[None], lse_KGX.flatten(0, 1)[None, :, : q_1HTd.shape[2]]  # the kernel pads these


def causal_attention(
    q_BTHd: Tensor, k_BSKd: Tensor, v_BSKd: Tensor, window: int | None = None, sinks_H: Tensor | None = None
) -> Tensor:
    """Causal attention in which query t reads keys 0 .. S - T + t, the last `window` of them.

    PyTorch's scaled_dot_product_attention runs everywhere: without a mask if there is no window, else in blocks of
    queries under a small mask. With sinks, which need log-sum-exps, `in_parts` runs instead.

    Args:
        q_BTHd: queries after RoPE.
        k_BSKd, v_BSKd: keys and values. K divides H: head h reads key head h // (H / K).
        window: number of keys a query reads at most, its own token's included if S = T; None for all.
        sinks_H: attention sinks (kernels/attention.py); None for none. With sinks nothing has a gradient.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    if sinks_H is not None:
        rows = zip(q_BTHd.split(1), k_BSKd.split(1), v_BSKd.split(1), strict=True)
        return torch.cat([in_parts(q, k, v, window, sinks_H) for q, k, v in rows])
    n_queries, n_keys = q_BTHd.shape[1], k_BSKd.shape[1]
    q_BHTd, k_BKSd, v_BKSd = q_BTHd.transpose(1, 2), k_BSKd.transpose(1, 2), v_BSKd.transpose(1, 2)
    operands, grouped = (q_BHTd, k_BKSd, v_BKSd), q_BHTd.shape[1] != k_BKSd.shape[1]
    if window is None or window >= n_keys:
        if n_queries == n_keys:
            return scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=grouped).transpose(1, 2)
        if (
            q_BTHd.is_cuda and q_BTHd.dtype in backend.HALF
        ):  # the flash kernel takes this bias without making a mask of it
            from torch.nn.attention.bias import causal_lower_right  # takes a second: it imports PyTorch's compiler

            lower_right = causal_lower_right(n_queries, n_keys)
            return scaled_dot_product_attention(*operands, attn_mask=lower_right, enable_gqa=grouped).transpose(1, 2)
    return _blockwise(q_BHTd, k_BKSd, v_BKSd, n_keys if window is None else window, grouped).transpose(1, 2)


def _blockwise(q_BHTd: Tensor, k_BKSd: Tensor, v_BKSd: Tensor, window: int, grouped: bool) -> Tensor:
    """[B, H, T, d], BLOCK queries at a time, under a mask over the keys that any of them reads."""
    n_queries, before = q_BHTd.shape[2], k_BKSd.shape[2] - q_BHTd.shape[2]
    blocks, shape, mask = [], None, None
    for start in range(0, n_queries, BLOCK):
        stop = min(start + BLOCK, n_queries)
        first = max(0, before + start - window + 1)
        # Under a window most blocks have the same mask. They share it, as autograd keeps it for the backward pass.
        if shape != (shape := (stop - start, before + stop - first)):
            last_T1 = torch.arange(shape[1] - shape[0], shape[1], device=q_BHTd.device)[:, None]
            key_S = torch.arange(shape[1], device=q_BHTd.device)
            closed_TS = (key_S > last_T1) | (key_S <= last_T1 - window)
            mask = torch.zeros(shape, dtype=q_BHTd.dtype, device=q_BHTd.device).masked_fill_(closed_TS, float("-inf"))
        operands = q_BHTd[:, :, start:stop], k_BKSd[:, :, first : before + stop], v_BKSd[:, :, first : before + stop]
        blocks.append(scaled_dot_product_attention(*operands, attn_mask=mask, enable_gqa=grouped))
    return torch.cat(blocks, 2)
