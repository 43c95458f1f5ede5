"""Prompts whose keys and values stay in their slots, for later prompts that begin alike.

Only whole chunks of a prefill in several chunks are reused. The passes over them would be the same passes over the same
tokens, so the rows have the bits that they would have anew, and no text depends on what was decoded before.

A slot without a request has length 0, so no pass reads what it holds; but every pass writes its pending rows from there
on. Therefore the slot's first rows are put aside meanwhile. infer/slot_pool.py reads prompts and calls this. Shapes: L
layers, B slots, W rows put aside, K key/value heads, d head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from longdraft.models.decoder import Decoder
from longdraft.models.kv_cache import KVCache


class Place(NamedTuple):
    """Where a prompt goes: its slot, and the slot `source` from which its first `count` tokens are reused."""

    slot: int
    source: int = 0
    count: int = 0


@dataclass
class _Kept:
    """A slot's prompt, of which the slot has the first `count` tokens.

    begun: when it began, counted in prompts. aside: whether the slot's first rows are put aside.
    """

    prompt: Sequence[int] = ()
    count: int = 0
    begun: int = 0
    aside: bool = False


class KeptPrompts:
    """What each slot of a cache holds of its last prompt.

    Args:
        model: the model of the cache. Once its weights have been written to, nothing is reused.
        chunk: tokens of a prefill pass.
        n_aside: how many first rows of a slot without a request are put aside: those of the widest pass of a step.
        before: those of an earlier cache, which has no requests; its latest prompts are copied, one for each slot.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int, n_aside: int, before: "KeptPrompts | None" = None):
        self._model, self._cache, self._chunk, self._begun = model, cache, chunk, 0
        self._aside_keys_LBWKd = torch.empty_like(cache.keys[:, :, :n_aside], memory_format=torch.contiguous_format)
        self._aside_values_LBWKd = torch.empty_like(self._aside_keys_LBWKd)
        self._of_slots = [_Kept() for _ in range(cache.batch)]
        self._weights = None if before is None else before._weights  # `_weights_version` of the weights of the rows
        if before is not None:
            sources = [slot for slot, kept in enumerate(before._of_slots) if kept.count]
            sources = sorted(sources, key=lambda slot: before._of_slots[slot].begun)[-cache.batch :]
            for slot, source in enumerate(sources):
                kept = before._of_slots[source]
                count = min(kept.count, cache.capacity) // chunk * chunk
                before._copy(source, count, cache, slot)
                self._note(slot, kept.prompt, count)

    def place(self, prompt: Sequence[int], free: Sequence[int]) -> Place:
        """Choose a free slot for this prompt, and the slot with most of its beginning.

        Slots where no kept tokens would be lost come first, the one with most of the prompt before others; else it is
        the one with the oldest prompt. The token before the last is never reused, so that something is left to read.
        """
        counts = self._reusable_counts(prompt)

        def order(slot: int) -> tuple[bool, int, int]:
            kept = self._of_slots[slot]
            loses = kept.count > counts[slot]
            return loses, kept.begun if loses else -counts[slot], slot

        slot = min(free, key=order)
        source = max(range(len(counts)), key=lambda candidate: (counts[candidate], candidate == slot))
        return Place(slot, source, counts[source])

    def begin(self, place: Place, prompt: Sequence[int]) -> None:
        """Begin this prompt in its slot, whose length is 0, with the tokens that it reuses."""
        slot, source, count = place
        if count > 0:
            if slot != source:
                self._of_slots[slot] = _Kept()  # while its rows are written they belong to no prompt
            self._copy(source, count, self._cache, slot)
            self._cache.lengths[slot].fill_(count)
        self._note(slot, prompt, count)

    def reach(self, slot: int, count: int) -> None:
        """Note that the slot has the first `count` tokens of its prompt."""
        self._of_slots[slot].count = count // self._chunk * self._chunk

    def leave(self, slot: int) -> None:
        """Note that this slot has no request any more, and length 0 from now on; put its first rows aside."""
        kept = self._of_slots[slot]
        if kept.count and not kept.aside:
            rows = slice(self._aside_keys_LBWKd.shape[2])
            self._aside_keys_LBWKd[:, slot] = self._cache.keys[:, slot, rows]
            self._aside_values_LBWKd[:, slot] = self._cache.values[:, slot, rows]
            kept.aside = True

    def _note(self, slot: int, prompt: Sequence[int], count: int) -> None:
        self._begun += 1
        self._of_slots[slot] = _Kept(prompt, count, self._begun)

    def _reusable_counts(self, prompt: Sequence[int]) -> list[int]:
        """How many of its first tokens each slot has, by whole passes."""
        if len(prompt) - 1 <= self._chunk:  # it is read in one pass, which is of another kind
            return [0] * len(self._of_slots)
        if (now := _weights_version(self._model)) is None or now != self._weights:
            self._weights, self._of_slots = now, [_Kept() for _ in self._of_slots]
        return [self._common_count(kept, prompt) for kept in self._of_slots]

    def _common_count(self, kept: _Kept, prompt: Sequence[int]) -> int:
        count, most = 0, min(kept.count, len(prompt) - 2)
        while (end := count + self._chunk) <= most and kept.prompt[count:end] == prompt[count:end]:
            count = end
        return count

    def _copy(self, source: int, count: int, cache: KVCache, slot: int) -> None:
        """Copy the first `count` rows of slot `source` to this slot of `cache`, unless they are there already."""
        n_aside = min(count, self._aside_keys_LBWKd.shape[2]) if self._of_slots[source].aside else 0
        aside, rows = slice(n_aside), slice(n_aside, count)
        keys, values = self._aside_keys_LBWKd[:, source, aside], self._aside_values_LBWKd[:, source, aside]
        cache.fill(slot, 0, keys, values)
        if cache is not self._cache or slot != source:
            cache.fill(slot, n_aside, self._cache.keys[:, source, rows], self._cache.values[:, source, rows])


def _weights_version(model: Decoder) -> tuple[int, list[tuple[int, int]]] | None:
    """Where each of the model's weights lies and how often it was written to. None if that is not known: PyTorch does
    not count writes to inference tensors, nor those of fused optimizers."""
    weights = list(model.parameters())
    if any(weight.is_inference() or weight.requires_grad for weight in weights):
        return None
    return model.refreshed, [(weight.data_ptr(), weight._version) for weight in weights]
