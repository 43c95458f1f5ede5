"""Attention of one layer over a long cache: of a tree, ours beside its peers; of a chunk of a prompt, ours (the fastest
installed kernel) beside each flash kernel.

What all layers of a pass share (masks, bits, the host's copy of the lengths) is computed before the clock starts, for
every candidate. Each peer is set up to be as fast as possible: grouped heads are folded into the query rows if that
avoids expanding K and V, masks are additive, and the work after a flash kernel is one compiled kernel on a GPU.
Shapes: N query tokens of the pass, S committed rows, C capacity, H query heads, K key/value heads, G = H / K, Q = G *
N, d head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.kernels.race import OURS, PROFILES, Bench, Build, Profile, Run, Work, race
from longdraft.kernels import backend
from longdraft.kernels import tree_attention as ours
from longdraft.kernels.chain_attention import by_flash, chain_attention
from longdraft.kernels.tree import PassPlan, attended_rows
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.models.passes import prompt_rows

SPARE = 23  # rows of capacity after the pass
CHECKED = 32  # only the last rows of a chunk's output are compared
BY_TABLE = f"{OURS}, by the table"


@dataclass
class Case:
    """One slot's queries, keys and values, and the tree of the pass's last rows, bool, where a single row is one, too.
    `exact` is the output of the fp32 reference for these rows, `plain` that of PyTorch's attention in the same
    precision."""

    q_1NHd: Tensor
    keys_1CKd: Tensor
    values_1CKd: Tensor
    length: int
    tree_1NN: Tensor
    exact: Tensor
    plain: Tensor

    @property
    def groups(self) -> int:
        return self.q_1NHd.shape[2] // self.keys_1CKd.shape[2]

    @property
    def lengths_1(self) -> Tensor:
        return torch.tensor([self.length], device=self.q_1NHd.device)

    def folded(self) -> Tensor:
        """Queries [1, K, Q, d]: row g * N + n of key head k is row n of query head k * G + g."""
        q_1NKGd = self.q_1NHd.unflatten(2, (-1, self.groups))
        return q_1NKGd.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfolded(self, x_1KQd: Tensor) -> Tensor:
        """Undo `folded`, for any last dimension: [1, N, H, d]."""
        x_1KGNd = x_1KQd.unflatten(2, (self.groups, self.q_1NHd.shape[1]))
        return x_1KGNd.permute(0, 3, 1, 2, 4).flatten(2, 3)


def heads_first(*rows: Tensor) -> list[Tensor]:
    """[1, N, H, d] -> [1, H, N, d]."""
    return [x.transpose(1, 2) for x in rows]


def random_tree(n_nodes: int) -> Tensor:
    """Bool [N, N]: each node's ancestors and itself, in a tree where any earlier node may be the parent."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.eye(n_nodes, dtype=torch.bool)
    for node in range(1, n_nodes):
        mask[node] |= mask[int(torch.randint(0, node, (), generator=generator))]
    return mask


def make_case(
    bench: Bench, profile: str, context: int, n_rows: int, tree_NN: Tensor, rest: float = float("nan")
) -> Case:
    """Random rows, with the value `rest` in the capacity after them. tree_NN: of the last rows, after a chain of the
    others."""
    config, stop = PROFILES[profile], context + n_rows
    sizes = (n_rows, config.n_heads), *[(stop + SPARE, config.n_kv_heads)] * 2
    generator = torch.Generator(bench.device).manual_seed(stop)
    place = {"generator": generator, "device": bench.device, "dtype": bench.dtype}
    q, keys, values = (torch.randn(1, *size, config.head_dim, **place) for size in sizes)
    keys[:, stop:] = values[:, stop:] = rest
    last, tree = q[:, -len(tree_NN) :], tree_NN.to(bench.device)[None]
    before = torch.tensor([stop - len(tree_NN)], device=bench.device)
    exact = reference(last.float(), keys, values, before, tree)[0]
    rows = heads_first(last, keys[:, :stop], values[:, :stop])
    mask = attended_rows(before, len(tree_NN), stop, tree, None)
    plain = scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
    return Case(q, keys, values, context, tree, exact, plain.transpose(1, 2))


def _plan(case: Case) -> PassPlan:
    n_rows = case.q_1NHd.shape[1]
    return PassPlan(case.lengths_1, n_rows, case.tree_1NN if n_rows > 1 else None)


def _ours(case: Case) -> Run:
    plan, given = _plan(case), (case.q_1NHd, case.keys_1CKd, case.values_1CKd)
    return lambda: ours.tree_attention(*given, plan.lengths_B, plan.tree_mask_BTT, None, plan)


def _by_the_table(case: Case) -> Run:
    """Ours on a GPU with the table's choice, while `_ours` uses the one that was measured."""
    kernels, plan = cast(Any, _triton(case.q_1NHd.device)), _plan(case)
    inputs = case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.lengths_1, plan.bits_BT2, plan.depth_BT
    return lambda: kernels.tree_attention(*inputs, choice=choices(case)[BY_TABLE])[0]


def _triton(device: torch.device) -> Any | None:
    return backend.triton_kernels("tree_attention", device.type)


def choices(case: Case) -> dict[str, Any]:
    """The blocks, stages, warps and programs per processor of each of our implementations' launches."""
    (_, n_rows, n_heads, width), kernels = case.q_1NHd.shape, _triton(case.q_1NHd.device)
    assert kernels is not None
    capacity, n_kv = case.keys_1CKd.shape[1:3]
    shape = kernels.tuning.shape_of(case.q_1NHd.dtype, 1, n_rows, n_heads, n_kv, width, capacity, None)
    table = kernels.tuning.table(shape, n_rows, kernels._device(case.q_1NHd.device)[1])
    return {OURS: kernels.tuning.chosen(case.q_1NHd.device, shape) or table, BY_TABLE: table}


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _rows(case: Case) -> tuple[Tensor, Tensor]:
    """Views of the written rows of K and V, [1, K, S + N, d]."""
    stop = case.length + case.q_1NHd.shape[1]
    k, v = heads_first(case.keys_1CKd[:, :stop], case.values_1CKd[:, :stop])
    return k, v


def _sdpa(case: Case) -> Run:
    k, v = _rows(case)
    n_rows = case.q_1NHd.shape[1]
    mask = attended_rows(case.lengths_1, n_rows, k.shape[2], case.tree_1NN, None)[0]
    # A single row attends to everything, and a call without a mask is faster.
    bias = None if n_rows == 1 else _additive(mask, k.dtype).repeat(case.groups, 1)
    return lambda: case.unfolded(scaled_dot_product_attention(case.folded(), k, v, attn_mask=bias))


def _with_own_rows(
    q_KQd: Tensor, k_KNd: Tensor, v_KNd: Tensor, bias_QN: Tensor, old_KQd: Tensor, old_lse_KQ: Tensor
) -> Tensor:
    """Merge attention over the prefix with attention over the pass's own rows, in fp32; returns old's dtype."""
    scores = q_KQd.float() @ k_KNd.float().mT * q_KQd.shape[-1] ** -0.5 + bias_QN
    lse = scores.logsumexp(-1, keepdim=True)
    own_KQd = (scores - lse).exp() @ v_KNd.float()
    return torch.lerp(old_KQd.float(), own_KQd, torch.sigmoid(lse - old_lse_KQ[..., None])).to(old_KQd.dtype)


def _flash(case: Case) -> Run:
    """PyTorch's flash kernel over the prefix, merged with attention over the tree."""
    (old_k, k), (old_v, v) = ((x[:, :, : case.length], x[0, :, case.length :]) for x in _rows(case))
    bias = _additive(case.tree_1NN[0], torch.float32).repeat(case.groups, 1)
    merge = torch.compile(_with_own_rows, dynamic=False) if k.is_cuda else _with_own_rows
    aten = torch.ops.aten
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
    kernel = aten._scaled_dot_product_flash_attention if k.is_cuda else on_cpu

    def run() -> Tensor:
        q_1KQd = case.folded()
        old, lse = kernel(q_1KQd, old_k, old_v)[:2]
        return case.unfolded(merge(q_1KQd[0], k, v, bias, old[0], lse[0])[None])

    return run


IMPLEMENTATIONS: dict[str, Build] = {
    OURS: _ours,
    "SDPA, dense mask": _sdpa,
    "flash prefix + tree": _flash,
}


def measure(
    bench: Bench, profile: str, context: int, nodes: list[int], builds: dict[str, Build] = IMPLEMENTATIONS
) -> list[dict]:
    """Return one row for every implementation and number of nodes.

    On a GPU ours is tuned first, and has a second row with the table's choice; `choice` tells how each was launched.
    """
    found, config = [], PROFILES[profile]
    on_gpu = _triton(bench.device) is not None
    builds = {**builds, BY_TABLE: _by_the_table} if on_gpu else builds
    for n in nodes:
        sizes, capacity = (config.n_heads, config.n_kv_heads, config.head_dim), context + n + SPARE
        ours.tune(*sizes, [None], bench.dtype, bench.device, capacity, 1, nodes, print)
        case = make_case(bench, profile, context, n, random_tree(n))
        shape = {"profile": profile, "context": context, "nodes": n}
        work = attention_work(config, context, n, bench.dtype.itemsize, int(case.tree_1NN.sum()))
        rows = race(bench, {"benchmark": "attention", **shape}, builds, [case], work)
        launched = choices(case) if on_gpu else {}
        found += [row | {"choice": str(launched.get(row["implementation"], ""))} if on_gpu else row for row in rows]
    return found


def _of_chunk(attention: Callable[..., Tensor]) -> Build:
    """attention: of queries, keys, values and the plan of a chain."""

    def build(case: Case) -> Run:
        given = case.q_1NHd, case.keys_1CKd, case.values_1CKd, PassPlan(case.lengths_1, case.q_1NHd.shape[1])
        return lambda: attention(*given)[:, -CHECKED:]

    return build


FLASH = {
    "PyTorch's flash": backend.torch_varlen(),
    "flash-attn 2": backend._flash_attn,
    "FlashAttention-3": backend._flash_attn_3,
    "FlashAttention-4": backend._flash_attn_4,
}


@torch.no_grad()
def measure_chunk(bench: Bench, profile: str, context: int) -> list[dict]:
    """Return one row for every implementation; on a CPU only for ours."""
    n_rows = prompt_rows(bench.device.type)
    work = attention_work(PROFILES[profile], context, n_rows, bench.dtype.itemsize, n_rows * (n_rows + 1) // 2)
    shape = {"benchmark": "prompt", "profile": profile, "context": context, "nodes": n_rows}
    builds = {OURS: _of_chunk(chain_attention)}
    if bench.device.type == "cuda":
        builds |= {name: _of_chunk(partial(by_flash, kernel, window=None)) for name, kernel in FLASH.items()}
    chain_NN = torch.ones(CHECKED, CHECKED, dtype=torch.bool).tril()
    return race(bench, shape, builds, [make_case(bench, profile, context, n_rows, chain_NN, rest=0.0)], work)


def attention_work(profile: Profile, context: int, nodes: int, itemsize: int, tree_pairs: int) -> Work:
    """One layer's attention in a pass of `nodes` rows after `context` rows: K and V read once, queries read, output
    written; both products over all pairs that are not masked. tree_pairs: those among the pass's own rows."""
    keys_and_values = 2 * (context + nodes) * profile.n_kv_heads * profile.head_dim
    rows = 2 * nodes * profile.n_heads * profile.head_dim
    flops = 4 * profile.n_heads * profile.head_dim * (nodes * context + tree_pairs)
    return Work((keys_and_values + rows) * itemsize, flops)
