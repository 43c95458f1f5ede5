"""Prompt lookup: what followed the longest suffix of the text where it stood before is proposed again.

Matches come from the request's own tokens, prompt and generation alike (n-gram match on the context; Saxena, "Prompt
Lookup Decoding", 2023), the longest first. A match that runs into the end of the text goes on with itself, so a loop is
proposed whole. Text that is copied with edits differs in one token and goes on: the place that the text followed up to
its last token is a candidate too, from behind the token that was replaced.
"""

from bisect import bisect
from collections.abc import Sequence

from longdraft.infer.drafters.host import HostDrafter, Table
from longdraft.infer.options import integer
from longdraft.infer.trie import Trie

# Matches of so many tokens are as good as each other; a node's class tells the group its match is in. 0: right behind a
# replaced token.
GROUPS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
RANKS = 3
# Host memory of a table's entry for one token, where no n-gram comes twice (less where they do).
ENTRY_BYTES = 200


class SuffixIndex(Table):
    """Where the last tokens of a sequence stood before.

    A table for each length up to `max_ngram` holds where every n-gram ends; matches are then measured beyond that
    length by comparing tokens backwards. So a step costs `max_ngram` entries for each new token, and at most `search`
    occurrences are looked at, however long the context is.

    Args:
        max_ngram: longest n-gram with a table.
        search: most recent occurrences that are compared.
        longest: matches are not measured beyond this.
    """

    def __init__(self, max_ngram: int = 3, search: int = 64, longest: int = 32):
        super().__init__()
        self.max_ngram, self.search, self.longest = max_ngram, search, longest
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(max_ngram)]

    def extend(self, tokens: Sequence[int]) -> None:
        sequence = self.tokens
        for token in tokens:
            sequence.append(token)
            end = len(sequence)
            for n, ends in enumerate(self._ends[:end], 1):
                ends.setdefault(tuple(sequence[end - n :]), []).append(end)

    def truncate(self, length: int) -> None:
        sequence = self.tokens
        while len(sequence) > length:
            end = len(sequence)
            for n, ends in enumerate(self._ends[:end], 1):
                gram = tuple(sequence[end - n :])
                ends[gram].pop()
                if not ends[gram]:
                    del ends[gram]
            sequence.pop()

    def matches(self, enough: int, skipped: int = 0) -> list[tuple[int, int]]:
        """Earlier occurrences of the longest suffix, then of shorter ones until there are `enough`.

        Args:
            skipped: last tokens that are left out of the suffix. What follows an occurrence then stands in for them.

        Returns:
            (match length, index of the token behind it), longest match first, of equal lengths the most recent first.
        """
        sequence, end = self.tokens, len(self.tokens) - skipped
        found: dict[int, int] = {}
        for n in range(min(self.max_ngram, end), 0, -1):
            ends = self._ends[n - 1][tuple(sequence[end - n : end])]
            stop = len(ends)
            while stop and ends[stop - 1] >= end:  # the suffix itself, and what lies in the skipped tokens
                stop -= 1
            for at in ends[max(stop - self.search, 0) : stop]:
                if at not in found:
                    found[at] = self._length(at, end, n)
            if len(found) >= enough:
                break
        return sorted(((length, at) for at, length in found.items()), reverse=True)

    def _length(self, at: int, end: int, known: int) -> int:
        """How many tokens before index `at` equal those before `end`; `known` of them do."""
        sequence, back = self.tokens, end - at
        stop = max(at - self.longest, 0)
        place = at - known
        while place > stop and sequence[place - 1] == sequence[place - 1 + back]:
            place -= 1
        return at - place

    def continuation(self, at: int, count: int) -> list[int]:
        """The `count` tokens from index `at` on; behind the sequence's end it repeats itself, as a loop would."""
        tokens = self.tokens[at : at + count]
        period = len(self.tokens) - at
        for i in range(len(tokens), count):
            tokens.append(tokens[i - period])
        return tokens


class PromptLookup(HostDrafter[SuffixIndex]):
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

    def fill(self, trie: Trie, node: int, table: SuffixIndex, max_nodes: int) -> None:
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
