"""Which committed tokens a partial cache keeps: the policies of TokenSwift, TriForce and StreamingLLM.

A policy picks tokens of one slot, for each layer and KV head its own; scores and the best of them are
kernels/selection.py's work, rows and copies infer/partial_cache.py's. Shapes: L layers, B slots, S tokens of the full
cache, H query heads, K KV heads, d head width, R rows picked, C chunks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from longdraft.kernels.selection import chunk_means, top_keys
from longdraft.models.kv_cache import KVCache


class Policy:
    """Picks `budget` of a slot's tokens.

    Attributes:
        budget: rows a slot, for each layer and KV head.
        fixed: how many rows, the first ones, hold the sequence's first tokens and are never overwritten.
        scored: whether it looks at queries; without one the most recent tokens are picked.
    """

    scored = False

    def __init__(self, budget: int, fixed: int):
        if fixed < 0 or budget <= fixed:
            raise ValueError(f"budget={budget}: must exceed the {fixed} tokens that always stay; raise it")
        self.budget, self.fixed = budget, fixed

    def rows(self, capacity: int) -> int:
        """The budget on a full cache of `capacity` tokens: no more than what they need."""
        return min(self.budget, max(capacity, self.fixed + 1))

    def attach(self, full: KVCache) -> None:
        """The full cache that it picks from, whose capacity bounds the budget from now on."""
        self.full, self.budget = full, self.rows(full.capacity)

    def covered(self, seen: int) -> int:
        """Of `seen` tokens, those that it decides over; what comes behind is kept as recent."""
        return seen

    def prepare(self, slot: int, covered: int) -> None:
        """Bring what is kept for scoring up to `covered` tokens of this slot."""

    def truncate(self, slot: int, length: int) -> None:
        """Tokens of this slot from `length` on are void."""

    def pick(self, slot: int, covered: int, queries_LHd: Tensor | None) -> Tensor:
        """Indices of tokens below `covered` (which is at least the budget): int64 [L, R, K], R = budget.

        The fixed ones first, then the least important first, because they are overwritten in this order.
        """
        if queries_LHd is None or not self.scored:
            n_layers, _, _, n_kv_heads, _ = self.full.keys.shape
            fixed = torch.arange(self.fixed, device=self.full.keys.device)
            recent = torch.arange(covered - self.budget + self.fixed, covered, device=self.full.keys.device)
            return torch.cat([fixed, recent])[:, None].expand(n_layers, -1, n_kv_heads)
        return self.best(slot, covered, queries_LHd)

    def best(self, slot: int, covered: int, queries_LHd: Tensor) -> Tensor:
        """As `pick`, by the queries, one of each layer."""
        raise NotImplementedError

    def memory_bytes(self, row_bytes: int, batch: int, capacity: int) -> Mapping[str, int]:
        """What it keeps beside the picked rows, of which one takes `row_bytes`."""
        return {}


class Recent(Policy):
    """The sinks and the most recent tokens (StreamingLLM): the naive policy."""

    def __init__(self, budget: int = 4096, sinks: int = 16):
        super().__init__(budget, sinks)


class TopTokens(Policy):
    """The sinks, and the tokens most important to the last committed query (TokenSwift, section 3.2)."""

    scored = True

    def __init__(self, budget: int = 4096, sinks: int = 16):
        super().__init__(budget, sinks)

    def best(self, slot: int, covered: int, queries_LHd: Tensor) -> Tensor:
        keys_LSKd = self.full.keys[:, slot, self.fixed : covered]
        best_LKR = top_keys(queries_LHd, keys_LSKd, self.budget - self.fixed).flip(2) + self.fixed
        fixed_R1 = torch.arange(self.fixed, device=best_LKR.device)[:, None]
        return torch.cat([fixed_R1.expand(len(best_LKR), -1, best_LKR.shape[1]), best_LKR.transpose(1, 2)], 1)


class TopChunks(Policy):
    """The first chunk, and the chunks whose mean key scores best with the last committed query (TriForce, section 4.1).

    A chunk's mean is final once the chunk is full, so means are only ever appended. Tokens behind the last full chunk
    are recent ones.
    """

    scored = True

    def __init__(self, budget: int = 4096, chunk: int = 8):
        if chunk < 1 or budget % chunk:
            raise ValueError(f"budget={budget}: must be a multiple of chunk={chunk}, which must be at least 1")
        super().__init__(budget, chunk)
        self.chunk = chunk

    def rows(self, capacity: int) -> int:
        return min(self.budget, max(-(-capacity // self.chunk), 2) * self.chunk)

    def attach(self, full: KVCache) -> None:
        super().attach(full)
        n_layers, batch, capacity, n_kv_heads, width = full.keys.shape
        self.means_LBCKd = full.keys.new_empty(n_layers, batch, capacity // self.chunk, n_kv_heads, width)
        self._done = [0] * batch

    def covered(self, seen: int) -> int:
        return seen // self.chunk * self.chunk

    def prepare(self, slot: int, covered: int) -> None:
        done, count = self._done[slot], covered // self.chunk
        if count <= done:
            return
        keys_LSKd = self.full.keys[:, slot, done * self.chunk : count * self.chunk]
        chunk_means(keys_LSKd, self.chunk, self.means_LBCKd[:, slot, done:count])
        self._done[slot] = count

    def truncate(self, slot: int, length: int) -> None:
        self._done[slot] = min(self._done[slot], length // self.chunk)

    def best(self, slot: int, covered: int, queries_LHd: Tensor) -> Tensor:
        means_LCKd = self.means_LBCKd[:, slot, 1 : covered // self.chunk]
        best_LKC = top_keys(queries_LHd, means_LCKd, self.budget // self.chunk - 1).flip(2) + 1
        chunks_LKC = torch.cat([torch.zeros_like(best_LKC[..., :1]), best_LKC], 2)
        inside = torch.arange(self.chunk, device=best_LKC.device)
        return (chunks_LKC[..., None] * self.chunk + inside).flatten(2).transpose(1, 2)

    def memory_bytes(self, row_bytes: int, batch: int, capacity: int) -> Mapping[str, int]:
        return {"chunk means": batch * (capacity // self.chunk) * row_bytes // 2}
