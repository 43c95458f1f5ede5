"""Trie: one sequence's candidates while a drafter collects them on the host, and the TokenTree made of B of them.

For drafters that keep tables on the host (n-grams, combinations). Shapes: B sequences.
"""

from collections.abc import Sequence

import torch

from longdraft.infer.tree import ROOT, TokenTree


class Trie:
    """Nodes below a root, parents before children, siblings with different tokens. Node 0 is the root.

    Attributes:
        tokens, parents, classes: one entry a node; see TokenTree.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.classes = [root], [ROOT], [0]
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
        self._children[node, token] = index
        self._degrees[node] += 1
        self._degrees.append(0)
        return index


def as_tree(tries: Sequence[Trie], device: torch.device | str = "cpu") -> TokenTree:
    """One sequence a trie, padded to the largest."""
    return TokenTree.from_lists(((trie.tokens, trie.parents, trie.classes) for trie in tries), device)
