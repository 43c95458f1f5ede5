"""Prompt lookup: what followed the longest suffix of the text where it stood before is proposed again.

Matches come from the request's own tokens, prompt and generation alike (n-gram match on the context; Saxena, "Prompt
Lookup Decoding", 2023), the longest first. A match that runs into the end of the text goes on with itself, so a loop is
proposed whole. Not here: the tables (infer/ngram.py). Shapes: B slots.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from torch import Tensor

from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.ngram import SuffixIndex, catch_up
from longdraft.infer.tree import TokenTree
from longdraft.infer.trie import Trie, as_tree
from longdraft.models.kv_cache import KVCache

# Matches of so many tokens are as good as each other; a node's class tells the group its match is in.
GROUPS = (1, 2, 3, 4, 5, 6, 8, 12, 20)
RANKS = 3


class PromptLookup(Drafter):
    """Continuations of earlier occurrences, as one trie.

    A node counts as matched by its occurrence's match and the nodes above it: when the walk gets there, so many tokens
    agree. Its class is the group of that number, whether siblings came before it, and whether it stands below the root,
    where the last proposal may just have failed.

    Args:
        length: tokens proposed behind an occurrence.
        max_ngram: longest n-gram that is looked up; longer matches are found among these.
        candidates: occurrences with different continuations.
    """

    def __init__(self, length: int = 16, max_ngram: int = 3, candidates: int = 3):
        for name, value in (("length", length), ("max_ngram", max_ngram), ("candidates", candidates)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.length, self.max_ngram, self.candidates = length, max_ngram, candidates
        self.max_nodes, self.max_depth = length * candidates, length
        self._indices: list[SuffixIndex | None] = []

    @property
    def n_classes(self) -> int:
        return 1 + 2 * RANKS * len(GROUPS)

    def begin(self, slots: Sequence[int], requests: Sequence[Request], cache: KVCache) -> None:
        if len(self._indices) != cache.batch:
            self._indices = [None] * cache.batch
        for slot, request in zip(slots, requests, strict=True):
            index = self._indices[slot] = SuffixIndex(self.max_ngram)
            index.extend(request.prompt)

    def rewind(self, lengths_B: Tensor) -> None:
        for index, length in zip(self._indices, lengths_B.tolist(), strict=True):
            if index is not None:
                index.truncate(length)

    def propose(self, state: SlotState, room: int) -> TokenTree:
        catch_up(self._indices, state)
        places = zip(self._indices, state.roots.tolist(), state.active.tolist(), strict=True)
        tries = [
            self._best(index, Trie(root), room) if active and index is not None else Trie(root)
            for index, root, active in places
        ]
        return as_tree(tries, state.roots.device)

    def _best(self, index: SuffixIndex, best: Trie, room: int) -> Trie:
        """`best` filled with at most `room` nodes of all candidates, those first that seem likeliest."""
        whole, worth = self._collect(index, best.tokens[0])
        children: list[list[int]] = [[] for _ in worth]
        for node in range(1, len(whole)):
            children[whole.parents[node]].append(node)
        moved, heap = {0: 0}, [(-worth[node], node) for node in children[0]]
        heap.sort()
        while heap and len(best) <= room:
            _, node = heappop(heap)
            moved[node] = best.add(moved[whole.parents[node]], whole.tokens[node], whole.classes[node])
            for child in children[node]:
                heappush(heap, (-worth[child], child))
        return best

    def _collect(self, index: SuffixIndex, root: int) -> tuple[Trie, list[float]]:
        """All candidates, and of each node how likely the walk seems to get there."""
        trie, worth, found = Trie(root), [1.0], 0
        for matched, at in index.matches(self.candidates):
            node, before = 0, len(trie)
            for depth, token in enumerate(index.continuation(at, self.length)):
                child = trie.child(node, token)
                if child is None:
                    rank, agreeing = trie.degree(node), matched + depth
                    # A guess for the order alone: m matched tokens have been followed by one more m times of m + 1.
                    chance = agreeing / (agreeing + 1) if rank == 0 else 1 / (agreeing + 1) / (rank + 1)
                    worth.append(worth[node] * chance)
                    child = trie.add(node, token, self._class(agreeing, rank, depth))
                node = child
            found += len(trie) > before
            if found == self.candidates:
                break
        return trie, worth

    @staticmethod
    def _class(agreeing: int, rank: int, depth: int) -> int:
        group = sum(agreeing >= least for least in GROUPS) - 1
        return 1 + (group * RANKS + min(rank, RANKS - 1)) * 2 + (depth > 0)
