"""TokenSwift's n-grams (arXiv 2502.18890, section 3.3): the most frequent continuations of a token in the text so far.

Behind a draft pass they begin with the token that the target's own row gives, else with the root. Not here: the counts
(infer/ngram.py), the heads whose tree they join (infer/drafters/tokenswift.py).
"""

from longdraft.infer.drafters.host import HostDrafter
from longdraft.infer.ngram import NgramTable, SuffixIndex
from longdraft.infer.options import integer
from longdraft.infer.trie import Trie

N = 4
# Host memory of a table's entry for one token, where no n-gram comes twice (less where they do).
ENTRY_BYTES = 700


class Ngrams(HostDrafter):
    """The `count` most frequent 4-grams. A node's class is its n-gram's rank, in powers of two, and its depth.

    Args:
        trunk: how deep the node may be that they begin behind.
    """

    behind_trunk = True

    def __init__(self, count: int = 20, trunk: int = 0):
        self.count = integer("ngrams", count, 1)
        self.max_nodes, self.max_depth = (N - 1) * count + trunk, N - 1 + trunk

    @property
    def n_classes(self) -> int:
        return 1 + (N - 1) * self.count.bit_length()

    def memory_bytes(self, batch: int, capacity: int) -> dict[str, int]:
        return {"tokenswift's n-gram table (host)": batch * capacity * ENTRY_BYTES}

    def new_table(self) -> NgramTable:
        return NgramTable(N)

    def fill(self, trie: Trie, node: int, table: NgramTable | SuffixIndex, max_nodes: int) -> None:
        assert isinstance(table, NgramTable)
        for rank, gram in enumerate(table.ranked(trie.tokens[node], self.count)):
            place, group = node, (rank + 1).bit_length() - 1
            for depth, token in enumerate(gram):
                child = trie.child(place, token)
                if child is None:
                    if len(trie) > max_nodes:
                        return
                    child = trie.add(place, token, 1 + group * (N - 1) + depth)
                place = child
