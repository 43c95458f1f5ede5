"""Prompt lookup: find earlier occurrences of the text's longest suffix, and propose what followed them.

Matches come from the request's own tokens, prompt and generation alike (n-gram match on the context; Saxena, "Prompt
Lookup Decoding", 2023), the longest first. A continuation that reaches the end of the text restarts from its own start,
so loops are proposed to full length. Copied text with edits may differ in one token only, so there is one more
candidate: the place that matches the text without its last token, continued after the token that was replaced there.
"""

from bisect import bisect
from collections.abc import Sequence

from longdraft.infer.drafters.base import Count
from longdraft.infer.drafters.host import HostDrafter, NgramIndex
from longdraft.infer.tree import Trie
from longdraft.models.schema import validated

# Lower bounds of the groups of match lengths: matches within a group are about equally good, and a node's class names
# the group. Length 0 is directly after a replaced token.
GROUPS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 20)
TOP_K = 3  # ranks among siblings that have their own classes; later ranks count as the last
SEARCHED = 64  # occurrences of an n-gram that are compared, the most recent ones
LONGEST = 32  # matches are not measured beyond this length


def matches(table: NgramIndex, enough: int, skipped: int = 0) -> list[tuple[int, int]]:
    """Find earlier occurrences of the longest suffix, then of shorter ones until there are `enough`.

    Args:
        skipped: how many of the last tokens are not part of the suffix. What follows an occurrence corresponds to
            these.

    Returns:
        (match length, index of the token after the match), longest first, among equal lengths the latest first.
    """
    sequence, end = table.tokens, len(table) - skipped
    found: dict[int, int] = {}
    for n in range(min(len(table.ends), end), 0, -1):
        # Exclude the suffix itself, and occurrences that end in skipped tokens.
        earlier = [at for at in table.ends[n - 1][tuple(sequence[end - n : end])][-SEARCHED:] if at < end]
        for at in earlier:
            if at not in found:
                found[at] = _match_length(sequence, at, end, n)
        if len(found) >= enough:
            break
    return sorted(((length, at) for at, length in found.items()), reverse=True)


def _match_length(sequence: Sequence[int], at: int, end: int, known: int) -> int:
    """How many tokens before index `at` equal those before `end`; `known` of them are known to be equal."""
    back, stop, place = end - at, max(at - LONGEST, 0), at - known
    while place > stop and sequence[place - 1] == sequence[place - 1 + back]:
        place -= 1
    return at - place


def continuation(sequence: Sequence[int], at: int, count: int) -> list[int]:
    """The `count` tokens from index `at` on; at the sequence's end they restart from `at`, as in a loop."""
    tokens, period = list(sequence[at : at + count]), len(sequence) - at
    for i in range(len(tokens), count):
        tokens.append(tokens[i - period])
    return tokens


class PromptLookup(HostDrafter):
    """Proposes the continuations of earlier occurrences, as one trie.

    When verification reaches a node, the matched tokens of its occurrence and the nodes above it agree with the text.
    The node's class is the group of their number, its rank among siblings, and whether it is a child of the root, where
    the last proposal may just have failed.

    Args:
        length: tokens proposed after an occurrence.
        candidates: occurrences with different continuations, beside the one after a replaced token.
    """

    longest_ngram = 3

    @validated
    def __init__(self, length: Count = 24, candidates: Count = 3):
        self.length, self.candidates = length, candidates
        self.max_nodes, self.max_depth = length * (candidates + 1), length

    @property
    def class_stages(self) -> Sequence[int]:
        return [0, *[1] * (2 * TOP_K * len(GROUPS))]

    def fill(self, trie: Trie, table: NgramIndex, max_nodes: int) -> None:
        found, worth = self._collect(table, trie.tokens[0])
        added = {0: 0}  # node of `found` -> node of `trie`
        # A child is worth less than its parent, so the parent comes first.
        for place in sorted(range(1, len(found)), key=worth.__getitem__, reverse=True)[:max_nodes]:
            added[place] = trie.add(added[found.parents[place]], found.tokens[place], found.classes[place])

    def _collect(self, table: NgramIndex, root: int) -> tuple[Trie, list[float]]:
        """A trie of all candidates, and each node's estimated chance that verification reaches it."""
        trie, worth, found = Trie(root), [1.0], 0
        for matched, at in matches(table, self.candidates):
            found += self._add(trie, worth, continuation(table.tokens, at, self.length), matched)
            if found == self.candidates:
                break
        for _, at in matches(table, 1, skipped=1)[:1]:
            self._add(trie, worth, continuation(table.tokens, at + 1, self.length), 0)
        return trie, worth

    @staticmethod
    def _add(trie: Trie, worth: list[float], chain: Sequence[int], matched: int) -> bool:
        """Add a chain to the trie. Returns whether any of its nodes is new."""
        node, before = 0, len(trie)
        for agreeing, token in enumerate(chain, matched):
            child = trie.child(node, token)
            if child is None:
                rank, group = trie.degree(node), bisect(GROUPS, agreeing) - 1
                # Only for the order: after m matched tokens the next one is taken to agree in (m + 1/2) of (m + 3/2)
                # cases.
                chance = (agreeing + 0.5 if rank == 0 else 1 / (1 + rank)) / (agreeing + 1.5)
                worth.append(worth[node] * chance)
                child = trie.add(node, token, 1 + (group * TOP_K + min(rank, TOP_K - 1)) * 2 + (node > 0))
            node = child
        return len(trie) > before
