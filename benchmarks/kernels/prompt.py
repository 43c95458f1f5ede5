"""Attention of a chunk of a prompt over a long cache: ours, which is the fastest installed, beside each flash kernel.

Shapes: N query tokens of the chunk, S committed rows, C capacity, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.kernels.attention import SPARE, attention_work
from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Build, Run, check_error, race
from longdraft.kernels import backend
from longdraft.kernels.chain_attention import by_flash, chain_attention
from longdraft.kernels.tree import PassPlan, attended_rows
from longdraft.kernels.tree_attention import tree_attention_reference as reference

CHUNKS = {"cuda": 2048, "cpu": 512}  # query tokens of a prefill pass, as of the engine
CHECKED = 32  # the last rows of an output are compared


@dataclass
class Case:
    """One slot's queries, keys and values; of the last rows the outputs of the fp32 reference and of PyTorch."""

    q_1NHd: Tensor
    keys_1CKd: Tensor
    values_1CKd: Tensor
    plan: PassPlan
    exact: Tensor
    plain: Tensor


def make_case(bench: Bench, profile: str, context: int) -> Case:
    """Random rows, with zeros in the capacity after them."""
    config, generator = PROFILES[profile], torch.Generator(bench.device).manual_seed(context)
    n_rows = CHUNKS[bench.device.type]
    stop = context + n_rows

    def draw(n_tokens: int, heads: int) -> Tensor:
        shape = 1, n_tokens, heads, config.head_dim
        return torch.randn(shape, generator=generator, device=bench.device, dtype=bench.dtype)

    q, keys, values = draw(n_rows, config.n_heads), *(draw(stop + SPARE, config.n_kv_heads) for _ in range(2))
    keys[:, stop:] = values[:, stop:] = 0
    last, before = q[:, -CHECKED:], torch.tensor([stop - CHECKED], device=bench.device)
    mask = attended_rows(before, CHECKED, stop, None, None)
    rows = (x.transpose(1, 2) for x in (last, keys[:, :stop], values[:, :stop]))
    plain = scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    exact = reference(last.float(), keys, values, before)[0]
    plan = PassPlan(torch.tensor([context], device=bench.device), n_rows)
    return Case(q, keys, values, plan, exact, plain)


def _ours(case: Case) -> Run:
    return lambda: chain_attention(case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.plan)


def _by(attention: Callable[..., Any]) -> Build:
    return lambda case: lambda: by_flash(attention, case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.plan, None)


IMPLEMENTATIONS: dict[str, Build] = {
    OURS: _ours,
    "PyTorch's flash": _by(backend.torch_varlen()),
    "flash-attn 2": _by(backend._flash_attn),
    "FlashAttention-3": _by(backend._flash_attn_3),
    "FlashAttention-4": _by(backend._flash_attn_4),
}


def check(name: str, case: Case, found: Tensor) -> None:
    """Allow twice plain PyTorch's error."""
    check_error(found[:, -CHECKED:], case.exact, case.plain, largest=name == OURS)


@torch.no_grad()
def measure(
    bench: Bench, profile: str, contexts: Sequence[int], builds: Mapping[str, Build] = IMPLEMENTATIONS
) -> list[dict]:
    """Return a row of every implementation for each context, on a CPU of ours alone."""
    found, n_rows = list[dict](), CHUNKS[bench.device.type]
    builds = builds if bench.device.type == "cuda" else {OURS: builds[OURS]}
    for context in contexts:
        shape = {"benchmark": "prompt", "profile": profile, "context": context, "nodes": n_rows}
        pairs = n_rows * (n_rows + 1) // 2
        work = attention_work(PROFILES[profile], context, n_rows, bench.dtype.itemsize, pairs)
        found += race(bench, shape, builds, [make_case(bench, profile, context)], check, work)
    return found
