"""Inputs of one attention call, and views and masks of them. Not here: who computes it (attention.py).

Shapes: N query tokens of the pass, S committed rows, C capacity, H query heads, K key/value heads, G = H / K,
Q = G * N, d head width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.benchmarks.profiles import Profile
from longdraft.benchmarks.timing import Bench
from longdraft.kernels.reference.tree_attention import tree_attention as reference

SPARE = 23  # rows of capacity behind the pass


@dataclass
class Case:
    """One slot's rows, and what is right: `exact` is the fp32 reference, `plain` PyTorch's attention in the same
    precision; both None where nothing is compared. `tree_mask` is None for one row."""

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
        """Views q [1, H, N, d], k and v [1, K, S + N, d] of what was written."""
        stop = self.length + self.n_query_tokens
        rows = self.q_1NHd, self.keys_1CKd[:, :stop], self.values_1CKd[:, :stop]
        q_1HNd, k_1KSd, v_1KSd = (x.transpose(1, 2) for x in rows)
        return q_1HNd, k_1KSd, v_1KSd

    def own_mask(self) -> Tensor:
        """Bool [N, N]: which of the pass's own rows each of them reads."""
        if self.tree_mask_1NN is not None:
            return self.tree_mask_1NN[0]
        return torch.ones(self.n_query_tokens, self.n_query_tokens, dtype=torch.bool, device=self.q_1NHd.device).tril()

    def full_mask(self) -> Tensor:
        """Bool [N, S + N]: everything committed, and the tree."""
        own_NN = self.own_mask()
        return torch.cat((own_NN.new_ones(self.n_query_tokens, self.length), own_NN), 1)

    def folded(self) -> Tensor:
        """Queries [1, K, Q, d]: row g * N + n of key head k is row n of query head k * G + g."""
        q_1NKGd = self.q_1NHd.unflatten(2, (self.n_kv_heads, self.groups))
        return q_1NKGd.permute(0, 2, 3, 1, 4).flatten(2, 3)

    def unfolded(self, x_1KQd: Tensor) -> Tensor:
        """`folded` undone, of any last dimension: [1, N, H, d]."""
        x_1KGNd = x_1KQd.unflatten(2, (self.groups, self.n_query_tokens))
        return x_1KGNd.permute(0, 3, 1, 2, 4).flatten(2, 3)


def random_tree(n_nodes: int, seed: int = 0) -> Tensor:
    """Bool [N, N]: ancestors and itself, of a tree in which each node's parent is any before it."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.eye(n_nodes, dtype=torch.bool)
    for node in range(1, n_nodes):
        mask[node] |= mask[int(torch.randint(0, node, (), generator=generator))]
    return mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is open, -inf elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def make_case(bench: Bench, profile: Profile, context: int, nodes: int, compared: bool) -> Case:
    """Random rows, NaN in the capacity behind them; with `exact` and `plain` where it is to be compared."""
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
