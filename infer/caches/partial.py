"""A cache of selected rows of a full one, and the policies that select them: the caches of TokenSwift's draft pass and
of TriForce's inner level.

A policy picks tokens of one slot, separately for each layer and KV head; kernels/selection.py computes the scores.
Shapes: L layers, B slots, S tokens of the full cache, M rows copied at once, H query heads, K KV heads, d head width, R
rows picked, C chunks.
"""

import sys
from collections.abc import Sequence

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
    """Picks the first tokens and the most recent ones (StreamingLLM). The other policies pick by scores.

    Attributes:
        budget: rows a slot, for each layer and KV head.
        fixed: how many of the first rows hold the sequence's first tokens and are never overwritten.
        scored: whether it scores tokens by queries.
    """

    scored = False

    def __init__(self, budget: int = 4096, sinks: int = 16):
        if sinks < 0 or budget <= sinks:
            raise ValueError(f"budget={budget}: must exceed the {sinks} tokens that always stay; raise it")
        self.budget, self.fixed = budget, sinks

    def rows(self, capacity: int) -> int:
        """The budget on a full cache of `capacity` tokens: no more rows than they need."""
        return min(self.budget, max(capacity, self.fixed + 1))

    def covered(self, seen: int) -> int:
        """How many of the first `seen` tokens it picks from; later ones are kept as recent."""
        return seen

    def pick(self, keys_LSKd: Tensor, rows: int, queries_LHd: Tensor | None) -> Tensor:
        """Pick R = `rows` of these S tokens (at least as many): their indices, int64 [L, R, K].

        The fixed ones come first, then the others from the least important on, the order in which they are overwritten.
        Here the oldest are the least important.
        """
        n_layers, covered, n_kv_heads, _ = keys_LSKd.shape
        fixed = torch.arange(self.fixed, device=keys_LSKd.device)
        recent = torch.arange(covered - rows + self.fixed, covered, device=keys_LSKd.device)
        return torch.cat([fixed, recent])[:, None].expand(n_layers, -1, n_kv_heads)

    def allocations(self, like: DecoderConfig, dtype: torch.dtype, capacity: int) -> Allocations:
        """What `pick` needs for itself, by name."""
        return {}


class TopTokens(Recent):
    """The sinks, and the tokens with the highest scores for the last committed query (TokenSwift, section 3.2)."""

    scored = True

    def pick(self, keys_LSKd: Tensor, rows: int, queries_LHd: Tensor | None) -> Tensor:
        assert queries_LHd is not None
        best_LKR = top_keys(queries_LHd, keys_LSKd[:, self.fixed :], rows - self.fixed).flip(2) + self.fixed
        fixed_R1 = torch.arange(self.fixed, device=best_LKR.device)[:, None]
        return torch.cat([fixed_R1.expand(len(best_LKR), -1, best_LKR.shape[1]), best_LKR.transpose(1, 2)], 1)


class TopChunks(Recent):
    """The first chunk, and the chunks whose mean key scores best for the last committed query (TriForce, section 4.1).
    Tokens after the last full chunk count as recent."""

    scored = True

    def __init__(self, budget: int = 4096, chunk: int = 8):
        if chunk < 1 or budget % chunk:
            raise ValueError(f"budget={budget}: must be a multiple of chunk={chunk}, which must be at least 1")
        super().__init__(budget, chunk)
        self.chunk = chunk

    def rows(self, capacity: int) -> int:
        return min(self.budget, max(-(-capacity // self.chunk), 2) * self.chunk)

    def covered(self, seen: int) -> int:
        return seen // self.chunk * self.chunk

    def pick(self, keys_LSKd: Tensor, rows: int, queries_LHd: Tensor | None) -> Tensor:
        assert queries_LHd is not None
        n_layers, covered, n_kv_heads, width = keys_LSKd.shape
        means_LCKd = keys_LSKd.new_empty(n_layers, covered // self.chunk, n_kv_heads, width)
        chunk_means(keys_LSKd, self.chunk, means_LCKd)
        best_LKC = top_keys(queries_LHd, means_LCKd[:, 1:], rows // self.chunk - 1).flip(2) + 1
        chunks_LKC = torch.cat([torch.zeros_like(best_LKC[..., :1]), best_LKC], 2)
        inside = torch.arange(self.chunk, device=best_LKC.device)
        return (chunks_LKC[..., None] * self.chunk + inside).flatten(2).transpose(1, 2)

    def allocations(self, like: DecoderConfig, dtype: torch.dtype, capacity: int) -> Allocations:
        return {"chunk means": [((like.n_layers, capacity // self.chunk, like.n_kv_heads, like.head_dim), dtype)]}


class SelectedCache(RingCache):
    """The rows of a full cache that a policy picks for each layer and KV head, and every token committed since.

    New tokens overwrite the least important picked rows. Before they run out, a rebuild is `due`: `needs_queries` asks
    for queries from the target's next pass, and the `on_step` after that pass rebuilds. The host then waits for the
    device, once in so many steps as a budget has room for.

    Attributes:
        needs_queries: whether the next pass of the target must return queries.

    Args:
        full: where exact rows come from. It must outlive this cache.
        tail: rows for passes on this cache, committed and pending.
        depth: depth of the longest path that a step usually accepts.
        stride: committed tokens after which a slot is rebuilt although there is room.
    Raises: ValueError if layers of the model have a sliding window: it counts rows, and these are in no order.
    """

    def __init__(
        self, full: KVCache, policy: Recent, like: DecoderConfig, tail: int, depth: int = 0, stride: int = sys.maxsize
    ):
        refuse_windows(like, f"budget={policy.budget}: a cache of selected rows")
        self.full, self.policy, self._depth, self._stride = full, policy, depth, stride
        rows, keys = policy.rows(full.capacity), full.keys
        super().__init__(like, full.batch, tail, keys.dtype, keys.device, fixed=policy.fixed, budget=rows)
        # Of each slot: how many tokens fit behind a build before a row that was picked for its importance is
        # overwritten, and how many have come since then, at most.
        self._room, self._since = [rows] * full.batch, [0] * full.batch
        self.needs_queries = False

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Empty these slots. Prompt lengths default to the full cache's."""
        places = range(self.batch) if slots is None else [int(slot) for slot in slots]
        where = integers(places, self.lengths.device)
        super().reset(where, self.full.prompt_lengths[where] if prompt_lengths is None else prompt_lengths)
        for slot in places:
            self._room[slot], self._since[slot] = self.budget, 0

    def due(self, most: int, stale: Sequence[int] = ()) -> list[int]:
        """Slots that may lose picked rows within `most` more tokens, or have come to their stride; a quarter of it for
        the slots `stale`."""
        if not self.policy.scored or self.budget >= self.full.capacity:  # or every token is there
            return []
        strides = [self._stride // 4 if slot in stale else self._stride for slot in range(self.batch)]
        limits = [min(room - most + 1, stride) for room, stride in zip(self._room, strides, strict=True)]
        return [slot for slot, since in enumerate(self._since) if since >= limits[slot]]

    def on_step(
        self,
        positions_B: Tensor,
        accepted: AcceptResult,
        queries_LBHd: Tensor | None,
        counts: Sequence[int] | None = None,
        stale: Sequence[int] = (),
    ) -> list[int]:
        """Follow a step of the full cache, and rebuild the slots that are due, or ask for their queries.

        Args:
            positions_B: int64, positions of the new roots.
            queries_LBHd: the former roots' queries, which see all tokens before them and themselves.
            counts: `accepted.counts`, if the host has read them.
            stale: as of `due`.

        Returns: the slots that were rebuilt.
        """
        most = accepted.nodes.shape[1]
        self.follow(most, counts)
        ahead = 2 * max(most, self._depth + 1)  # the next step, and the one whose pass brings the queries
        slots = [] if queries_LBHd is None else self.due(ahead, stale)
        if slots:
            self.build(slots, queries_LBHd, positions_B - accepted.counts + 1)
        self.needs_queries = bool(self.due(ahead, stale))
        return slots

    def follow(self, most: int, counts: Sequence[int] | None = None) -> None:
        """Drop the tail, and copy the full cache's new rows, at most `most` a slot. counts: as of `on_step`."""
        self._copy_new(most, self.full.lengths)
        self.lengths.copy_(self.held.clamp(max=self.budget))
        new = [most] * self.batch if counts is None else counts
        self._since = [since + count for since, count in zip(self._since, new, strict=True)]

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
            self._room[slot] = self.budget - held
        else:
            held = self._load(slot, min(seen, total), queries_LHd)
        limits_B = self.held.clone()
        limits_B[slot].fill_(total)
        self._copy_new(max(1, total - held), limits_B)
        self._since[slot] = total - held
        self.lengths[slot].fill_(min(total, self.budget))

    def _load(self, slot: int, seen: int, queries_LHd: Tensor | None) -> int:
        """Fill a slot from its first `seen` tokens: with all of them if they fit, else with the policy's pick. Returns
        how many tokens it holds then."""
        full, rows = self.full, slice(0, min(seen, self.budget))
        keys, values = self.keys[:, slot, rows], self.values[:, slot, rows]
        if seen <= self.budget:
            keys.copy_(full.keys[:, slot, rows])
            values.copy_(full.values[:, slot, rows])
            held, written, room = seen, seen - self.fixed, self.budget - seen
        else:
            held, written, room = self.policy.covered(seen), 0, self.budget - self.fixed
            picked_LRK = self.policy.pick(full.keys[:, slot, :held], self.budget, queries_LHd)
            gather_rows(full.keys[:, slot], full.values[:, slot], picked_LRK, keys, values)
        self.held[slot].fill_(held)
        self._written[slot].fill_(written)
        self._room[slot] = room
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
    return {"selected cache": picked, **policy.allocations(like, dtype, capacity)}
