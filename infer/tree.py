"""TokenTree: the candidates of one step, a trie below the last committed token of every sequence.

Drafters (infer/drafters) fill it: those on the host through a Trie, those with a static tree through a TreeShape.
infer/accept.py walks down it. Shapes: B sequences, N nodes with the root, W nodes taken, I levels, K ranks.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.transfer import from_host
from longdraft.models.passes import spread
from longdraft.models.tensor_parallel import TensorParallel

ROOT, PAD = -1, -2


class Trie:
    """One sequence's candidates while they are collected on the host. Node 0 is the root, parents come before their
    children, and siblings carry different tokens.

    Attributes:
        tokens, parents, classes: one entry a node; see TokenTree.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.classes = [root], [ROOT], [0]
        self._children: dict[tuple[int, int], int] = {}
        self._degrees = [0]

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`."""
        return self._children.get((node, token))

    def degree(self, node: int) -> int:
        """Number of children of `node`."""
        return self._degrees[node]

    def add(self, node: int, token: int, kind: int) -> int:
        """Add a child of class `kind` to `node`, which has none with this token yet, and return its index."""
        index = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self.classes.append(kind)
        self._children[node, token] = index
        self._degrees[node] += 1
        self._degrees.append(0)
        return index


class Lists(NamedTuple):
    """B tries as lists [slot][node]; see TokenTree."""

    tokens: list[list[int]]
    parents: list[list[int]]
    classes: list[list[int]] | None

    def classes_of(self, slot: int) -> Sequence[int]:
        """The classes of a slot's nodes."""
        return range(len(self.parents[slot])) if self.classes is None else self.classes[slot]


@dataclass(frozen=True)
class TokenTree:
    """B tries of at most N nodes. Node 0 is the root: the last committed token, whose state no pass has computed yet.

    Attributes:
        tokens: int64 [B, N].
        parents: int64 [B, N]; -1 for the root, -2 for padding, else an index smaller than the node's own.
        classes: int64 [B, N] or None: each node's class. The policy measures a rate for each class (infer/budget.py),
            so a drafter gives one class to nodes of similar chances. None: a node's class is its index.
    Siblings carry different tokens, so no prefix is verified twice and the accepted path is never ambiguous.

    `lists` holds the nodes on the host. A tree made of tries has them from the start, with its tensors on the CPU; any
    other tree reads them from its device at first access. On a GPU that would stall the step, so code that needs them
    there (the runner for the policy, `Combined` for its union) reads `unread` together with other tensors and gives the
    result to `take_lists`. Code that does not know where the tree is asks `on_host` first.
    """

    tokens: Tensor
    parents: Tensor
    classes: Tensor | None = None

    @staticmethod
    def roots(tokens_B: Tensor) -> "TokenTree":
        """A tree of roots alone, which is what plain decoding proposes. tokens_B: int64, copied."""
        tokens = tokens_B[:, None].clone()
        return TokenTree(tokens, torch.full_like(tokens, ROOT))

    def with_roots(self, roots_B: Tensor) -> "TokenTree":
        """This tree of the first slots, extended to all slots with their roots alone."""
        if (some := len(self.tokens)) == len(roots_B):
            return self
        tree = TokenTree.roots(roots_B).pad_to(self.width)
        tree.tokens[:some], tree.parents[:some] = self.tokens, self.parents
        classes = None if self.classes is None else spread(self.classes, slice(some), len(roots_B))
        return TokenTree(tree.tokens, tree.parents, classes)

    @staticmethod
    def from_chain(roots_B: Tensor, chain_BK: Tensor) -> "TokenTree":
        """A chain of K tokens below each root; a negative token ends its sequence's chain."""
        ended_BK = (chain_BK < 0).cummax(dim=1).values
        tokens = torch.cat([roots_B[:, None], chain_BK.masked_fill(ended_BK, 0)], dim=1)
        before = torch.arange(chain_BK.shape[1], device=chain_BK.device).expand_as(chain_BK)
        parents = torch.cat([torch.full_like(roots_B, ROOT)[:, None], before.masked_fill(ended_BK, PAD)], dim=1)
        return TokenTree(tokens, parents)

    @staticmethod
    def from_paths(roots: Sequence[int], paths: Sequence[Sequence[Sequence[int]]]) -> "TokenTree":
        """Build each sequence's trie from its candidate paths: token lists below the root, whose shared prefixes become
        one node."""
        tries = [Trie(int(root)) for root in roots]
        for trie, sequence_paths in zip(tries, paths, strict=True):
            for path in sequence_paths:
                node = 0
                for token in map(int, path):
                    child = trie.child(node, token)
                    node = trie.add(node, token, 0) if child is None else child
        return TokenTree.from_tries(tries, with_classes=False)

    @staticmethod
    def from_tries(tries: Sequence[Trie], with_classes: bool = True) -> "TokenTree":
        """Build the tree of one trie a sequence, padded to the widest. It is on the host and keeps its lists."""
        width = max(map(len, tries))
        lists = Lists(
            [trie.tokens + [0] * (width - len(trie)) for trie in tries],
            [trie.parents + [PAD] * (width - len(trie)) for trie in tries],
            [trie.classes + [0] * (width - len(trie)) for trie in tries] if with_classes else None,
        )
        tree = TokenTree(*torch.tensor([part for part in lists if part is not None]).unbind(0))
        tree.__dict__["lists"] = lists
        return tree

    @property
    def width(self) -> int:
        """N, the nodes of the widest trie with its root."""
        return self.tokens.shape[1]

    @property
    def on_host(self) -> bool:
        """Whether `lists` needs no wait for a device: it is cached, or the tensors are on a CPU."""
        return "lists" in self.__dict__ or backend.is_host(self.tokens.device)

    @property
    def unread(self) -> tuple[Tensor, ...]:
        """The tensors whose lists `take_lists` needs; none if the tree is `on_host`."""
        if self.on_host:
            return ()
        return self.tokens, self.parents, *([] if self.classes is None else [self.classes])

    def take_lists(self, read: Sequence[list[list[int]]]) -> "TokenTree":
        """Cache these lists of `unread` as `lists`. Returns the tree itself."""
        if read:
            self.__dict__["lists"] = Lists(*read, *[None] * (3 - len(read)))
        return self

    @property
    def relations(self) -> tuple[Tensor, ...]:
        """`ancestors` and `depths` where they have been computed, else nothing."""
        return (self.ancestors, self.depths) if {"ancestors", "depths"} <= self.__dict__.keys() else ()

    @cached_property
    def lists(self) -> "Lists":
        """The nodes on the host. On a GPU this waits for the device."""
        classes = None if self.classes is None else self.classes.tolist()
        return Lists(self.tokens.tolist(), self.parents.tolist(), classes)

    @cached_property
    def ancestors(self) -> Tensor:
        """bool [B, N, N]: [b, i, j] says that j is i itself or an ancestor of it. A padding node has only itself."""
        width = self.parents.shape[1]
        if self.on_host:  # a copy of the parent's row for each node, far faster on a CPU than the launches below
            return from_host(torch.from_numpy(_ancestors(self.lists.parents)), self.parents.device)
        itself_N = torch.arange(width, device=self.parents.device)
        above_BN = torch.where(self.parents >= 0, self.parents, itself_N)
        reach_BNN = torch.eye(width, dtype=torch.bool, device=self.parents.device).expand(len(above_BN), -1, -1)
        # By doubling: after k rounds a node has reached the nodes less than 2**k levels above it.
        for _ in range((width - 1).bit_length()):
            reach_BNN = reach_BNN | reach_BNN.gather(1, above_BN[:, :, None].expand(-1, -1, width))
            above_BN = above_BN.gather(1, above_BN)
        return reach_BNN

    @cached_property
    def depths(self) -> Tensor:
        """int64 [B, N]: edges to the root; 0 for the root and for padding."""
        return self.ancestors.sum(dim=2) - 1

    def with_tokens(self, tokens_BN: Tensor, parents_BN: Tensor | None = None) -> "TokenTree":
        """A tree of this shape with other tokens, which shares the ancestors and depths computed so far.

        parents_BN: this tree's parents, with PAD for removed nodes.
        """
        tree = TokenTree(tokens_BN, self.parents if parents_BN is None else parents_BN, self.classes)
        tree.__dict__.update({name: self.__dict__[name] for name in ("ancestors", "depths") if name in self.__dict__})
        return tree

    def to(self, device: torch.device) -> "TokenTree":
        """The same tries on a device, without cached properties. A tree on the host goes there in one copy."""
        return self if self.tokens.device == device else TokenTree(*from_host(self._rows(), device).unbind(0))

    def of_first_rank(self, ranks: TensorParallel) -> "TokenTree":
        """The first rank's tree of this shape, without cached properties."""
        return self if ranks.size == 1 else TokenTree(*ranks.of_first(self._rows()).unbind(0))

    def _rows(self) -> Tensor:
        return torch.stack([x for x in (self.tokens, self.parents, self.classes) if x is not None])

    def pad_to(self, width: int) -> "TokenTree":
        """The same tries, padded to `width` nodes."""
        extra = width - self.width
        assert extra >= 0, f"a tree of {self.width} nodes does not fit a width of {width}"
        if extra == 0:
            return self
        pad = torch.nn.functional.pad
        classes = None if self.classes is None else pad(self.classes, (0, extra))
        tree = TokenTree(pad(self.tokens, (0, extra)), pad(self.parents, (0, extra), value=PAD), classes)
        if self.relations:
            itself_WW = torch.eye(width, dtype=torch.bool, device=self.parents.device)
            tree.__dict__["ancestors"] = pad(self.ancestors, (0, extra, 0, extra)) | itself_WW
            tree.__dict__["depths"] = pad(self.depths, (0, extra))
        return tree

    def take(self, order_BW: Tensor) -> "TokenTree":
        """The tree of these nodes alone, in this order.

        Args:
            order_BW: int64, indices of nodes: the root first, every parent before its children, no node twice; padding
                nodes may stand at the end.
        """
        batch, width = order_BW.shape
        places_BW = torch.arange(width, device=order_BW.device).expand(batch, -1)
        new_index_BN = torch.zeros_like(self.parents).scatter_(1, order_BW, places_BW)
        old_BW = self.parents.gather(1, order_BW)
        parents_BW = torch.where(old_BW >= 0, new_index_BN.gather(1, old_BW.clamp(min=0)), old_BW)
        classes = order_BW if self.classes is None else self.classes.gather(1, order_BW)
        tree = TokenTree(self.tokens.gather(1, order_BW), parents_BW, classes)
        if "ancestors" in self.__dict__:
            rows = self.ancestors.gather(1, order_BW[:, :, None].expand(-1, -1, self.width))
            tree.__dict__["ancestors"] = rows.gather(2, order_BW[:, None, :].expand(-1, width, -1))
        if "depths" in self.__dict__:
            tree.__dict__["depths"] = self.depths.gather(1, order_BW)
        return tree

    def paths(self) -> list[list[list[int]]]:
        """Every sequence's nodes as token paths below the root, in node order (host lists)."""
        result = []
        for tokens, parents in zip(self.lists.tokens, self.lists.parents, strict=True):
            paths: dict[int, list[int]] = {0: []}
            for node in range(1, len(tokens)):
                if parents[node] != PAD:
                    paths[node] = [*paths[parents[node]], tokens[node]]
            result.append(list(paths.values())[1:])
        return result


def _ancestors(parents: Sequence[list[int]]) -> np.ndarray:
    """`TokenTree.ancestors` from lists, bool [B, N, N]."""
    reach_BNN = np.zeros((len(parents), len(parents[0]), len(parents[0])), dtype=bool)
    for reach_NN, of_slot in zip(reach_BNN, parents, strict=True):
        for node, parent in enumerate(of_slot):
            if parent >= 0:
                reach_NN[node] = reach_NN[parent]
            reach_NN[node, node] = True
    return reach_BNN


@dataclass(frozen=True)
class TreeShape:
    """A static tree: which combinations of ranks are nodes, each parent before its children.

    A node is named by the path of ranks that leads to it: (0,) is the best candidate of level 1, and (0, 2) the third
    best candidate of level 2 below it. How many of the nodes pay is decided in infer/budget.py.
    """

    nodes: tuple[tuple[int, ...], ...]
    _shorter: dict[int, "TreeShape"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _trees: dict[Hashable, TokenTree] = field(default_factory=dict, init=False, repr=False, compare=False)

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
            self._shorter[count] = TreeShape(self.nodes[:count])
        return self._shorter[count]

    def tree(self, batch: int, device: torch.device) -> TokenTree:
        """The tree of `batch` slots with its ancestors and depths, made once. Its "tokens" are each node's index into
        flattened [I, K], by level and rank; the root's is 0."""
        if (batch, device) not in self._trees:
            index = {(): 0} | {node: i + 1 for i, node in enumerate(self.nodes)}
            places = [0] + [(len(node) - 1) * self.ranks + node[-1] for node in self.nodes]
            parents = [ROOT] + [index[node[:-1]] for node in self.nodes]
            rows_2BN = from_host(torch.tensor([places, parents])[:, None].repeat(1, batch, 1), device)
            tree = self._trees[batch, device] = TokenTree(*rows_2BN.unbind(0))
            _ = tree.ancestors, tree.depths
        return self._trees[batch, device]

    def fill(self, roots_B: Tensor, ranked_BIK: Tensor) -> TokenTree:
        """The tree whose node (.., r) on level i has the token ranked_BIK[b, i, r]. int64; K is `ranks`."""
        tree = self.tree(len(roots_B), roots_B.device)
        tokens_BN = ranked_BIK.flatten(1).gather(1, tree.tokens)
        tokens_BN[:, 0] = roots_B
        return tree.with_tokens(tokens_BN)


def likeliest_nodes(rank_rates: Sequence[Sequence[float]], count: int) -> TreeShape:
    """The best static tree of `count` nodes: those most likely to be accepted.

    rank_rates[level][rank]: how often a node of this rank is right where its parent is.
    """
    nodes: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while heap and len(nodes) <= count:
        less, node = heapq.heappop(heap)  # the negative probability that the path to the node is accepted
        nodes.append(node)
        if len(node) < len(rank_rates):
            for rank, rate in enumerate(rank_rates[len(node)]):
                heapq.heappush(heap, (less * rate, (*node, rank)))
    return TreeShape(tuple(nodes[1:]))
