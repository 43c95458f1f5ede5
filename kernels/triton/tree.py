"""The accepted path and the moving of its rows (kernels/tree.py) in Triton.

The path is one warp per slot, with the slot's nodes in registers. Rows move in one launch for all layers, slots, keys
and values: a program owns some columns, of all key heads together, of one layer and slot and moves its rows in order,
so programs never touch the same memory. `keep_rows` explains why no source is overwritten before it is read. For the
same reason a load may run ahead of earlier stores: it reads above all of their targets.

Shapes: B slots, N tree nodes, P places of a path, L layers, S cache capacity, R rows to keep, K key/value heads, d head
width. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block, s_ stride.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024


@triton.jit
def _accepted_path(
    p_tokens, p_parents, p_choices, p_active, p_nodes, p_chosen, p_counts,
    s_tb, s_tn, s_pb, s_pn, s_cb, s_cn, s_ab, n_nodes, n_places, BLOCK: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < n_nodes
    b_tokens = tl.load(p_tokens + i_b * s_tb + o_n * s_tn, mask=m_n, other=0)
    b_parents = tl.load(p_parents + i_b * s_pb + o_n * s_pn, mask=m_n, other=-2)
    b_choices = tl.load(p_choices + i_b * s_cb + o_n * s_cn, mask=m_n, other=0)
    active = tl.load(p_active + i_b * s_ab).to(tl.int64)
    node = tl.min(o_n, 0)
    count = active
    for i in range(0, n_places):
        chosen = tl.sum(tl.where(o_n == node, b_choices, 0), 0)
        tl.store(p_nodes + i_b * n_places + i, node)
        tl.store(p_chosen + i_b * n_places + i, chosen)
        child = tl.min(tl.where((b_parents == node) & (b_tokens == chosen), o_n, BLOCK), 0)
        # Without a child the node stays the same, and never gets a child: only steps to a child count.
        leads_on = (child < BLOCK) & (i + 1 < n_places)
        count += tl.where(leads_on, active, 0)
        node = tl.where(leads_on, child, node)
    tl.store(p_counts + i_b, count)


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.tree.accepted_path`."""
    n_slots, n_nodes = tokens_BN.shape
    nodes_BP = torch.empty((n_slots, max_depth + 1), dtype=torch.int64, device=tokens_BN.device)
    chosen_BP = torch.empty_like(nodes_BP)
    counts_B = torch.empty(n_slots, dtype=torch.int64, device=tokens_BN.device)
    kernel: Any = _accepted_path[(n_slots,)]
    kernel(
        tokens_BN, parents_BN, choices_BN, active_B, nodes_BP, chosen_BP, counts_B,
        *tokens_BN.stride(), *parents_BN.stride(), *choices_BN.stride(), *active_B.stride(),
        n_nodes, max_depth + 1, BLOCK=triton.next_power_of_2(n_nodes), num_warps=1,
    )  # fmt: skip
    return nodes_BP, chosen_BP, counts_B


@triton.jit
def _move(
    p_k, p_v, p_length, p_rows, p_count,
    k_l, k_b, k_s, k_h, v_l, v_b, v_s, v_h, length_b, r_b, r_r, count_b, n_columns,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_c, i_b, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < n_columns
    o_h, o_d = (o_c // WIDTH).to(tl.int64), o_c % WIDTH
    length = tl.load(p_length + i_b * length_b).to(tl.int64)
    count = tl.load(p_count + i_b * count_b).to(tl.int32)
    p_k0 = p_k + i_l * k_l + i_b * k_b + length * k_s + o_h * k_h + o_d
    p_v0 = p_v + i_l * v_l + i_b * v_b + length * v_s + o_h * v_h + o_d
    p_row, p_kt, p_vt = p_rows + i_b * r_b, p_k0, p_v0
    for i in range(0, count):
        row = tl.load(p_row).to(tl.int64)
        if row != i:
            b_k = tl.load(p_k0 + row * k_s, mask=m_c, other=0.0)
            b_v = tl.load(p_v0 + row * v_s, mask=m_c, other=0.0)
            tl.store(p_kt, b_k, mask=m_c)
            tl.store(p_vt, b_v, mask=m_c)
        p_row += r_r
        p_kt += k_s
        p_vt += v_s


def keep_rows(keys_LBSKd: Tensor, values_LBSKd: Tensor, lengths_B: Tensor, rows_BR: Tensor, counts_B: Tensor) -> None:
    """See `longdraft.kernels.tree.keep_rows`."""
    n_layers, n_slots, _, n_kv, width = keys_LBSKd.shape
    assert keys_LBSKd.stride(-1) == values_LBSKd.stride(-1) == 1, "rows must lie together within a head"
    n_columns = n_kv * width
    block = min(COLUMNS, triton.next_power_of_2(n_columns))
    kernel: Any = _move[(triton.cdiv(n_columns, block), n_slots, n_layers)]
    kernel(
        keys_LBSKd, values_LBSKd, lengths_B, rows_BR, counts_B,
        *keys_LBSKd.stride()[:4], *values_LBSKd.stride()[:4], *lengths_B.stride(), *rows_BR.stride(),
        *counts_B.stride(), n_columns, WIDTH=width, BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
