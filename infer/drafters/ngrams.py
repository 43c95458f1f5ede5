"""TokenSwift's n-grams (arXiv 2502.18890, section 3.3): the most frequent continuations of a token in the text so far.

They continue the root, or after a draft pass the token that the target itself proposed. They join the tree of
infer/drafters/tokenswift.py.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import torch

from longdraft.infer.drafters.host import HostDrafter, Table
from longdraft.infer.tree import Trie
from longdraft.models.footprint import Allocations

N = 4
# Host memory of a table for each token of the text, if no n-gram occurs twice (else it is less).
ENTRY_BYTES = 700


class NgramTable(Table):
    """Counts which n - 1 tokens followed each token, and ranks them by frequency.

    The n-grams of a first token are kept in groups of equal counts, each ordered by last occurrence. So a new
    occurrence costs two binary searches. A ranking looks at `k` n-grams and at no more groups than there are different
    counts (fewer than the square root of twice the tokens), however many continuations a token has.
    """

    def __init__(self, n: int = N):
        super().__init__()
        self.n = n
        self._starts: dict[tuple[int, ...], list[int]] = {}  # n-gram -> where it occurs, ascending
        self._groups: dict[int, dict[int, list[int]]] = {}  # first token -> count -> last starts, ascending

    def extend(self, tokens: Sequence[int]) -> None:
        n, sequence = self.n, self.tokens
        for token in tokens:
            sequence.append(token)
            start = len(sequence) - n
            if start < 0:
                continue
            starts = self._starts.setdefault(tuple(sequence[start:]), [])
            groups = self._groups.setdefault(sequence[start], {})
            if starts:
                _leave(groups, len(starts), starts[-1])
            starts.append(start)
            groups.setdefault(len(starts), []).append(start)

    def truncate(self, length: int) -> None:
        n, sequence = self.n, self.tokens
        while len(sequence) > length:
            start = len(sequence) - n
            if start >= 0:
                gram = tuple(sequence[start:])
                starts, groups = self._starts[gram], self._groups[gram[0]]
                _leave(groups, len(starts), start)
                starts.pop()
                if starts:
                    insort(groups.setdefault(len(starts), []), starts[-1])
                else:
                    del self._starts[gram]
                    if not groups:
                        del self._groups[gram[0]]
            sequence.pop()

    def ranked(self, first: int, k: int) -> list[tuple[int, ...]]:
        """The `k` most frequent continuations of `first`, n - 1 tokens each; among equal counts the latest first."""
        groups = self._groups.get(first, {})
        found: list[tuple[int, ...]] = []
        for count in sorted(groups, reverse=True):
            for start in reversed(groups[count]):
                if len(found) == k:
                    return found
                found.append(tuple(self.tokens[start + 1 : start + self.n]))
        return found


def _leave(groups: dict[int, list[int]], count: int, start: int) -> None:
    """Remove the n-gram whose last occurrence starts at `start` from its group."""
    group = groups[count]
    del group[bisect_left(group, start)]
    if not group:
        del groups[count]


class Ngrams(HostDrafter[NgramTable]):
    """Proposes the `count` most frequent 4-grams. A node's class is its n-gram's rank, in powers of two, and its depth.

    Args:
        trunk: the greatest depth of the node that the n-grams start after.
    """

    behind_trunk = True

    def __init__(self, count: int = 20, trunk: int = 0):
        self.count = count
        self.max_nodes, self.max_depth = (N - 1) * count + trunk, N - 1 + trunk

    @property
    def n_classes(self) -> int:
        return 1 + (N - 1) * self.count.bit_length()

    def allocations(self, batch: int, capacity: int) -> Allocations:
        return {"tokenswift's n-gram table (host)": [((batch, capacity, ENTRY_BYTES), torch.uint8)]}

    def new_table(self) -> NgramTable:
        return NgramTable()

    def fill(self, trie: Trie, node: int, table: NgramTable, max_nodes: int) -> None:
        for rank, gram in enumerate(table.ranked(trie.tokens[node], self.count)):
            place, group = node, (rank + 1).bit_length() - 1
            for depth, token in enumerate(gram):
                child = trie.child(place, token)
                if child is None:
                    if len(trie) > max_nodes:
                        return
                    child = trie.add(place, token, 1 + group * (N - 1) + depth)
                place = child
