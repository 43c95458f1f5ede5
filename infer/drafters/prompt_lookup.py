"""Prompt lookup: what followed the longest suffix of the text where it stood before is proposed again.

Matches come from the request's own tokens, prompt and generation alike (n-gram match on the context; Saxena, "Prompt
Lookup Decoding", 2023), the longest first. A match that runs into the end of the text goes on with itself, so a loop is
proposed whole. Text that is copied with edits differs in one token and goes on: the place that the text followed up to
its last token is a candidate too, from behind the token that was replaced.

Not here: the tables (infer/ngram.py).
"""

from bisect import bisect
from collections.abc import Sequence

from longdraft.infer.drafters.host import HostDrafter
from longdraft.infer.ngram import NgramTable, SuffixIndex
from longdraft.infer.options import integer
from longdraft.infer.trie import Trie

# Matches of so many tokens are as good as each other; a node's class tells the group its match is in. 0: right behind a
# replaced token.
GROUPS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
RANKS = 3
# Host memory of a table's entry for one token, where no n-gram comes twice (less where they do).
ENTRY_BYTES = 200


class PromptLookup(HostDrafter):
    """Continuations of earlier occurrences, as one trie.

    A node counts as matched by its occurrence's match and the nodes above it: when verification gets there, so many
    tokens agree. Its class is the group of that number, how many siblings came before it, and whether it is a child of
    the root, where the last proposal may just have failed.

    Args:
        length: tokens proposed behind an occurrence.
        max_ngram: longest n-gram that is looked up; longer matches are found among these.
        candidates: occurrences with different continuations, beside the one behind a replaced token.
    """

    def __init__(self, length: int = 24, max_ngram: int = 3, candidates: int = 3):
        self.length, self.max_ngram = integer("length", length, 1), integer("max_ngram", max_ngram, 1)
        self.candidates = integer("candidates", candidates, 1)
        self.max_nodes, self.max_depth = length * (candidates + 1), length

    @property
    def n_classes(self) -> int:
        return 1 + 2 * RANKS * len(GROUPS)

    def memory_bytes(self, batch: int, capacity: int) -> dict[str, int]:
        return {"prompt lookup's tables (host)": batch * capacity * self.max_ngram * ENTRY_BYTES}

    def new_table(self) -> SuffixIndex:
        return SuffixIndex(self.max_ngram)

    def fill(self, trie: Trie, node: int, table: NgramTable | SuffixIndex, max_nodes: int) -> None:
        assert isinstance(table, SuffixIndex) and node == 0
        found, worth = self._collect(table, trie.tokens[0])
        moved = {0: 0}
        # A child is worth less than its parent, so the parent comes first.
        for place in sorted(range(1, len(found)), key=worth.__getitem__, reverse=True)[:max_nodes]:
            moved[place] = trie.add(moved[found.parents[place]], found.tokens[place], found.classes[place])

    def _collect(self, index: SuffixIndex, root: int) -> tuple[Trie, list[float]]:
        """All candidates, and of each node how likely verification seems to get there."""
        trie, worth, found = Trie(root), [1.0], 0
        for matched, at in index.matches(self.candidates):
            found += self._add(trie, worth, index.continuation(at, self.length), matched)
            if found == self.candidates:
                break
        for _, at in index.matches(1, skipped=1)[:1]:
            self._add(trie, worth, index.continuation(at + 1, self.length), 0)
        return trie, worth

    @staticmethod
    def _add(trie: Trie, worth: list[float], chain: Sequence[int], matched: int) -> bool:
        """Put a chain into the trie; whether it has nodes that were not there yet."""
        node, before = 0, len(trie)
        for agreeing, token in enumerate(chain, matched):
            child = trie.child(node, token)
            if child is None:
                rank, group = trie.degree(node), bisect(GROUPS, agreeing) - 1
                # For the order alone: after m matched tokens the next one agrees in (m + 1/2) of (m + 3/2) cases.
                chance = (agreeing + 0.5 if rank == 0 else 1 / (1 + rank)) / (agreeing + 1.5)
                worth.append(worth[node] * chance)
                child = trie.add(node, token, 1 + (group * RANKS + min(rank, RANKS - 1)) * 2 + (node > 0))
            node = child
        return len(trie) > before
