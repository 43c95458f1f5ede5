"""TokenSwift's n-grams (arXiv 2502.18890, section 3.3): the most frequent continuations of a token in the text so far.

They continue the root, or after a draft pass the token that the target itself proposed. They join the tree of
infer/drafters/tokenswift.py.
"""

from collections import Counter

from longdraft.infer.drafters.host import HostDrafter, NgramIndex
from longdraft.infer.tree import Trie

N = 4
# How many occurrences of a token are counted, the last ones: what they cost does not grow with the text.
SEARCHED = 1024


def most_frequent(table: NgramIndex, first: int, k: int, n: int = N) -> list[tuple[int, ...]]:
    """The `k` most frequent continuations of `first`, n - 1 tokens each; among equal counts the latest first."""
    tokens, ends = table.tokens, table.ends[0].get((first,), [])
    complete = (end for end in reversed(ends[-SEARCHED:]) if end + n - 1 <= len(tokens))
    counts = Counter(tuple(tokens[end : end + n - 1]) for end in complete)
    return [gram for gram, _ in counts.most_common(k)]


class Ngrams(HostDrafter):
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

    def fill(self, trie: Trie, node: int, table: NgramIndex, max_nodes: int) -> None:
        for rank, gram in enumerate(most_frequent(table, trie.tokens[node], self.count)):
            place, group = node, (rank + 1).bit_length() - 1
            for depth, token in enumerate(gram):
                child = trie.child(place, token)
                if child is None:
                    if len(trie) > max_nodes:
                        return
                    child = trie.add(place, token, 1 + group * (N - 1) + depth)
                place = child
