"""Which committed tokens a partial cache keeps: the policies of TokenSwift, TriForce and StreamingLLM.

A policy picks tokens of one slot, for each layer and KV head its own; rows and copies are infer/partial_cache.py's
work. Shapes: L layers, B slots, S tokens of the full cache, H query heads, K KV heads, d head width, R rows picked,
C chunks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from longdraft.models.kv_cache import KVCache

# Keys scored at once: bounds the fp32 copy of them.
BLOCK = 8192


def key_scores(query_Hd: Tensor, keys_SKd: Tensor) -> Tensor:
    """q . k summed over each KV head's query group: fp32 [K, S], unscaled.

    The sum over the group is the sum of its queries times the key, so no key is repeated.
    """
    n_kv_heads, width = keys_SKd.shape[1:]
    query_Kd = query_Hd.float().view(n_kv_heads, -1, width).sum(1)
    blocks = [torch.einsum("kd,skd->ks", query_Kd, block.float()) for block in keys_SKd.split(BLOCK)]
    return torch.cat(blocks, 1)


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

    def pick(self, layer: int, slot: int, covered: int, query_Hd: Tensor | None) -> Tensor:
        """Indices of tokens below `covered` (which is at least the budget): int64 [R, K], R = budget.

        The fixed ones first, then the least important first, because they are overwritten in this order.
        """
        if query_Hd is None or not self.scored:
            n_kv_heads, device = self.full.keys.shape[3], self.full.keys.device
            fixed = torch.arange(self.fixed, device=device)
            recent = torch.arange(covered - self.budget + self.fixed, covered, device=device)
            return torch.cat([fixed, recent])[:, None].expand(-1, n_kv_heads)
        return self.best(layer, slot, covered, query_Hd)

    def best(self, layer: int, slot: int, covered: int, query_Hd: Tensor) -> Tensor:
        """As `pick`, by the query."""
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

    def best(self, layer: int, slot: int, covered: int, query_Hd: Tensor) -> Tensor:
        scores_KS = key_scores(query_Hd, self.full.keys[layer, slot, self.fixed : covered])
        best_KR = scores_KS.topk(self.budget - self.fixed, dim=1).indices.flip(1) + self.fixed
        fixed_R = torch.arange(self.fixed, device=best_KR.device)
        return torch.cat([fixed_R[:, None].expand(-1, len(best_KR)), best_KR.T])


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
        for layer in range(len(self.means_LBCKd)):
            keys_SKd = self.full.keys[layer, slot, done * self.chunk : count * self.chunk]
            means_CKd = keys_SKd.unflatten(0, (-1, self.chunk)).mean(1, dtype=torch.float32)
            self.means_LBCKd[layer, slot, done:count] = means_CKd
        self._done[slot] = count

    def truncate(self, slot: int, length: int) -> None:
        self._done[slot] = min(self._done[slot], length // self.chunk)

    def best(self, layer: int, slot: int, covered: int, query_Hd: Tensor) -> Tensor:
        scores_KC = key_scores(query_Hd, self.means_LBCKd[layer, slot, 1 : covered // self.chunk])
        best_KC = scores_KC.topk(self.budget // self.chunk - 1, dim=1).indices.flip(1) + 1
        first_CK = torch.zeros(1, len(best_KC), dtype=torch.int64, device=best_KC.device)
        chunks_CK = torch.cat([first_CK, best_KC.T])
        inside = torch.arange(self.chunk, device=best_KC.device)[:, None]
        return (chunks_CK[:, None] * self.chunk + inside).flatten(0, 1)

    def memory_bytes(self, row_bytes: int, batch: int, capacity: int) -> Mapping[str, int]:
        return {"chunk means": batch * (capacity // self.chunk) * row_bytes // 2}
