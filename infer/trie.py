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
        reach: of each node an integer whose bits are the node and all above it.
    """

    def __init__(self, root: int):
        self.tokens, self.parents, self.classes, self.depths = [root], [ROOT], [0], [0]
        self.reach = [1]
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
        self.reach.append(self.reach[node] | 1 << index)
        self._children[node, token] = index
        self._degrees[node] += 1
        self._degrees.append(0)
        return index


def as_tree(tries: Sequence[Trie], device: torch.device | str = "cpu") -> TokenTree:
    """One sequence a trie, padded to the largest."""
    width = max(len(trie) for trie in tries)
    size = -(-width // 8)
    rows: list[list[list[int]]] = []
    bits = bytearray()
    for trie in tries:
        pad = [0] * (width - len(trie))
        rows.append([trie.tokens + pad, trie.parents + [PAD] * len(pad), trie.classes + pad, trie.depths + pad])
        for seen in trie.reach:
            bits += seen.to_bytes(size, "little")
        for node in range(len(trie), width):
            bits += (1 << node).to_bytes(size, "little")
    packed = np.frombuffer(bits, dtype=np.uint8).reshape(len(tries), width, size)
    ancestors = np.unpackbits(packed, axis=2, count=width, bitorder="little").view(bool)
    tokens, parents, classes, depths = torch.tensor(rows, device=device).unbind(1)
    tree = TokenTree(tokens, parents, classes)
    tree.__dict__["ancestors"] = torch.from_numpy(ancestors).to(device)
    tree.__dict__["depths"] = depths
    return tree
