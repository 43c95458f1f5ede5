"""The steps of kernels/gated_delta.py in Triton: one launch for each function.

A program holds some columns of one head's memory and takes the rows in turn. Where a row's parent is not the row
before it, it starts again from the memory before the pass and takes the row's ancestors, so no memory is written.
Reading and advancing are one kernel with the same arithmetic, so that a row has the same bits in both.

Shapes: B slots, T rows, V heads, k key width, v value width. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer,
b_ block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longdraft.kernels.gated_delta import DeltaTokens

COLUMNS = 32  # of a memory, in a program


@triton.jit
def _step(b_memory, p_k, p_v, p_g, p_beta, i_token, o_k, o_v, m_k, m_v, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """A memory after one more token."""
    b_k = tl.load(p_k + i_token * KEYS + o_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v + i_token * VALUES + o_v, mask=m_v, other=0.0)
    b_memory *= tl.exp(tl.load(p_g + i_token))
    b_u = (b_v - tl.sum(b_memory * b_k[:, None], 0)) * tl.load(p_beta + i_token)
    return b_memory + b_k[:, None] * b_u[None]


@triton.jit(do_not_specialize=("n_rows", "n_heads", "reads"))  # one kernel for all
def _steps(
    p_q, p_k, p_v, p_g, p_beta, p_memory, p_counts, p_parents, p_depth, p_path, p_result, n_rows, n_heads, reads,
    KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    i_head, i_b = tl.program_id(0), (tl.program_id(0) // n_heads).to(tl.int64)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < KEYS, o_v < VALUES
    o_memory = i_head.to(tl.int64) * (KEYS * VALUES) + o_k[:, None] * VALUES + o_v[None]
    m_memory = m_k[:, None] & m_v[None]
    b_memory = tl.load(p_memory + o_memory, mask=m_memory, other=0.0)
    i_first = i_b * n_rows * n_heads + i_head % n_heads  # of the slot's first token
    for i_t in range(tl.where(reads == 0, tl.load(p_counts + i_b), n_rows)):
        i_token = i_first + i_t * n_heads
        if reads:
            i_parent = tl.load(p_parents + i_b * n_rows + i_t)
            if i_parent != i_t - 1:
                b_memory = tl.load(p_memory + o_memory, mask=m_memory, other=0.0)
                for i_depth in range(tl.load(p_depth + i_b * n_rows + i_t)):
                    i_ancestor = tl.load(p_path + (i_b * n_rows + i_t) * n_rows + i_depth)
                    i_before = i_first + i_ancestor * n_heads
                    b_memory = _step(b_memory, p_k, p_v, p_g, p_beta, i_before, o_k, o_v, m_k, m_v, KEYS, VALUES)
        b_memory = _step(b_memory, p_k, p_v, p_g, p_beta, i_token, o_k, o_v, m_k, m_v, KEYS, VALUES)
        if reads:
            b_q = tl.load(p_q + i_token * KEYS + o_k, mask=m_k, other=0.0)
            tl.store(p_result + i_token * VALUES + o_v, tl.sum(b_memory * b_q[:, None], 0), mask=m_v)
    if reads == 0:
        tl.store(p_result + o_memory, b_memory, mask=m_memory)


def tree_steps(
    tokens: DeltaTokens, memory_BVkv: Tensor, parent_BT: Tensor, depth_BT: Tensor, path_BTT: Tensor | None
) -> Tensor:
    """See `longdraft.kernels.gated_delta.tree_steps_reference`."""
    result_BTVv = torch.empty_like(tokens[2], memory_format=torch.contiguous_format)
    parent_BT = parent_BT.contiguous()
    tree = parent_BT, depth_BT.contiguous(), depth_BT if path_BTT is None else path_BTT
    _launch(tokens, memory_BVkv, parent_BT, tree, result_BTVv)
    return result_BTVv


def advance_steps(tokens: DeltaTokens, memory_BVkv: Tensor, counts_B: Tensor) -> Tensor:
    """See `longdraft.kernels.gated_delta.advance_steps_reference`."""
    result_BVkv = torch.empty_like(memory_BVkv, memory_format=torch.contiguous_format)
    _launch(tokens, memory_BVkv, counts_B.contiguous(), None, result_BVkv)
    return result_BVkv


def _launch(
    tokens: DeltaTokens,
    memory_BVkv: Tensor,
    counts_B: Tensor,
    tree: tuple[Tensor, Tensor, Tensor] | None,
    result: Tensor,
) -> None:
    q, k, v, g, beta = (x.contiguous() for x in tokens)
    (n_slots, n_rows, n_heads, width), values = k.shape, v.shape[3]
    unread = counts_B, *[counts_B.view(torch.int32)] * 2  # of the types of a tree's, so that it is the same kernel
    block_v = min(COLUMNS, triton.next_power_of_2(values))
    kernel: Any = _steps[(n_slots * n_heads, -(-values // block_v))]
    kernel(
        q, k, v, g, beta, memory_BVkv.contiguous(), counts_B, *(tree or unread), result,
        n_rows, n_heads, int(tree is not None),
        KEYS=width, VALUES=values, BLOCK_K=triton.next_power_of_2(width), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
