"""Prompts whose keys and values stay in their slots, for later ones that begin alike.

Only whole chunks of a prefill in several chunks are taken over. Their passes would be the same ones over the same
tokens, so the rows have the bits that they would have anew, and no text depends on what was decoded before.
A slot without a request has the length 0, so that no pass reads what it holds; but every pass writes its pending rows
from there on. So its first rows are put aside meanwhile.
Not here: who reads prompts (infer/runner.py). Shapes: L layers, B slots, W rows put aside, K
key/value heads, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.models.kv_cache import KVCache


@dataclass
class _Kept:
    """A slot's prompt, of which it has the first `count` tokens, as the `begun`th one. away: whether its first rows are
    put aside."""

    prompt: Sequence[int] = ()
    count: int = 0
    begun: int = 0
    away: bool = False


class KeptPrompts:
    """What each slot of a cache holds of its last prompt.

    Args:
        chunk: tokens of a pass of a prefill.
        aside: so many first rows of a slot without a request are put aside: those of the widest pass of a step.
        before: of a cache without requests, whose rows are copied as far as there is place.
    """

    def __init__(self, cache: KVCache, chunk: int, aside: int, before: "KeptPrompts | None" = None):
        self._cache, self._chunk, self._begun = cache, chunk, 0
        self._first_keys_LBWKd = torch.empty_like(cache.keys[:, :, :aside], memory_format=torch.contiguous_format)
        self._first_values_LBWKd = torch.empty_like(self._first_keys_LBWKd)
        self.forget()
        for slot, kept in enumerate([] if before is None else before._of[: cache.batch]):
            assert before is not None
            self.begin(slot, kept.prompt)
            self.reach(slot, min(kept.count, cache.capacity))
            before._copy(slot, self._of[slot].count, cache, slot)

    def forget(self) -> None:
        """Nothing is kept."""
        self._of = [_Kept() for _ in range(self._cache.batch)]

    def leave(self, slot: int) -> None:
        """This slot has no request any more, and the length 0 from now on."""
        kept = self._of[slot]
        if kept.count and not kept.away:
            rows = slice(self._first_keys_LBWKd.shape[2])
            self._first_keys_LBWKd[:, slot] = self._cache.keys[:, slot, rows]
            self._first_values_LBWKd[:, slot] = self._cache.values[:, slot, rows]
            kept.away = True

    def find(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot with the most of this prompt's first tokens, and the least besides, and how many; the prompt's last
        token but one is never among them, so that something is left to be read."""
        counts = [self._alike(kept, prompt) for kept in self._of]
        source = max(range(len(counts)), key=lambda slot: (counts[slot], -self._of[slot].count))
        return source, counts[source]

    def _alike(self, kept: _Kept, prompt: Sequence[int]) -> int:
        count, most = 0, min(kept.count, len(prompt) - 2)
        while (end := count + self._chunk) <= most and kept.prompt[count:end] == prompt[count:end]:
            count = end
        return count

    def place(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """Of the free slots the one for this prompt: where nothing is lost, its own before others, else where the
        oldest is."""
        source, count = self.find(prompt)

        def order(slot: int) -> tuple[bool, bool, int, int]:
            kept, own = self._of[slot], slot == source and count > 0
            loses = kept.count > (count if own else 0)
            return loses, not own, kept.begun if loses else 0, slot

        return min(free, key=order)

    def begin(self, slot: int, prompt: Sequence[int], source: int = 0, count: int = 0) -> None:
        """This prompt begins on this slot, whose length is 0, with the first `count` rows of slot `source`."""
        if count:
            self._copy(source, count, self._cache, slot)
            self._cache.lengths[slot].fill_(count)
        self._begun += 1
        self._of[slot] = _Kept(prompt, count, self._begun)

    def _copy(self, source: int, count: int, cache: KVCache, slot: int) -> None:
        """The first `count` rows of slot `source` to those of a slot of `cache`, where they do not lie there."""
        own, first = self._cache, min(count, self._first_keys_LBWKd.shape[2]) if self._of[source].away else 0
        cache.fill(slot, 0, self._first_keys_LBWKd[:, source, :first], self._first_values_LBWKd[:, source, :first])
        if (cache, slot) != (own, source):
            rows = slice(first, count)
            cache.fill(slot, first, own.keys[:, source, rows], own.values[:, source, rows])

    def reach(self, slot: int, count: int) -> None:
        """The slot has so many tokens of its prompt."""
        self._of[slot].count = count // self._chunk * self._chunk
