"""Static tree shapes: which combinations of ranks are nodes. Not here: how many of them pay (infer/policy.py).

A node is the path of ranks that leads to it: (0,) the best candidate of level 1, (0, 2) the third of level 2 below it.
Shapes: B slots, I levels, K ranks, N nodes with the root.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.infer.tree import ROOT, TokenTree


@dataclass(frozen=True)
class TreeShape:
    """Nodes as rank paths, every parent before its children."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        known: set[tuple[int, ...]] = {()}
        for node in self.nodes:
            if node[:-1] not in known or node in known:
                raise ValueError(f"tree: node {node} must come once, and after its parent {node[:-1]}")
            known.add(node)

    @staticmethod
    def cartesian(levels: Sequence[int]) -> "TreeShape":
        """Every combination of the first levels[i] ranks: (3, 3, 3) gives 3 + 9 + 27 nodes."""
        level: list[tuple[int, ...]] = [()]
        nodes: list[tuple[int, ...]] = []
        for width in levels:
            level = [(*path, rank) for path in level for rank in range(width)]
            nodes += level
        return TreeShape(tuple(nodes))

    @property
    def depth(self) -> int:
        return max((len(node) for node in self.nodes), default=0)

    @property
    def ranks(self) -> int:
        """How many ranks a level must offer."""
        return 1 + max((node[-1] for node in self.nodes), default=0)


class TreeTemplate:
    """A shape's parents, depths and ancestors on a device, for `batch` slots, computed once.

    Attributes:
        parents: of every slot, on the host.
        tree: with no tokens yet; `classes` are the root's and the nodes' (TokenTree.classes).
    """

    def __init__(self, shape: TreeShape, batch: int, device, classes: Sequence[int] | None = None):
        index = {(): 0} | {node: i + 1 for i, node in enumerate(shape.nodes)}
        self.parents = parents = [ROOT] + [index[node[:-1]] for node in shape.nodes]
        rows = [[0] * len(parents), parents, *([] if classes is None else [list(classes)])]
        self.tree = TokenTree(*(torch.tensor([row] * batch, device=device) for row in rows))
        _ = self.tree.ancestors, self.tree.depths
        slots = [(len(node) - 1) * shape.ranks + node[-1] for node in shape.nodes]
        self._slots_N = torch.tensor(slots, dtype=torch.int64, device=device)

    def fill(self, roots_B: Tensor, ranked_BIK: Tensor) -> TokenTree:
        """The tree whose node (.., r) at level i carries ranked_BIK[b, i, r]; int64 tokens."""
        tokens = ranked_BIK.flatten(1).index_select(1, self._slots_N)
        return self.tree.with_tokens(torch.cat([roots_B[:, None], tokens], dim=1))


def path_rate(rank_rates: Sequence[Sequence[float]], node: Sequence[int]) -> float:
    """The chance that a path is accepted up to this node."""
    rate = 1.0
    for level, rank in enumerate(node):
        rate *= rank_rates[level][rank]
    return rate


def likeliest_nodes(rank_rates: Sequence[Sequence[float]], count: int) -> TreeShape:
    """The `count` nodes most likely to be accepted: the best static tree of that size."""
    nodes: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while heap and len(nodes) <= count:
        _, node = heapq.heappop(heap)
        nodes.append(node)
        if len(node) < len(rank_rates):
            for rank in range(len(rank_rates[len(node)])):
                heapq.heappush(heap, (-path_rate(rank_rates, (*node, rank)), (*node, rank)))
    return TreeShape(tuple(nodes[1:]))
