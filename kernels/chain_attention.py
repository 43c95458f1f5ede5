"""Attention of many rows that are a chain behind the cache: the chunks and the whole prompts of a prefill.

No mask of rows x context is ever made. On a GPU in half precision one flash kernel takes all rows (lower-right causal,
windows included): flash-attn's where it is installed, else PyTorch's. It is called directly, since PyTorch's own choice
on the newest GPUs is cuDNN's, which makes a plan for every length of keys: tens to hundreds of milliseconds for each
chunk. In fp32 the Triton kernel of the tree attention takes so many rows at a time as it serves. On a CPU with bf16
products the C kernels take all rows, as many at a time as of a tree, with the bits of decoding. Elsewhere
attention falls into parts that are all open or causal squares, merged by log-sum-exp. Not here: few rows and trees
(tree_attention.py), training (causal_attention.py).
Shapes: B slots, T rows of the pass, S cache capacity or keys, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.reference.tree_attention import MOST_ROWS, pack_tree
from longdraft.kernels.sinks import attention_with_sinks, with_sinks


@dataclass
class ChainPlan:
    """What all layers of a pass share: the lengths on the host, and where the kernels find each slot's rows."""

    lengths_B: Tensor
    n_rows: int

    @cached_property
    def starts(self) -> list[int]:
        """The lengths on the host; waits for the device."""
        return self.lengths_B.tolist()

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor]:
        """int32 [2] and [B, 2]: 0 and the number of rows; 0 and the keys of each slot. Made without a wait."""
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
    """Row t of slot b reads the cache rows [0, lengths[b] + t], the last `window` of them.

    Args:
        q_BTHd: queries after RoPE.
        keys_BSKd, values_BSKd: cache rows, the pass's own at [lengths[b], lengths[b] + T); what lies beyond is never
            read (it may be NaN). Their strides may differ.
        plan: of the pass.
        window: the number of rows that a row reads at most, itself included; None for all.
        sinks_H: scores of kernels/sinks.py, where there are any.
    Returns: [B, T, H, d] in q's dtype, scores scaled by d ** -0.5.
    """
    if (flash := backend.varlen_attention_for(q_BTHd)) is not None:
        return by_flash(attention_with_sinks(flash, sinks_H), q_BTHd, keys_BSKd, values_BSKd, plan, window)
    if (triton := backend.triton_kernels("tree_attention", q_BTHd.device.type)) is not None:
        return in_slices(triton, q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, window, sinks_H)
    if rows.attends_chains(q_BTHd):
        return rows.chain_rows(q_BTHd, keys_BSKd, values_BSKd, plan.lengths_B, window, sinks_H)
    out = []
    for slot, length in enumerate(plan.starts):
        own, read = slice(slot, slot + 1), slice(first_read(length, window), length + plan.n_rows)
        out.append(in_parts(q_BTHd[own], keys_BSKd[own, read], values_BSKd[own, read], window, sinks_H))
    return out[0] if len(out) == 1 else torch.cat(out)


def prompt_attention(
    q_BTHd: Tensor,
    k_BTKd: Tensor,
    v_BTKd: Tensor,
    prompt_lengths: Sequence[int],
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`chain_attention` of whole prompts of these lengths, padded behind their ends; zeros or anything there.

    On a CPU prompt by prompt, so that what one gives does not depend on the others, and the short ones through the C
    kernels: with the bits that they have in chunks (kernels/tree_attention.py).
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
    for slot, count in enumerate(prompt_lengths):
        own = slice(slot, slot + 1), slice(count)
        qkv = q_BTHd[own], k_BTKd[own], v_BTKd[own]
        few = count <= rows.MOST_ATTENTION_ROWS and rows.can_attend(q_BTHd)
        if count and (few or rows.attends_chains(q_BTHd)):
            out_BTHd[own] = rows.chain_rows(*qkv, start_B[:1], window, sinks_H)
        elif count:
            out_BTHd[own] = in_parts(*qkv, window, sinks_H)
    return out_BTHd


def first_read(length: int, window: int | None) -> int:
    """The first cache row that a row behind so many committed ones reads."""
    return 0 if window is None else max(0, length - window + 1)


def by_flash(
    attention: Callable[..., Tensor],
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    plan: ChainPlan,
    window: int | None,
) -> Tensor:
    """`chain_attention` by a function like `backend.varlen_attention`, a call a slot; reads no length to the host."""
    q_borders, k_borders_B2 = plan.borders
    n_rows, capacity = q_BTHd.shape[1], keys_BSKd.shape[1]
    slots = zip(q_BTHd, keys_BSKd, values_BSKd, k_borders_B2, strict=True)
    out = [attention(q, k, v, q_borders, ends, n_rows, capacity, window) for q, k, v, ends in slots]
    return out[0][None] if len(out) == 1 else torch.stack(out)


def in_slices(
    triton: Any,
    q_BTHd: Tensor,
    keys_BSKd: Tensor,
    values_BSKd: Tensor,
    lengths_B: Tensor,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`chain_attention` by functions like those of triton_impl/tree_attention.py, MOST_ROWS rows at a time: to each the
    pass's rows before it are committed."""
    out = []
    for start in range(0, q_BTHd.shape[1], MOST_ROWS):
        q = q_BTHd[:, start : start + MOST_ROWS]
        chain = pack_tree(None, len(q), q.shape[1], q.device)
        part, lse = triton.tree_attention(q, keys_BSKd, values_BSKd, lengths_B + start, *chain, False, window)
        out.append(with_sinks(part, lse, sinks_H))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def in_parts(
    q_1THd: Tensor, k_1SKd: Tensor, v_1SKd: Tensor, window: int | None, sinks_H: Tensor | None = None
) -> Tensor:
    """Query t reads keys 0 .. S - T + t, the last `window` of them, without a mask: [1, T, H, d].

    Rows are taken in blocks in which no row leaves out another. To such a block keys are of three kinds: those that all
    of its rows read; its own, a causal square; and those that the window takes from one row after the other, which are
    a causal square too, read backwards.
    """
    n_rows, n_keys = q_1THd.shape[1], k_1SKd.shape[1]
    before, window = n_keys - n_rows, n_keys if window is None else window
    q_1HTd, k_1KSd, v_1KSd = (x.transpose(1, 2) for x in (q_1THd, k_1SKd, v_1SKd))
    # From row `window - before` on, key 0 is not read any more.
    edges = sorted({0, *range(max(0, window - before), n_rows, window), n_rows})
    done = []
    for start, stop in pairwise(edges):
        q, own, last = q_1HTd[:, :, start:stop], before + start, before + stop
        part = _part(q, k_1KSd[:, :, own:last], v_1KSd[:, :, own:last], causal=True)
        common = max(0, last - window)
        if common < own:
            part = merge(part, _part(q, k_1KSd[:, :, common:own], v_1KSd[:, :, common:own]))
        if common and stop - start > 1:  # the last row reads none of these
            edge = slice(own - window + 1, common)
            backwards = _part(*(x.flip(2) for x in (q[:, :, :-1], k_1KSd[:, :, edge], v_1KSd[:, :, edge])), causal=True)
            some = merge([x[:, :, :-1] for x in part], [x.flip(2) for x in backwards])
            part = [torch.cat((x, whole[:, :, -1:]), 2) for x, whole in zip(some, part, strict=True)]
        done.append(with_sinks(part[0].transpose(1, 2), part[1].transpose(1, 2), sinks_H))
    return done[0] if len(done) == 1 else torch.cat(done, 1)


def _part(q_1HTd: Tensor, k_1KSd: Tensor, v_1KSd: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Attention over all of these keys, or over a causal square of them, and its log-sum-exps [1, H, T]."""
    if q_1HTd.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_1HTd, k_1KSd, v_1KSd, is_causal=causal)
    # Knows no groups: a key head's queries are the heads of a sequence of their own.
    q_KGTd = q_1HTd[0].unflatten(0, (k_1KSd.shape[1], -1))
    keys, values = (x[0][:, None].expand(-1, q_KGTd.shape[1], -1, -1) for x in (k_1KSd, v_1KSd))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out_KGTd, lse_KGX, *_ = efficient(q_KGTd, keys, values, None, True, is_causal=causal)
    return out_KGTd.flatten(0, 1)[None], lse_KGX.flatten(0, 1)[None, :, : q_1HTd.shape[2]]  # these are padded


def merge(new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention of the same rows over two sets of keys: over both."""
    (new_1HTd, new_lse_1HT), (old_1HTd, old_lse_1HT) = new, old
    share_1HT1 = torch.sigmoid(new_lse_1HT - old_lse_1HT)[..., None]
    out_1HTd = torch.lerp(old_1HTd.to(share_1HT1.dtype), new_1HTd.to(share_1HT1.dtype), share_1HT1)
    return out_1HTd.to(new_1HTd.dtype), torch.logaddexp(new_lse_1HT, old_lse_1HT)
