"""Caches that hold part of the context, so that a pass costs the same at any context length.

RingCache keeps track of rows; SelectedCache keeps selected rows of a full cache (TokenSwift's draft pass, TriForce's
inner level). infer/selection.py chooses the rows; infer/streaming_cache.py is a small model's own cache. A decoder runs
on these caches as on a full one, with explicit positions: attention does not depend on the order of rows, and RoPE is
in the keys already.
Shapes: L layers, B slots, S rows, M rows copied at once, H query heads, K KV heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.selection import SelectionPolicy
from longdraft.kernels.selection import gather_rows
from longdraft.kernels.transfer import HostCopy, integers
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import Allocations, cache_rows
from longdraft.models.kv_cache import KVCache


class RingCache(KVCache):
    """Rows [0, fixed) hold the first tokens for good, rows [fixed, budget) are a ring, and a tail follows them.

    The tail is what passes on this cache have committed (`append`, `commit`); `rewind` takes it back. The rows before
    it stand for the text's first `held` tokens: the first `budget` of these went to their own rows, token t to row t,
    and each further one overwrote the ring's next row, starting at row `fixed`.

    Attributes:
        held: int64 [B].
    """

    def __init__(
        self,
        like: DecoderConfig,
        batch: int,
        tail: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        fixed: int,
        budget: int,
    ):
        """`tail` counts the rows after the budget, a pass's pending rows included."""
        # The extra last row takes writes that nobody reads, so that slots of unequal counts share one indexed copy.
        capacity = budget + tail + 1
        super().__init__(like.n_layers, batch, capacity, like.n_kv_heads, like.head_dim, dtype, device)
        self.fixed, self.budget = fixed, budget
        self.held = torch.zeros_like(self.lengths)
        self._written = torch.full_like(self.lengths, -fixed)  # ring writes since row `fixed` was the next one

    @property
    def tokens(self) -> Tensor:
        """int64 [B]: how many tokens of the text the slot has seen, the tail's included."""
        return self.held + self.lengths - self.held.clamp(max=self.budget)

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        where = integers(range(self.batch) if slots is None else slots, self.lengths.device)
        super().reset(where, prompt_lengths)
        self.held.index_fill_(0, where, 0)
        self._written.index_fill_(0, where, -self.fixed)

    def _ring_rows(self, most: int, counts_B: Tensor) -> Tensor:
        """int64 [B, M]: the rows of the next counts_B[b] tokens. Tokens beyond these, and tokens that a later one of
        them overwrites, get the last row, which nobody reads."""
        ring_size = self.budget - self.fixed
        writes_BM = self._written[:, None] + torch.arange(most, device=counts_B.device)
        rows_BM = torch.where(writes_BM < 0, writes_BM + self.fixed, writes_BM % ring_size + self.fixed)
        end_B1 = (self._written + counts_B)[:, None]
        lost_BM = (writes_BM >= end_B1) | ((writes_BM >= 0) & (writes_BM < end_B1 - ring_size))
        return rows_BM.masked_fill(lost_BM, self.capacity - 1)


class SelectedCache(RingCache):
    """The rows of a full cache that a policy picks for each layer and KV head, and every token committed since.

    New tokens overwrite the least important picked rows. Before they run out, a rebuild is `due`: `needs_queries` asks
    for queries from the target's next pass, and the `on_step` after that pass schedules the rebuild. It is carried out
    one step later, when the lengths that it needs have reached the host, so that a GPU never waits for them.

    Attributes:
        whole: whether the budget holds every token that fits the full cache, so that nothing is ever picked.
        building: whether a scheduled rebuild waits for the next `follow`.
        ready: whether passes may run on this cache; False from `select_anew` until all slots are built.
        needs_queries: whether the next pass of the target, or over a prompt, must return queries.

    Args:
        full: where exact rows come from. It must outlive this cache.
        tail: rows for passes on this cache, committed and pending.
    Raises: ValueError if layers of the model have a sliding window: it counts rows, and these are in no order.
    """

    def __init__(self, full: KVCache, policy: SelectionPolicy, like: DecoderConfig, tail: int):
        refuse_windows(like, f"budget={policy.budget}: a cache of selected rows")
        self.full, self.policy = full, policy.on(full)
        fixed, budget = self.policy.fixed, self.policy.budget
        super().__init__(like, full.batch, tail, full.keys.dtype, full.keys.device, fixed=fixed, budget=budget)
        self.whole = self.budget >= full.capacity
        # Each slot: how many more tokens fit before a row that was picked for its importance is overwritten. A lower
        # bound: the host does not know how many tokens a step brought.
        self._free = [self.budget] * full.batch
        # The scheduled rebuild: its slots, their queries, and [full lengths, tokens seen, held] of all slots.
        self._scheduled: tuple[list[int], Tensor | None, HostCopy] | None = None
        self.ready, self.needs_queries = True, False

    @property
    def building(self) -> bool:
        return self._scheduled is not None

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Empty these slots and cancel their scheduled rebuilds. Prompt lengths default to the full cache's."""
        places = range(self.batch) if slots is None else [int(slot) for slot in slots]
        where = integers(places, self.lengths.device)
        super().reset(where, self.full.prompt_lengths[where] if prompt_lengths is None else prompt_lengths)
        self._cancel(places)
        for slot in places:
            self._free[slot] = self.budget
            self.policy.restart(slot)

    def _cancel(self, slots: Sequence[int]) -> None:
        """Cancel the scheduled rebuilds of these slots."""
        if self._scheduled is not None:
            scheduled, queries_LBHd, numbers = self._scheduled
            left = [slot for slot in scheduled if slot not in slots]
            self._scheduled = (left, queries_LBHd, numbers) if left else None

    def due(self, most: int) -> list[int]:
        """Slots that may lose picked rows within `most` more tokens and have no rebuild scheduled."""
        if self.whole or not self.policy.scored:
            return []
        scheduled = self._scheduled[0] if self._scheduled else []
        return [slot for slot in range(self.batch) if self._free[slot] < most and slot not in scheduled]

    def select_anew(self) -> None:
        """Drop everything and rebuild all slots, starting with the next step. Until then the cache follows nothing."""
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
        """Follow a step of the full cache, and schedule the rebuilds that are due or wanted, or ask for their queries.

        Args:
            positions_B: int64, positions of the new roots.
            queries_LBHd: the former roots' queries, which see all tokens before them and themselves.
            depth: depth of the longest path that a step can accept.
            wanted: slots to rebuild although nothing is about to be lost.

        Returns: the slots whose rebuild was scheduled.
        """
        most = accepted.nodes.shape[1]
        ahead = 2 * max(most, depth + 1)  # the next step and the one after it, which rebuilds
        was_building = self.building
        follows = self.ready or was_building
        slots = sorted({*self.due(ahead), *wanted}) if follows else list(range(self.batch))
        if follows:
            self.follow(most)
        if queries_LBHd is None:
            slots = []
        elif slots:
            self.schedule_build(slots, queries_LBHd, positions_B - accepted.counts + 1)
        self.ready = self.ready or (was_building and not self.building)
        self.needs_queries = bool(self.due(ahead)) if self.ready or self.building else True
        return slots

    def follow(self, most: int) -> None:
        """Carry out the scheduled rebuild, drop the tail, and copy the full cache's new rows, at most `most` a slot."""
        if self._scheduled is not None:
            (slots, queries_LBHd, numbers), self._scheduled = self._scheduled, None
            ((totals, seen, held),) = numbers.lists()
            for slot in slots:
                queries_LHd = None if queries_LBHd is None else queries_LBHd[:, slot]
                self._build(slot, queries_LHd, totals[slot], seen[slot], held[slot])
        self._copy_new(most, self.full.lengths)
        self.lengths.copy_(self.held.clamp(max=self.budget))
        self._free = [free - most for free in self._free]

    def schedule_build(self, slots: Sequence[int], queries_LBHd: Tensor | None, seen_B: Tensor) -> None:
        """Let the next `follow` pick these slots' rows anew from the keys committed now, and drop their tails. Tokens
        that the queries do not see, and an incomplete last chunk, are kept as recent ones.

        Args:
            queries_LBHd: post-RoPE queries of all slots, of a committed token; None for a policy that needs none.
            seen_B: int64, how many tokens these queries see, their own included.
        """
        if queries_LBHd is not None:
            queries_LBHd = queries_LBHd.clone()  # the next step may overwrite them
        self._scheduled = list(slots), queries_LBHd, HostCopy(torch.stack([self.full.lengths, seen_B, self.held]))

    def build_from_prompt(self, slot: int, queries_L1Hd: Tensor | None, length: int) -> None:
        """Build a slot at the end of its prefill, at once. A rebuild that a step during the prefill scheduled is void.

        Args:
            queries_L1Hd: queries of the last of the `length` prefilled tokens, as of `schedule_build`.
        """
        self._cancel([slot])
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
    policy: SelectionPolicy, like: DecoderConfig, dtype: torch.dtype, batch: int, capacity: int, tail: int
) -> Allocations:
    """What a SelectedCache on a full cache of `capacity` rows a slot will allocate, by name."""
    picked = cache_rows(like, batch * (policy.rows(capacity) + tail + 1), dtype)
    return {"selected cache": picked, **policy.allocations(like, dtype, batch, capacity)}


def refuse_windows(like: DecoderConfig, what: str) -> None:
    """Raise ValueError, about `what`, if a layer has a sliding window."""
    if like.sliding_windows and any(like.sliding_windows):
        raise ValueError(f"{what} does not go with this model's sliding windows; use a drafter that needs none")
