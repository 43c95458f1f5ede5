"""Static tree shapes: which combinations of ranks are nodes. How many of them pay off is decided in infer/budget.py.

A node is named by the path of ranks that leads to it: (0,) is the best candidate of level 1, and (0, 2) the third best
candidate of level 2 below it. Shapes: B slots, I levels, K ranks, N nodes with the root.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from longdraft.infer.tree import ROOT, TokenTree
from longdraft.kernels.transfer import from_host


@dataclass(frozen=True)
class TreeShape:
    """The nodes of a tree as rank paths, each parent before its children.

    Attributes:
        first_class: the class of the first node (TokenTree.classes). The classes of the others follow it.
    """

    nodes: tuple[tuple[int, ...], ...]
    first_class: int = 1
    _shorter: dict[int, "TreeShape"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _trees: dict[Hashable, TokenTree] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        known: set[tuple[int, ...]] = {()}
        for node in self.nodes:
            if node[:-1] not in known or node in known:
                raise ValueError(f"tree: node {node} must come once, and after its parent {node[:-1]}")
            known.add(node)

    @staticmethod
    def cartesian(levels: Sequence[int]) -> "TreeShape":
        """The tree of all combinations of the first levels[i] ranks. (3, 3, 3) gives 3 + 9 + 27 nodes."""
        level: list[tuple[int, ...]] = [()]
        nodes: list[tuple[int, ...]] = []
        for width in levels:
            level = [(*path, rank) for path in level for rank in range(width)]
            nodes += level
        return TreeShape(tuple(nodes))

    @cached_property
    def depth(self) -> int:
        return max((len(node) for node in self.nodes), default=0)

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that each level must offer."""
        return 1 + max((node[-1] for node in self.nodes), default=0)

    def first(self, count: int) -> "TreeShape":
        """The tree of the first `count` nodes, or this one if it has no more. Made once for each number."""
        if count >= len(self.nodes):
            return self
        if count not in self._shorter:
            self._shorter[count] = TreeShape(self.nodes[:count], self.first_class)
        return self._shorter[count]

    def tree(self, batch: int, device: torch.device) -> TokenTree:
        """The tree of `batch` slots with its ancestors and depths, made once. Its "tokens" are each node's index into
        flattened [I, K], by level and rank; the root's is 0."""
        if (batch, device) not in self._trees:
            index = {(): 0} | {node: i + 1 for i, node in enumerate(self.nodes)}
            places = [0] + [(len(node) - 1) * self.ranks + node[-1] for node in self.nodes]
            parents = [ROOT] + [index[node[:-1]] for node in self.nodes]
            classes = [0, *range(self.first_class, self.first_class + len(self.nodes))]
            rows_3N = torch.tensor([places, parents, classes])
            rows_3BN = from_host(rows_3N[:, None].repeat(1, batch, 1), device)
            tree = self._trees[batch, device] = TokenTree(*rows_3BN.unbind(0))
            _ = tree.ancestors, tree.depths
        return self._trees[batch, device]

    def fill(self, roots_B: Tensor, ranked_BIK: Tensor) -> TokenTree:
        """The tree whose node (.., r) on level i has the token ranked_BIK[b, i, r]. int64; K is `ranks`."""
        tree = self.tree(len(roots_B), roots_B.device)
        tokens_BN = ranked_BIK.flatten(1).gather(1, tree.tokens)
        tokens_BN[:, 0] = roots_B
        return tree.with_tokens(tokens_BN)


def path_rate(rank_rates: Sequence[Sequence[float]], node: Sequence[int]) -> float:
    """The probability that the path to this node is accepted. rank_rates[level][rank]: that of one step of it."""
    rate = 1.0
    for level, rank in enumerate(node):
        rate *= rank_rates[level][rank]
    return rate


def likeliest_nodes(rank_rates: Sequence[Sequence[float]], count: int) -> TreeShape:
    """The best static tree of `count` nodes: those most likely to be accepted."""
    nodes: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while heap and len(nodes) <= count:
        _, node = heapq.heappop(heap)
        nodes.append(node)
        if len(node) < len(rank_rates):
            for rank in range(len(rank_rates[len(node)])):
                heapq.heappush(heap, (-path_rate(rank_rates, (*node, rank)), (*node, rank)))
    return TreeShape(tuple(nodes[1:]))
