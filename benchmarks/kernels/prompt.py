"""Attention of a prompt's chunk over a long cache: ours (the fastest installed kernel) beside each flash kernel.

Shapes: N query tokens of the chunk, S committed rows, C capacity, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.kernels.attention import attention_work, heads_first, random_rows
from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Build, Run, race
from longdraft.kernels import backend
from longdraft.kernels.chain_attention import by_flash, chain_attention
from longdraft.kernels.tree import PassPlan, attended_rows
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.models.passes import prompt_rows

CHECKED = 32  # only the last rows of an output are compared


@dataclass
class Case:
    """One slot's queries, keys and values; and the last rows of the fp32 reference's and PyTorch's outputs."""

    q_1NHd: Tensor
    keys_1CKd: Tensor
    values_1CKd: Tensor
    plan: PassPlan
    exact: Tensor
    plain: Tensor


def make_case(bench: Bench, profile: str, context: int, n_rows: int) -> Case:
    """Random rows, with zeros in the capacity after them."""
    q, keys, values = random_rows(bench, PROFILES[profile], context, n_rows, 0.0)
    stop = context + n_rows
    last, before = q[:, -CHECKED:], torch.tensor([stop - CHECKED], device=bench.device)
    mask = attended_rows(before, CHECKED, stop, None, None)
    rows = heads_first(last, keys[:, :stop], values[:, :stop])
    plain = scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    exact = reference(last.float(), keys, values, before)[0]
    plan = PassPlan(torch.tensor([context], device=bench.device), n_rows)
    return Case(q, keys, values, plan, exact, plain)


def _ours(case: Case) -> Run:
    return lambda: chain_attention(case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.plan)[:, -CHECKED:]


def _by(attention: Callable[..., Any]) -> Build:
    def build(case: Case) -> Run:
        rows = case.q_1NHd, case.keys_1CKd, case.values_1CKd
        return lambda: by_flash(attention, *rows, case.plan, None)[:, -CHECKED:]

    return build


IMPLEMENTATIONS: dict[str, Build] = {
    OURS: _ours,
    "PyTorch's flash": _by(backend.torch_varlen()),
    "flash-attn 2": _by(backend._flash_attn),
    "FlashAttention-3": _by(backend._flash_attn_3),
    "FlashAttention-4": _by(backend._flash_attn_4),
}


@torch.no_grad()
def measure(bench: Bench, profile: str, context: int) -> list[dict]:
    """Return one row for every implementation; on a CPU only for ours."""
    n_rows, on_gpu = prompt_rows(bench.device.type), bench.device.type == "cuda"
    work = attention_work(PROFILES[profile], context, n_rows, bench.dtype.itemsize, n_rows * (n_rows + 1) // 2)
    shape = {"benchmark": "prompt", "profile": profile, "context": context, "nodes": n_rows}
    builds = IMPLEMENTATIONS if on_gpu else {OURS: _ours}
    return race(bench, shape, builds, [make_case(bench, profile, context, n_rows)], work)
