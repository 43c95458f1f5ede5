"""Tree attention of one layer over a long cache: our implementations beside those of others.

What all layers of a pass share (masks, bits, block masks, the host's copy of the lengths) is computed before the clock
starts, for every candidate. Each peer is set up as well as possible: grouped heads are folded into the query rows if
that avoids expanding K and V, masks are additive, and what follows a flash kernel is one compiled kernel on a GPU.
Shapes: N query tokens of the pass, S committed rows, C capacity, H query heads, K key/value heads, G = H / K,
Q = G * N, d head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.kernels.candidates import OURS, Build, Run, Unavailable, race, refused, too_far
from longdraft.benchmarks.kernels.profiles import Profile
from longdraft.benchmarks.kernels.timing import Bench, free_bytes
from longdraft.kernels import tree_attention as ours
from longdraft.kernels.backend import has_flash_attn, triton_kernels
from longdraft.kernels.cpu import rows
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.kernels.tree_mask import pack_tree

SMALL = 1037  # committed rows of the compared case, if the timed case's reference does not fit into memory
SPARE = 23  # rows of capacity after the pass


@dataclass
class Case:
    """One slot's queries, keys and values. `exact` is the output of the fp32 reference, `plain` that of PyTorch's
    attention in the same precision; both are None if nothing is compared. `tree_mask_1NN` is None for a single row."""

    q_1NHd: Tensor
    keys_1CKd: Tensor
    values_1CKd: Tensor
    length: int
    tree_mask_1NN: Tensor | None
    exact: Tensor | None = None
    plain: Tensor | None = None

    @property
    def n_query_tokens(self) -> int:
        return self.q_1NHd.shape[1]

    @property
    def n_kv_heads(self) -> int:
        return self.keys_1CKd.shape[2]

    @property
    def groups(self) -> int:
        return self.q_1NHd.shape[2] // self.n_kv_heads

    @property
    def lengths_1(self) -> Tensor:
        return torch.tensor([self.length], device=self.q_1NHd.device)

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views q [1, H, N, d], k and v [1, K, S + N, d] of the rows that were written."""
        stop = self.length + self.n_query_tokens
        q, k, v = self.q_1NHd, self.keys_1CKd[:, :stop], self.values_1CKd[:, :stop]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def own_mask(self) -> Tensor:
        """Bool [N, N]: which of the pass's own rows each of them attends to."""
        if self.tree_mask_1NN is not None:
            return self.tree_mask_1NN[0]
        return torch.ones(1, 1, dtype=torch.bool, device=self.q_1NHd.device)

    def full_mask(self) -> Tensor:
        """Bool [N, S + N]: all committed rows, and the tree."""
        own_NN = self.own_mask()
        return torch.cat((own_NN.new_ones(self.n_query_tokens, self.length), own_NN), 1)

    def folded(self) -> Tensor:
        """Queries [1, K, Q, d]: row g * N + n of key head k is row n of query head k * G + g."""
        q_1NKGd = self.q_1NHd.unflatten(2, (self.n_kv_heads, self.groups))
        return q_1NKGd.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfolded(self, x_1KQd: Tensor) -> Tensor:
        """Undo `folded`, for any last dimension: [1, N, H, d]."""
        x_1KGNd = x_1KQd.unflatten(2, (self.groups, self.n_query_tokens))
        return x_1KGNd.permute(0, 3, 1, 2, 4).flatten(2, 3)


def random_tree(n_nodes: int) -> Tensor:
    """Bool [N, N]: each node's ancestors and itself, in a tree where any earlier node may be the parent."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.eye(n_nodes, dtype=torch.bool)
    for node in range(1, n_nodes):
        mask[node] |= mask[int(torch.randint(0, node, (), generator=generator))]
    return mask


def make_case(bench: Bench, profile: Profile, context: int, nodes: int, compared: bool) -> Case:
    """Random rows with NaN in the capacity after them, and with `exact` and `plain` if the case is to be compared."""
    generator = torch.Generator(bench.device).manual_seed(context + nodes)

    def draw(n_tokens: int, heads: int) -> Tensor:
        shape = 1, n_tokens, heads, profile.head_dim
        return torch.randn(shape, generator=generator, device=bench.device, dtype=bench.dtype)

    capacity = context + nodes + SPARE
    keys, values = draw(capacity, profile.n_kv_heads), draw(capacity, profile.n_kv_heads)
    keys[:, context + nodes :] = values[:, context + nodes :] = float("nan")
    tree = None if nodes == 1 else random_tree(nodes).to(bench.device)[None]
    case = Case(draw(nodes, profile.n_heads), keys, values, context, tree)
    if compared:
        case.exact = reference(case.q_1NHd.float(), keys, values, case.lengths_1, tree)
        plain = scaled_dot_product_attention(*case.heads_first(), attn_mask=case.full_mask(), enable_gqa=True)
        case.plain = plain.transpose(1, 2)
    return case


def _public(case: Case) -> Run:
    lengths, tree = case.lengths_1, case.tree_mask_1NN
    plan = ours.PassPlan(lengths, case.n_query_tokens, tree)
    return lambda: ours.tree_attention(case.q_1NHd, case.keys_1CKd, case.values_1CKd, lengths, tree, None, plan)


def _triton(case: Case) -> Run:
    if not case.q_1NHd.is_cuda:
        raise Unavailable("Triton needs a CUDA device; its interpreter on a CPU is for tests alone")
    kernels = triton_kernels("tree_attention", "cuda")
    if kernels is None:
        raise Unavailable("triton is not installed")
    lengths, tree = case.lengths_1, case.tree_mask_1NN
    plan = ours.PassPlan(lengths, case.n_query_tokens, tree)
    arguments = case.q_1NHd, case.keys_1CKd, case.values_1CKd, lengths, *plan.tree, tree is not None
    return lambda: kernels.tree_attention(*arguments)[0]


def _c(case: Case) -> Run:
    if case.q_1NHd.is_cuda:
        raise Unavailable("the C kernels are for CPUs")
    if not rows.can_attend(case.q_1NHd):
        raise Unavailable(f"no C compiler, or {case.q_1NHd.dtype} and this head width are not the C kernels'")
    arguments = case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.lengths_1, case.tree_mask_1NN, None
    return lambda: rows.attention_rows(*arguments)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def _sdpa(case: Case) -> Run:
    _, k, v = case.heads_first()
    # A single row attends to everything, and the call without a mask is faster.
    mask = None if case.n_query_tokens == 1 else _additive(case.full_mask(), k.dtype).repeat(case.groups, 1)
    return lambda: case.unfolded(scaled_dot_product_attention(case.folded(), k, v, attn_mask=mask))


def _flex(case: Case) -> Run:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = case.heads_first()
    own, length, last = case.own_mask(), case.length, case.n_query_tokens - 1

    def opened(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key < length) | own[row.clamp(max=last), (key - length).clamp(0, last)]

    torch._dynamo.reset()  # otherwise PyTorch stops compiling after several shapes
    blocks = create_block_mask(opened, 1, 1, case.n_query_tokens, k.shape[2], device=q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> Tensor:
        with torch.no_grad():
            out = compiled(q, k, v, block_mask=blocks, enable_gqa=case.groups > 1)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run


def _own_rows(case: Case) -> Callable[[], tuple[Tensor, Tensor]]:
    """() -> (output [1, N, H, d], log-sum-exp [1, N, H]) of attention over the pass's own rows: our Triton kernel on a
    GPU, as in LongSpec's program, and elsewhere a dense product in fp32."""
    stop = case.length + case.n_query_tokens
    k, v = case.keys_1CKd[:, case.length : stop], case.values_1CKd[:, case.length : stop]
    kernels = triton_kernels("tree_attention", k.device.type)
    if kernels is not None:
        bits_depths = pack_tree(case.tree_mask_1NN, 1, case.n_query_tokens, k.device)
        nothing = torch.zeros_like(case.lengths_1)
        is_tree = case.tree_mask_1NN is not None
        return lambda: kernels.tree_attention(case.q_1NHd, k, v, nothing, *bits_depths, is_tree)
    bias = _additive(case.own_mask(), torch.float32).repeat(case.groups, 1)

    def run() -> tuple[Tensor, Tensor]:
        q_KQd, k_KNd, v_KNd = case.folded()[0].float(), k[0].transpose(0, 1).float(), v[0].transpose(0, 1).float()
        scores = q_KQd @ k_KNd.mT * k.shape[-1] ** -0.5 + bias
        lse = scores.logsumexp(-1, keepdim=True)
        return case.unfolded(((scores - lse).exp() @ v_KNd)[None]), case.unfolded(lse[None])[..., 0]

    return run


def _merge(old: Tensor, old_lse: Tensor, new: Tensor, new_lse: Tensor) -> Tensor:
    """Merge attention outputs over different keys [1, N, H, d] by their log-sum-exps [1, N, H], in old's dtype."""
    weight = torch.sigmoid(new_lse.float() - old_lse.float())[..., None]
    return torch.lerp(old.float(), new.float(), weight).to(old.dtype)


def _merged(case: Case, prefix: Callable[[], tuple[Tensor, Tensor]]) -> Run:
    """Attention over the prefix, given as () -> (output, log-sum-exp), merged with attention over the tree."""
    tree = _own_rows(case)
    merge = torch.compile(_merge, dynamic=False) if case.q_1NHd.is_cuda else _merge
    return lambda: merge(*prefix(), *tree())


def _flash_attn(case: Case) -> Run:
    if not case.q_1NHd.is_cuda:
        raise Unavailable("flash-attn needs a CUDA device")
    if not has_flash_attn():
        raise Unavailable("flash-attn is not installed; PyTorch's flash backend stands for it")
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    qkv, lengths = (case.q_1NHd, case.keys_1CKd, case.values_1CKd), case.lengths_1.int()

    def prefix() -> tuple[Tensor, Tensor]:
        old, lse_1HN = flash_attn_with_kvcache(*qkv, cache_seqlens=lengths, return_softmax_lse=True)
        return old, lse_1HN.transpose(1, 2)

    return _merged(case, prefix)


def _torch_flash(case: Case) -> Run:
    _, k, v = (x[:, :, : case.length] for x in case.heads_first())
    if k.is_cuda and k.dtype == torch.float32:
        raise Unavailable("PyTorch's flash backend takes fp16 and bf16 on a GPU")
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention if k.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu

    def prefix() -> tuple[Tensor, Tensor]:
        old_1KQd, lse_1KQ = flash(case.folded(), k, v)[:2]
        return case.unfolded(old_1KQd), case.unfolded(lse_1KQ[..., None])[..., 0]

    return _merged(case, prefix)


FLEX = "FlexAttention, block mask"
IMPLEMENTATIONS: dict[str, Build] = {
    OURS: _public,
    f"{OURS}, Triton": _triton,
    f"{OURS}, C": _c,
    "SDPA, dense mask": _sdpa,
    FLEX: _flex,  # before the others that compile, because it clears what was compiled
    "flash-attn prefix + tree": _flash_attn,
    "PyTorch flash prefix + tree": _torch_flash,
}


def _left_out(case: Case) -> Run:
    raise Unavailable("left out of --quick on a CPU, where compiling it takes longer than all else")


def verdict(name: str, case: Any, out: Tensor) -> str | None:
    """Apply the rule of candidates.py, to the largest error for ours and to the norm for peers: those that round before
    they merge sometimes double the largest error, but never the norm."""
    return too_far(out, case.exact, case.plain, largest=name.startswith(OURS))


def measure(
    bench: Bench,
    profile: Profile,
    contexts: list[int],
    nodes: list[int],
    implementations: Mapping[str, Build] = IMPLEMENTATIONS,
) -> list[dict]:
    """Return a row of every implementation for each context and number of rows of a pass."""
    if bench.quick and bench.device.type == "cpu":
        implementations = {name: _left_out if name == FLEX else build for name, build in implementations.items()}
    found = []
    for context in contexts:
        for n_query_tokens in nodes:
            bench.log(f"attention, {profile.name}: {n_query_tokens} rows behind {context}")
            shape = {"benchmark": "attention", "profile": profile.name, "context": context, "nodes": n_query_tokens}
            found += _measure(bench, profile, shape, implementations)
    return found


def _measure(bench: Bench, profile: Profile, shape: dict, implementations: Mapping[str, Build]) -> list[dict]:
    context, nodes = shape["context"], shape["nodes"]
    if bench.left < 0:
        return refused(shape, implementations, bench.spent)
    work = profile.attention_work(context, nodes, bench.itemsize, int(random_tree(nodes).sum()))
    free = free_bytes(bench.device)
    if 2 * work.bytes > free:
        reason = f"K and V take {work.bytes / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        return refused(shape, implementations, reason)
    # The reference holds scores, masked scores and weights of all pairs, and K and V, in fp32.
    compared = 4 * 4 * profile.n_heads * nodes * context + 6 * work.bytes < free
    cases = [make_case(bench, profile, context, nodes, compared)]
    if not compared:
        cases.insert(0, make_case(bench, profile, SMALL, nodes, True))
    return race(bench, shape, implementations, cases, verdict, work)
