"""A cache of selected rows of a full one, and the policies that select them: the caches of TokenSwift's draft pass and
of TriForce's inner level.

A policy picks tokens of one slot, separately for each layer and KV head; kernels/selection.py computes the scores.
Shapes: L layers, B slots, S tokens of the full cache, M rows copied at once, H query heads, K KV heads, d head width, R
rows picked, C chunks.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.caches.ring import RingCache, refuse_windows
from longdraft.kernels.selection import chunk_means, gather_rows, top_keys
from longdraft.kernels.transfer import integers
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import Allocations, cache_rows
from longdraft.models.kv_cache import KVCache


class Recent:
    """Picks `budget` of a slot's tokens, from the full cache that it was put `on`: the first tokens and the most recent
    ones (StreamingLLM). The other policies pick by scores.

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


class TopTokens(Recent):
    """The sinks, and the tokens with the highest scores for the last committed query (TokenSwift, section 3.2)."""

    scored = True

    def pick(self, slot: int, covered: int, queries_LHd: Tensor | None) -> Tensor:
        if queries_LHd is None:
            return super().pick(slot, covered, None)
        keys_LSKd = self.full.keys[:, slot, self.fixed : covered]
        best_LKR = top_keys(queries_LHd, keys_LSKd, self.budget - self.fixed).flip(2) + self.fixed
        fixed_R1 = torch.arange(self.fixed, device=best_LKR.device)[:, None]
        return torch.cat([fixed_R1.expand(len(best_LKR), -1, best_LKR.shape[1]), best_LKR.transpose(1, 2)], 1)


class TopChunks(Recent):
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


class SelectedCache(RingCache):
    """The rows of a full cache that a policy picks for each layer and KV head, and every token committed since.

    New tokens overwrite the least important picked rows. Before they run out, a rebuild is `due`: `needs_queries` asks
    for queries from the target's next pass, and the `on_step` after that pass rebuilds. The host then waits for the
    device, once in so many steps as a budget has room for.

    Attributes:
        holds_all: whether the budget holds every token that fits the full cache, so that nothing is ever picked.
        ready: whether passes may run on this cache; False from `select_anew` until all slots are built.
        needs_queries: whether the next pass of the target, or over a prompt, must return queries.

    Args:
        full: where exact rows come from. It must outlive this cache.
        tail: rows for passes on this cache, committed and pending.
    Raises: ValueError if layers of the model have a sliding window: it counts rows, and these are in no order.
    """

    def __init__(self, full: KVCache, policy: Recent, like: DecoderConfig, tail: int):
        refuse_windows(like, f"budget={policy.budget}: a cache of selected rows")
        self.full, self.policy = full, policy.on(full)
        fixed, budget = self.policy.fixed, self.policy.budget
        super().__init__(like, full.batch, tail, full.keys.dtype, full.keys.device, fixed=fixed, budget=budget)
        self.holds_all = self.budget >= full.capacity
        # Each slot: how many more tokens fit before a row that was picked for its importance is overwritten. A lower
        # bound: the host does not know how many tokens a step brought.
        self._free = [self.budget] * full.batch
        self.ready, self.needs_queries = True, False

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Empty these slots. Prompt lengths default to the full cache's."""
        places = range(self.batch) if slots is None else [int(slot) for slot in slots]
        where = integers(places, self.lengths.device)
        super().reset(where, self.full.prompt_lengths[where] if prompt_lengths is None else prompt_lengths)
        for slot in places:
            self._free[slot] = self.budget
            self.policy.restart(slot)

    def due(self, most: int) -> list[int]:
        """Slots that may lose picked rows within `most` more tokens."""
        if self.holds_all or not self.policy.scored:
            return []
        return [slot for slot in range(self.batch) if self._free[slot] < most]

    def select_anew(self) -> None:
        """Drop everything and rebuild all slots behind the next step. Until then the cache follows nothing."""
        self.reset()
        self.ready, self.needs_queries = False, True

    def on_step(
        self,
        positions_B: Tensor,
        accepted: AcceptResult,
        queries_LBHd: Tensor | None,
        depth: int,
        wanted: Sequence[int] = (),
    ) -> list[int]:
        """Follow a step of the full cache, and rebuild the slots that are due or wanted, or ask for their queries.

        Args:
            positions_B: int64, positions of the new roots.
            queries_LBHd: the former roots' queries, which see all tokens before them and themselves.
            depth: depth of the longest path that a step can accept.
            wanted: slots to rebuild although nothing is about to be lost.

        Returns: the slots that were rebuilt.
        """
        most = accepted.nodes.shape[1]
        ahead = 2 * max(most, depth + 1)  # the next step, and the one whose pass brings the queries
        slots = sorted({*self.due(ahead), *wanted}) if self.ready else list(range(self.batch))
        if self.ready:
            self.follow(most)
        if queries_LBHd is None:
            slots = []
        elif slots:
            self.build(slots, queries_LBHd, positions_B - accepted.counts + 1)
            self.ready = True
        self.needs_queries = not self.ready or bool(self.due(ahead))
        return slots

    def follow(self, most: int) -> None:
        """Drop the tail, and copy the full cache's new rows, at most `most` a slot."""
        self._copy_new(most, self.full.lengths)
        self.lengths.copy_(self.held.clamp(max=self.budget))
        self._free = [free - most for free in self._free]

    def build(self, slots: Sequence[int], queries_LBHd: Tensor | None, seen_B: Tensor) -> None:
        """Pick these slots' rows anew from the keys committed now, and drop their tails. Tokens that the queries do not
        see, and an incomplete last chunk, are kept as recent ones.

        Args:
            queries_LBHd: post-RoPE queries of all slots, of a committed token; None for a policy that needs none.
            seen_B: int64, how many tokens these queries see, their own included.
        """
        totals, seen, held = torch.stack([self.full.lengths, seen_B, self.held]).tolist()
        for slot in slots:
            queries_LHd = None if queries_LBHd is None else queries_LBHd[:, slot]
            self._build(slot, queries_LHd, totals[slot], seen[slot], held[slot])

    def build_from_prompt(self, slot: int, queries_L1Hd: Tensor | None, length: int) -> None:
        """Build a slot at the end of its prefill.

        Args:
            queries_L1Hd: queries of the last of the `length` prefilled tokens, as of `build`.
        """
        self._build(slot, None if queries_L1Hd is None else queries_L1Hd[:, 0], length, length, 0)

    def _build(self, slot: int, queries_LHd: Tensor | None, total: int, seen: int, held: int) -> None:
        """Build a slot of `total` tokens, of which its queries see `seen`; the slot holds `held` so far."""
        if 0 < held <= total <= self.budget:  # all of them are there, in order
            self._free[slot] = self.budget - held
        else:
            held = self._load(slot, min(seen, total), queries_LHd)
        limits_B = self.held.clone()
        limits_B[slot].fill_(total)
        self._copy_new(max(1, total - held), limits_B)
        self._free[slot] -= total - held
        self.lengths[slot].fill_(min(total, self.budget))

    def _load(self, slot: int, seen: int, queries_LHd: Tensor | None) -> int:
        """Fill a slot from its first `seen` tokens: with all of them if they fit, else with the policy's pick. Returns
        how many tokens it holds then."""
        full, rows = self.full, slice(0, min(seen, self.budget))
        keys, values = self.keys[:, slot, rows], self.values[:, slot, rows]
        if seen <= self.budget:
            keys.copy_(full.keys[:, slot, rows])
            values.copy_(full.values[:, slot, rows])
            held, written, free = seen, seen - self.fixed, self.budget - seen
        else:
            held, written, free = self.policy.covered(seen), 0, self.budget - self.fixed
            picked_LRK = self.policy.pick(slot, held, queries_LHd)
            gather_rows(full.keys[:, slot], full.values[:, slot], picked_LRK, keys, values)
        self.held[slot].fill_(held)
        self._written[slot].fill_(written)
        self._free[slot] = free
        return held

    def _copy_new(self, most: int, lengths_B: Tensor) -> None:
        """Copy the full cache's rows from `held` up to lengths_B, at most `most` a slot, into the ring."""
        counts_B = (lengths_B - self.held).clamp(0, most)
        positions_BM = self.held[:, None] + torch.arange(most, device=counts_B.device)
        positions_BM = positions_BM.clamp(max=self.full.capacity - 1)
        rows_BM = self._ring_rows(most, counts_B)
        self.keys[:, self._slots_B1, rows_BM] = self.full.keys[:, self._slots_B1, positions_BM]
        self.values[:, self._slots_B1, rows_BM] = self.full.values[:, self._slots_B1, positions_BM]
        self.held.add_(counts_B)
        self._written.add_(counts_B)


def selected_rows(
    policy: Recent, like: DecoderConfig, dtype: torch.dtype, batch: int, capacity: int, tail: int
) -> Allocations:
    """What a SelectedCache on a full cache of `capacity` rows a slot will allocate, by name."""
    picked = cache_rows(like, batch * (policy.rows(capacity) + tail + 1), dtype)
    return {"selected cache": picked, **policy.allocations(like, dtype, batch, capacity)}
