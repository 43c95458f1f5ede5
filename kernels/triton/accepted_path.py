"""kernels/accepted_path.py in Triton: one warp per slot, with the slot's nodes in registers.

Shapes: B slots, N tree nodes, P places of a path. Prefixes: i_ index, o_ offsets, m_ mask, p_ pointer, b_ block,
s_ stride.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """See `longdraft.kernels.accepted_path.accepted_path`."""
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
