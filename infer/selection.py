"""Which committed tokens a partial cache keeps: the policies of TokenSwift, TriForce and StreamingLLM.

A policy picks tokens of one slot, separately for each layer and KV head. kernels/selection.py computes scores and their
maxima; infer/partial_cache.py copies the rows.
Shapes: L layers, B slots, S tokens of the full cache, H query heads, K KV heads, d head width, R rows picked, C chunks.
"""

from copy import copy
from typing import Self

import torch
from torch import Tensor

from longdraft.kernels.selection import chunk_means, top_keys
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache


class SelectionPolicy:
    """Picks `budget` of a slot's tokens, from the full cache that it was put `on`.

    Attributes:
        budget: rows a slot, for each layer and KV head.
        fixed: how many of the first rows hold the sequence's first tokens and are never overwritten.
        scored: whether it scores tokens by queries; without queries it picks the most recent tokens.
    """

    scored = False
    full: KVCache

    def __init__(self, budget: int = 4096, sinks: int = 16):
        if sinks < 0 or budget <= sinks:
            raise ValueError(f"budget={budget}: must exceed the {sinks} tokens that always stay; raise it")
        self.budget, self.fixed = budget, sinks

    def rows(self, capacity: int) -> int:
        """The budget on a full cache of `capacity` tokens: no more rows than they need."""
        return min(self.budget, max(capacity, self.fixed + 1))

    def on(self, full: KVCache) -> Self:
        """A copy of this policy for a full cache, whose capacity bounds the budget."""
        policy = copy(self)
        policy.full, policy.budget = full, self.rows(full.capacity)
        return policy

    def covered(self, seen: int) -> int:
        """How many of the first `seen` tokens it picks from; later ones are kept as recent."""
        return seen

    def restart(self, slot: int) -> None:
        """Forget what was kept for this slot's tokens."""

    def pick(self, slot: int, covered: int, queries_LHd: Tensor | None) -> Tensor:
        """Pick R = budget of the first `covered` tokens (at least as many): their indices, int64 [L, R, K].

        The fixed ones come first, then the others from the least important on, the order in which they are overwritten.
        Here, and in every policy without queries, the oldest are the least important.
        """
        n_layers, _, _, n_kv_heads, _ = self.full.keys.shape
        fixed = torch.arange(self.fixed, device=self.full.keys.device)
        recent = torch.arange(covered - self.budget + self.fixed, covered, device=self.full.keys.device)
        return torch.cat([fixed, recent])[:, None].expand(n_layers, -1, n_kv_heads)

    def allocations(self, like: DecoderConfig, dtype: torch.dtype, batch: int, capacity: int) -> Allocations:
        """What it keeps beside the picked rows, by name."""
        return {}


class Recent(SelectionPolicy):
    """The sinks and the most recent tokens (StreamingLLM): the naive policy."""


class TopTokens(SelectionPolicy):
    """The sinks, and the tokens with the highest scores for the last committed query (TokenSwift, section 3.2)."""

    scored = True

    def pick(self, slot: int, covered: int, queries_LHd: Tensor | None) -> Tensor:
        if queries_LHd is None:
            return super().pick(slot, covered, None)
        keys_LSKd = self.full.keys[:, slot, self.fixed : covered]
        best_LKR = top_keys(queries_LHd, keys_LSKd, self.budget - self.fixed).flip(2) + self.fixed
        fixed_R1 = torch.arange(self.fixed, device=best_LKR.device)[:, None]
        return torch.cat([fixed_R1.expand(len(best_LKR), -1, best_LKR.shape[1]), best_LKR.transpose(1, 2)], 1)


class TopChunks(SelectionPolicy):
    """The first chunk, and the chunks whose mean key scores best for the last committed query (TriForce, section 4.1).

    A chunk's mean is final once the chunk is full, so means are only ever appended. Tokens after the last full chunk
    count as recent.
    """

    scored = True
    means_LBCKd: Tensor
    _done: list[int]  # for each slot, how many chunks have their mean

    def __init__(self, budget: int = 4096, chunk: int = 8):
        if chunk < 1 or budget % chunk:
            raise ValueError(f"budget={budget}: must be a multiple of chunk={chunk}, which must be at least 1")
        super().__init__(budget, chunk)
        self.chunk = chunk

    def rows(self, capacity: int) -> int:
        return min(self.budget, max(-(-capacity // self.chunk), 2) * self.chunk)

    def on(self, full: KVCache) -> Self:
        policy = super().on(full)
        n_layers, batch, capacity, n_kv_heads, width = full.keys.shape
        policy.means_LBCKd = full.keys.new_empty(n_layers, batch, capacity // self.chunk, n_kv_heads, width)
        policy._done = [0] * batch
        return policy

    def covered(self, seen: int) -> int:
        return seen // self.chunk * self.chunk

    def restart(self, slot: int) -> None:
        self._done[slot] = 0

    def pick(self, slot: int, covered: int, queries_LHd: Tensor | None) -> Tensor:
        if queries_LHd is None:
            return super().pick(slot, covered, None)
        done, count = self._done[slot], covered // self.chunk
        if count > done:
            keys_LSKd = self.full.keys[:, slot, done * self.chunk : count * self.chunk]
            chunk_means(keys_LSKd, self.chunk, self.means_LBCKd[:, slot, done:count])
            self._done[slot] = count
        means_LCKd = self.means_LBCKd[:, slot, 1:count]
        best_LKC = top_keys(queries_LHd, means_LCKd, self.budget // self.chunk - 1).flip(2) + 1
        chunks_LKC = torch.cat([torch.zeros_like(best_LKC[..., :1]), best_LKC], 2)
        inside = torch.arange(self.chunk, device=best_LKC.device)
        return (chunks_LKC[..., None] * self.chunk + inside).flatten(2).transpose(1, 2)

    def allocations(self, like: DecoderConfig, dtype: torch.dtype, batch: int, capacity: int) -> Allocations:
        means = (like.n_layers, batch, capacity // self.chunk, like.n_kv_heads, like.head_dim)
        return {"chunk means": [(means, dtype)]}
