"""kernels/keep_rows.py in Triton: one launch for all layers, slots, keys and values.

A program owns some columns, of all key heads together, of one layer and slot and moves its rows in order, so programs
never touch the same memory. kernels/keep_rows.py explains why no source is overwritten before it is read. For the same
reason a load may run ahead of earlier stores: it reads above all of their targets.

Shapes: L layers, B slots, S cache capacity, R rows to keep, K key/value heads, d head width. Prefixes: i_ index,
o_ offsets, m_ mask, p_ pointer, b_ block.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024


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
    """See `longdraft.kernels.keep_rows.keep_rows`."""
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
