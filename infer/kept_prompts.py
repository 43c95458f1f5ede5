"""Prefix caching: a prompt's keys and values stay in its slot for later prompts with the same prefix.

Only complete chunks of a prefill of several chunks are reused. A fresh prefill would run the same passes over the same
tokens, so reused rows have the same bits, and no text depends on what was decoded before.

Linear attention has a state instead of rows, which is copied after each complete chunk. Only the last copy is kept, so
a prompt reuses all that a slot has, or nothing.

A slot without a request has length 0, so no pass reads its rows, but every pass overwrites its first ones with pending
rows. So these are copied when the slot is freed. infer/slot_pool.py prefills prompts and calls this. Shapes: L layers,
W rows of the widest pass of a step, K key/value heads, d head width.
"""

from collections.abc import Sequence
from itertools import count

from torch import Tensor

from longdraft.models.decoder import Decoder
from longdraft.models.kv_cache import KVCache


class KeptPrompts:
    """What each slot of a cache holds of its last prompt.

    Args:
        model: the model of the cache. After a write to its weights, nothing older is reused.
        chunk: tokens of a prefill pass.
        width: query tokens of the widest pass of a step.
    """

    def __init__(self, model: Decoder, cache: KVCache, chunk: int, width: int):
        self._model, self._cache, self._chunk, self._width = model, cache, chunk, width
        self._tokens: list[Sequence[int]] = [()] * cache.batch  # of each slot, the tokens whose rows it holds
        self._begun, self._count = [0] * cache.batch, count(1)  # the order in which the slots' prompts began
        # First rows of slots without a request, K and V each [L, W, K, d].
        self._first_rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, Tensor]] = {}  # of linear attention, after a slot's kept tokens
        self._weights: object = None  # `_weights_version` of the weights of the rows

    def choose_slot(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """Choose a free slot for this prompt: of those that lose no kept tokens, the one with the longest common
        prefix; if all would lose some, the one with the oldest prompt."""
        counts = self._reusable_counts(prompt)

        def order(slot: int) -> tuple[bool, int, int]:
            loses = len(self._tokens[slot]) > counts[slot]
            return loses, self._begun[slot] if loses else -counts[slot], slot

        return min(free, key=order)

    def begin(self, slot: int, prompt: Sequence[int]) -> int:
        """Start this prompt in a slot of length 0, with the rows of the slot that has the longest common prefix.
        Returns the prefix's length. It excludes the token before the last, so that something is left to prefill."""
        counts = self._reusable_counts(prompt)
        source = max(range(len(counts)), key=lambda candidate: (counts[candidate], candidate == slot))
        n_rows, n_copied, cache = counts[source], 0, self._cache
        if source != slot:
            self._tokens[slot] = ()  # while its rows are written they belong to no prompt
        if n_rows and source in self._first_rows:
            keys_LWKd, values_LWKd = self._first_rows[source]
            n_copied = min(n_rows, self._width)
            cache.fill(slot, 0, keys_LWKd[:, :n_copied], values_LWKd[:, :n_copied])
        if n_rows and source != slot:
            rows = slice(n_copied, n_rows)
            cache.fill(slot, n_copied, cache.keys[:, source, rows], cache.values[:, source, rows])
        if n_rows and cache.delta is not None:
            self._states[slot] = self._states[source]
            cache.delta.put(slot, self._states[slot])
        cache.lengths[slot].fill_(n_rows)
        self._first_rows.pop(slot, None)
        self._tokens[slot], self._begun[slot] = prompt[:n_rows], next(self._count)
        return n_rows

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that the slot has the rows of these first tokens of its prompt."""
        kept = len(tokens) // self._chunk * self._chunk
        self._tokens[slot] = tokens[:kept]
        if self._cache.delta is not None and kept == len(tokens):
            self._states[slot] = self._cache.delta.copy(slot)

    def leave(self, slot: int) -> None:
        """Note that this slot has no request any more, and length 0 from now on."""
        if self._tokens[slot] and slot not in self._first_rows:
            keys_LWKd, values_LWKd = (x[:, slot, : self._width].clone() for x in (self._cache.keys, self._cache.values))
            self._first_rows[slot] = keys_LWKd, values_LWKd

    def _reusable_counts(self, prompt: Sequence[int]) -> list[int]:
        """How many of the prompt's first tokens each slot has, in complete passes."""
        if len(prompt) - 1 <= self._chunk:  # a prompt of one pass is always prefilled
            return [0] * len(self._tokens)
        if (now := _weights_version(self._model)) is None or now != self._weights:
            self._weights, self._tokens = now, [()] * len(self._tokens)
        return [self._common_count(kept, prompt) for kept in self._tokens]

    def _common_count(self, kept: Sequence[int], prompt: Sequence[int]) -> int:
        count, most = 0, min(len(kept), len(prompt) - 2)
        while (end := count + self._chunk) <= most and kept[count:end] == prompt[count:end]:
            count = end
        return count if self._cache.delta is None or count == len(kept) else 0


def _weights_version(model: Decoder) -> tuple[int, list[tuple[int, int]]] | None:
    """Where each of the model's weights lies and how often it was written to. None if that is not known: PyTorch does
    not count writes to inference tensors, nor those of fused optimizers."""
    weights = list(model.parameters())
    if any(weight.is_inference() or weight.requires_grad for weight in weights):
        return None
    return model.refreshed, [(weight.data_ptr(), weight._version) for weight in weights]
