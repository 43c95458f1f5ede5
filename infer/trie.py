"""Trie: one sequence's candidates while a drafter collects them on the host, and the TokenTree made of B of them.

For drafters that keep tables on the host (n-grams, combinations). Masks and depths are made here as well, where the
parents are at hand, so that no pass has to work them out. Shapes: B sequences, N nodes with the root.
"""

from collections.abc import Sequence

import numpy as np
import torch

from longdraft.infer.tree import PAD, ROOT, TokenTree


class Trie:
    """Nodes below a root, parents before children, siblings with different tokens. Node 0 is the root.

    Attributes:
        tokens, parents, classes, depths: one entry a node; see TokenTree.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.classes, self.depths = [root], [ROOT], [0], [0]
        self._children: dict[tuple[int, int], int] = {}
        self._degrees = [0]

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`."""
        return self._children.get((node, token))

    def degree(self, node: int) -> int:
        """How many children `node` has."""
        return self._degrees[node]

    def add(self, node: int, token: int, kind: int) -> int:
        """A new child of `node`, which has none with this token yet, of class `kind`; its index."""
        index = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self.classes.append(kind)
        self.depths.append(self.depths[node] + 1)
        self._children[node, token] = index
        self._degrees[node] += 1
        self._degrees.append(0)
        return index


def as_tree(tries: Sequence[Trie], device: torch.device | str = "cpu") -> TokenTree:
    """One sequence a trie, padded to the largest."""
    batch, width = len(tries), max(len(trie) for trie in tries)
    tokens, classes, depths = (np.zeros((batch, width), dtype=np.int64) for _ in range(3))
    parents = np.full((batch, width), PAD, dtype=np.int64)
    ancestors = np.zeros((batch, width, width), dtype=bool)
    ancestors[:, range(width), range(width)] = True
    for b, trie in enumerate(tries):
        for part, values in ((tokens, trie.tokens), (parents, trie.parents), (classes, trie.classes)):
            part[b, : len(trie)] = values
        depths[b, : len(trie)] = trie.depths
        reach = ancestors[b]
        for node, parent in enumerate(trie.parents[1:], 1):
            reach[node] |= reach[parent]
    tree = TokenTree(*(torch.from_numpy(part).to(device) for part in (tokens, parents, classes)))
    tree.__dict__["ancestors"] = torch.from_numpy(ancestors).to(device)
    tree.__dict__["depths"] = torch.from_numpy(depths).to(device)
    return tree
