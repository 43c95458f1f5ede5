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
from typing import NamedTuple

import torch

from longdraft.models.decoder import Decoder
from longdraft.models.kv_cache import KVCache


class Place(NamedTuple):
    """Where a prompt goes: its slot, and the one that has its first `count` tokens, which are taken over from there."""

    slot: int
    source: int = 0
    count: int = 0


@dataclass
class _Kept:
    """A slot's prompt, of which it has the first `count` tokens. begun: when, counted in prompts. aside: whether its
    first rows are put aside."""

    prompt: Sequence[int] = ()
    count: int = 0
    begun: int = 0
    aside: bool = False


class KeptPrompts:
    """What each slot of a cache holds of its last prompt.

    Args:
        model: whose cache it is. Where its weights were written since, nothing is kept any more.
        chunk: tokens of a pass of a prefill.
        n_aside: so many first rows of a slot without a request are put aside: those of the widest pass of a step.
        before: of a cache without requests, whose latest prompts are copied, as many as there are slots.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int, n_aside: int, before: "KeptPrompts | None" = None):
        self._model, self._cache, self._chunk, self._begun = model, cache, chunk, 0
        self._aside_keys_LBWKd = torch.empty_like(cache.keys[:, :, :n_aside], memory_format=torch.contiguous_format)
        self._aside_values_LBWKd = torch.empty_like(self._aside_keys_LBWKd)
        self._of = [_Kept() for _ in range(cache.batch)]
        self._written = None if before is None else before._written  # of the weights that the rows are of
        if before is not None:
            sources = [slot for slot, kept in enumerate(before._of) if kept.count]
            sources = sorted(sources, key=lambda slot: before._of[slot].begun)[-cache.batch :]
            for slot, source in enumerate(sources):
                kept = before._of[source]
                count = min(kept.count, cache.capacity) // chunk * chunk
                before._copy(source, count, cache, slot)
                self._note(slot, kept.prompt, count)

    def place(self, prompt: Sequence[int], free: Sequence[int]) -> Place:
        """Of the free slots the one for this prompt: of those where nothing is lost that with the most of it, else the
        one with the oldest prompt. What it takes over never has its last but one, so that something is left to be read.
        """
        counts = self._counts(prompt)

        def order(slot: int) -> tuple[bool, int, int]:
            kept = self._of[slot]
            loses = kept.count > counts[slot]
            return loses, kept.begun if loses else -counts[slot], slot

        slot = min(free, key=order)
        source = max(range(len(counts)), key=lambda one: (counts[one], one == slot))
        return Place(slot, source, counts[source])

    def begin(self, place: Place, prompt: Sequence[int]) -> None:
        """This prompt begins at its place, a slot whose length is 0, with what it takes over."""
        slot, source, count = place
        if count > 0:
            if slot != source:
                self._of[slot] = _Kept()  # its rows are no prompt's while they are written
            self._copy(source, count, self._cache, slot)
            self._cache.lengths[slot].fill_(count)
        self._note(slot, prompt, count)

    def reach(self, slot: int, count: int) -> None:
        """The slot has so many tokens of its prompt."""
        self._of[slot].count = count // self._chunk * self._chunk

    def leave(self, slot: int) -> None:
        """This slot has no request any more, and the length 0 from now on."""
        kept = self._of[slot]
        if kept.count and not kept.aside:
            rows = slice(self._aside_keys_LBWKd.shape[2])
            self._aside_keys_LBWKd[:, slot] = self._cache.keys[:, slot, rows]
            self._aside_values_LBWKd[:, slot] = self._cache.values[:, slot, rows]
            kept.aside = True

    def _note(self, slot: int, prompt: Sequence[int], count: int) -> None:
        self._begun += 1
        self._of[slot] = _Kept(prompt, count, self._begun)

    def _counts(self, prompt: Sequence[int]) -> list[int]:
        """How many of its first tokens each slot has, by whole passes."""
        if len(prompt) - 1 <= self._chunk:  # read in one pass, which is of another kind
            return [0] * len(self._of)
        if (now := _written(self._model)) is None or now != self._written:
            self._written, self._of = now, [_Kept() for _ in self._of]
        return [self._alike(kept, prompt) for kept in self._of]

    def _alike(self, kept: _Kept, prompt: Sequence[int]) -> int:
        count, most = 0, min(kept.count, len(prompt) - 2)
        while (end := count + self._chunk) <= most and kept.prompt[count:end] == prompt[count:end]:
            count = end
        return count

    def _copy(self, source: int, count: int, cache: KVCache, slot: int) -> None:
        """The first `count` rows of slot `source` to this slot of `cache`, where they are not there already."""
        n_aside = min(count, self._aside_keys_LBWKd.shape[2]) if self._of[source].aside else 0
        aside, rows = slice(n_aside), slice(n_aside, count)
        keys, values = self._aside_keys_LBWKd[:, source, aside], self._aside_values_LBWKd[:, source, aside]
        cache.fill(slot, 0, keys, values)
        if cache is not self._cache or slot != source:
            cache.fill(slot, n_aside, self._cache.keys[:, source, rows], self._cache.values[:, source, rows])


def _written(model: Decoder) -> tuple[int, list[tuple[int, int]]] | None:
    """Where each of its weights lies and how often it was written; None where that is not known: PyTorch does not count
    it for inference tensors, nor what fused optimizers do."""
    weights = list(model.parameters())
    if any(weight.is_inference() or weight.requires_grad for weight in weights):
        return None
    return model.refreshed, [(weight.data_ptr(), weight._version) for weight in weights]
