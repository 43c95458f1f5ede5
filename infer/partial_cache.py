"""Caches that hold a part of the context, so that a pass costs the same however long the context is.

RingCache is the arithmetic of rows; SelectedCache keeps selected rows of a full cache (TokenSwift's draft pass,
TriForce's middle tier). Which rows is infer/selection.py's question; a small model's own cache is
infer/streaming_cache.py. A decoder runs on them as on a full cache, with positions given: attention does not depend on
the order of rows, and RoPE is in the keys already.
Shapes: L layers, B slots, S rows, M rows taken over at once, H query heads, K KV heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.selection import SelectionPolicy
from longdraft.kernels import backend
from longdraft.kernels.selection import gather_rows
from longdraft.kernels.transfer import HostCopy, integers
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.kv_cache import KVCache


class RingCache(KVCache):
    """Rows [0, fixed) hold the first tokens for good, rows [fixed, budget) are a ring, behind them comes a tail.

    The tail is what passes committed on this cache itself (`append`, `commit`); `rewind` takes it back. `held` tokens
    are in the first `budget` rows: while there are no more than that, token t is in row t; then each further one
    overwrites the ring's next row, from row `fixed` on.

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
        """`tail` counts the rows behind the budget, those of a pass included."""
        # One more row takes what is written for nothing, so that slots of unequal counts share an indexed copy.
        capacity = budget + tail + 1
        super().__init__(like.n_layers, batch, capacity, like.n_kv_heads, like.head_dim, dtype, device)
        self.fixed, self.budget = fixed, budget
        self.held = torch.zeros_like(self.lengths)
        self._written = torch.full_like(self.lengths, -fixed)  # ring writes since row `fixed` was the next one

    @property
    def tokens(self) -> Tensor:
        """int64 [B]: tokens it stands for, the tail's included."""
        return self.held + self.lengths - self.held.clamp(max=self.budget)

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        where = integers(range(self.batch) if slots is None else slots, self.lengths.device)
        super().reset(where, prompt_lengths)
        self.held.index_fill_(0, where, 0)
        self._written.index_fill_(0, where, -self.fixed)

    def _ring_rows(self, most: int, counts_B: Tensor) -> Tensor:
        """int64 [B, M]: the rows of the next counts_B[b] tokens; for the rest, and for what a later one of them
        overwrites, the row nobody reads."""
        region = self.budget - self.fixed
        writes_BM = self._written[:, None] + torch.arange(most, device=counts_B.device)
        rows_BM = torch.where(writes_BM < 0, writes_BM + self.fixed, writes_BM % region + self.fixed)
        end_B1 = (self._written + counts_B)[:, None]
        lost_BM = (writes_BM >= end_B1) | ((writes_BM >= 0) & (writes_BM < end_B1 - region))
        return rows_BM.masked_fill(lost_BM, self.capacity - 1)

    @staticmethod
    def row_bytes(like: DecoderConfig, dtype: torch.dtype) -> int:
        """One row of keys and values in all layers."""
        return 2 * like.n_layers * like.n_kv_heads * like.head_dim * dtype.itemsize


class SelectedCache(RingCache):
    """The rows of a full cache that a policy picks, per layer and KV head, and all that came since.

    New tokens overwrite the least important ones. When that has eaten what was picked, a rebuild is `due`: the target's
    next pass is to give queries (`needs_queries`), and `on_step` rebuilds once that pass is committed. On a GPU the
    host does not wait for the lengths that a rebuild takes: they come with the next step, which rebuilds.

    Attributes:
        whole: whether every token that the full cache can hold fits, so that nothing is ever picked.
        building: whether a rebuild waits for the next `follow`.
        ready: whether a pass may run on it; False from `select_anew` on until all slots are built.
        needs_queries: whether the next pass of the target, or over a prompt, is to give queries.

    Args:
        full: where exact rows come from. It must outlive this cache.
        tail: rows for passes on this cache, committed and pending.
    Raises: ValueError where some layers of the model have a sliding window: it counts rows, and these are in no order.
    """

    def __init__(self, full: KVCache, policy: SelectionPolicy, like: DecoderConfig, tail: int):
        refuse_windows(like, f"budget={policy.budget}: a cache of selected rows")
        self.full, self.policy = full, policy.on(full)
        fixed, budget = self.policy.fixed, self.policy.budget
        super().__init__(like, full.batch, tail, full.keys.dtype, full.keys.device, fixed=fixed, budget=budget)
        self.whole = self.budget >= full.capacity
        # Tokens that can still come before something picked for its importance is lost: at most so few on a GPU,
        # where the host does not know how many came.
        self._free = [self.budget] * full.batch
        # A rebuild that waits: the slots, their queries, and what the host has to know of all slots.
        self._waiting: tuple[list[int], Tensor | None, HostCopy] | None = None
        self.ready, self.needs_queries = True, False

    @property
    def building(self) -> bool:
        return self._waiting is not None

    def reset(
        self, slots: Sequence[int] | Tensor | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        """Empty these slots; the prompt lengths are the full cache's unless given. No rebuild of theirs waits."""
        places = range(self.batch) if slots is None else [int(slot) for slot in slots]
        where = integers(places, self.lengths.device)
        super().reset(where, self.full.prompt_lengths[where] if prompt_lengths is None else prompt_lengths)
        if self._waiting is not None:
            waiting, queries_LBHd, numbers = self._waiting
            left = [slot for slot in waiting if slot not in places]
            self._waiting = (left, queries_LBHd, numbers) if left else None
        for slot in places:
            self._free[slot] = self.budget
            self.policy.restart(slot)

    def due(self, most: int) -> list[int]:
        """Slots that may lose picked rows when `most` further tokens come, and whose rebuild does not wait already."""
        if self.whole or not self.policy.scored:
            return []
        waiting = self._waiting[0] if self._waiting else []
        return [slot for slot in range(self.batch) if self._free[slot] < most and slot not in waiting]

    def select_anew(self) -> None:
        """Nothing here is followed any longer: all slots are to be built from the next step on."""
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
        """The full cache has grown by a step. This one follows it, and where a rebuild is due or wanted, it is built
        with the step's queries, or they are asked for.

        Args:
            positions_B: int64, of the new roots.
            queries_LBHd: of the former roots, which see what stood before them, and themselves.
            depth: of the deepest path that a step may accept.
            wanted: slots to rebuild although nothing is lost yet.

        Returns: the slots whose rebuild began.
        """
        most = accepted.nodes.shape[1]
        # On a GPU a rebuild comes a step later.
        ahead = (1 if backend.is_host(positions_B.device) else 2) * max(most, depth + 1)
        waited = self.building
        slots = sorted({*self.due(ahead), *wanted}) if self.ready or waited else list(range(self.batch))
        if self.ready or waited:
            self.follow(most)
        if queries_LBHd is None:
            slots = []
        elif slots:
            self.build(slots, queries_LBHd, positions_B - accepted.counts + 1)
        self.ready = self.ready or (not self.building and (waited or bool(slots)))
        self.needs_queries = bool(self.due(ahead)) if self.ready or self.building else True
        return slots

    def follow(self, most: int) -> None:
        """Drop the tail, and take over the exact rows of the full cache's next tokens, at most `most` a slot; a rebuild
        that waits comes first."""
        self._build_waiting()
        counts_B = self._take(most, self.full.lengths)
        self.lengths.copy_(self.held.clamp(max=self.budget))
        counts = counts_B.tolist() if backend.is_host(counts_B.device) else [most] * self.batch
        self._free = [free - count for free, count in zip(self._free, counts, strict=True)]

    def build(self, slots: Sequence[int], queries_LBHd: Tensor | None, seen_B: Tensor) -> None:
        """Pick these slots' rows anew from all committed keys and drop their tails. What the query does not see, and a
        last chunk that is not full, is taken over as recent. On a GPU that is done by the next `follow`, a step later,
        from what is committed now.

        Args:
            queries_LBHd: post-RoPE queries of all slots, of a committed token; None for a policy that needs none.
            seen_B: int64, how many tokens these queries see, their own included.
        """
        on_host = backend.is_host(seen_B.device)
        if not (on_host or queries_LBHd is None):
            queries_LBHd = queries_LBHd.clone()  # the next step may overwrite them
        self._waiting = list(slots), queries_LBHd, HostCopy(torch.stack([self.full.lengths, seen_B, self.held]))
        if on_host:
            self._build_waiting()

    def _build_waiting(self) -> None:
        if self._waiting is not None:
            (slots, queries_LBHd, numbers), self._waiting = self._waiting, None
            ((totals, seen, held),) = numbers.lists()
            for slot in slots:
                queries_LHd = None if queries_LBHd is None else queries_LBHd[:, slot]
                self._build(slot, queries_LHd, totals[slot], seen[slot], held[slot])

    def build_from_prompt(self, slot: int, queries_L1Hd: Tensor | None, length: int) -> None:
        """`build`, at once, at the end of the prefill of a slot, just reset: queries of its last token, and how many
        there are."""
        self._build(slot, None if queries_L1Hd is None else queries_L1Hd[:, 0], length, length, 0)

    def _build(self, slot: int, queries_LHd: Tensor | None, total: int, seen: int, held: int) -> None:
        """A slot of so many tokens, of which the queries see so many, and so many are held up to now."""
        if 0 < held <= total <= self.budget:  # all are there, in order
            self._free[slot] = self.budget - held
        else:
            held = self._load(slot, min(seen, total), queries_LHd)
        limits_B = self.held.clone()
        limits_B[slot].fill_(total)
        self._take(max(1, total - held), limits_B)
        self._free[slot] -= total - held
        self.lengths[slot].fill_(min(total, self.budget))

    def _load(self, slot: int, seen: int, queries_LHd: Tensor | None) -> int:
        """Fill a slot from its first `seen` tokens: all of them where they fit, else the policy's pick. Returns how
        many are held then."""
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

    def _take(self, most: int, lengths_B: Tensor) -> Tensor:
        """Exact rows from `held` on, up to lengths_B and at most `most`, into the ring: int64 [B], how many."""
        counts_B = (lengths_B - self.held).clamp(0, most)
        positions_BM = self.held[:, None] + torch.arange(most, device=counts_B.device)
        positions_BM = positions_BM.clamp(max=self.full.capacity - 1)
        rows_BM = self._ring_rows(most, counts_B)
        self.keys[:, self._slots_B1, rows_BM] = self.full.keys[:, self._slots_B1, positions_BM]
        self.values[:, self._slots_B1, rows_BM] = self.full.values[:, self._slots_B1, positions_BM]
        self.held.add_(counts_B)
        self._written.add_(counts_B)
        return counts_B


def selected_bytes(
    policy: SelectionPolicy, like: DecoderConfig, dtype: torch.dtype, batch: int, capacity: int, tail: int
) -> dict[str, int]:
    """Bytes of a SelectedCache by name, before it is allocated, on a full cache of `capacity` rows a slot."""
    row = RingCache.row_bytes(like, dtype)
    parts = policy.memory_bytes(row, batch, capacity)
    return {"selected cache": batch * (policy.rows(capacity) + tail + 1) * row, **parts}


def refuse_windows(like: DecoderConfig, what: str) -> None:
    """ValueError where a layer has a sliding window."""
    if like.sliding_windows and any(like.sliding_windows):
        raise ValueError(f"{what} does not go with this model's sliding windows; use a drafter that needs none")
