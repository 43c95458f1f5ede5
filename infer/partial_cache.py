"""A cache of selected rows of a full one: the cache of TokenSwift's draft pass and of TriForce's inner level.

Rows are picked for one slot at a time, separately for each layer and KV head; kernels/selection.py computes the scores.
A decoder runs on it as on a full cache, with explicit positions: full attention does not depend on the order of rows,
and keys are stored after RoPE. A sliding window counts rows, so layers with one hold the text's last tokens instead of
a selection. The states of linear attention are copied.
Shapes: L layers, B slots, S tokens of the full cache, M rows copied at once, H query heads, K KV heads, d head width, R
rows picked, C chunks.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.slot_state import SlotState
from longdraft.kernels.selection import chunk_means, gather_rows, top_keys
from longdraft.models.decoder import Decoder
from longdraft.models.footprint import Allocations, cache_rows, delta_states
from longdraft.models.kv_cache import KVCache


@dataclass(frozen=True)
class Selection:
    """Which tokens a SelectedCache holds: the first ones, and the chunks whose mean key scores best for the last
    committed query (TokenSwift, section 3.2, with chunks of one token; TriForce, section 4.1), or the last tokens
    (StreamingLLM, arXiv 2309.17453).

    Attributes:
        budget: rows a slot, for each layer and KV head.
        fixed: how many rows hold the text's first tokens and are never overwritten; a multiple of `chunk`.
        chunk: keys that are picked together.
        recent: the last tokens; no query is needed, and no rebuild.
    Raises ValueError if the budget does not exceed `fixed`, or is not a multiple of the chunk.
    """

    budget: int
    fixed: int
    chunk: int = 1
    recent: bool = False

    def __post_init__(self) -> None:
        if self.budget <= self.fixed or self.budget % self.chunk:
            raise ValueError(
                f"budget={self.budget}: must exceed the {self.fixed} tokens that always stay, and be a multiple of "
                f"chunk={self.chunk}"
            )

    def pick(self, keys_LSKd: Tensor, queries_LHd: Tensor | None) -> Tensor:
        """Pick R = `budget` of S tokens and return their indices, int64 [L, R, K]. S >= R is a multiple of the chunk.

        The fixed ones come first, then the others in ascending importance, the order in which they are overwritten.
        """
        if self.recent:
            rows_R = torch.arange(self.budget, device=keys_LSKd.device)
            rows_R[self.fixed :] += keys_LSKd.shape[1] - self.budget
            return rows_R[None, :, None].expand(len(keys_LSKd), -1, keys_LSKd.shape[2])
        assert queries_LHd is not None
        if self.chunk == 1:
            means_LCKd = keys_LSKd
        else:
            n_layers, n_tokens, n_kv_heads, width = keys_LSKd.shape
            means_LCKd = keys_LSKd.new_empty(n_layers, n_tokens // self.chunk, n_kv_heads, width)
            chunk_means(keys_LSKd, self.chunk, means_LCKd)
        n_fixed = self.fixed // self.chunk
        best_LKC = top_keys(queries_LHd, means_LCKd[:, n_fixed:], self.budget // self.chunk - n_fixed).flip(2) + n_fixed
        fixed_C = torch.arange(n_fixed, device=best_LKC.device)
        chunks_LKC = torch.cat([fixed_C.expand(*best_LKC.shape[:2], -1), best_LKC], 2)
        inside = torch.arange(self.chunk, device=best_LKC.device)
        return (chunks_LKC[..., None] * self.chunk + inside).flatten(2).transpose(1, 2)

    def rows(self, capacity: int) -> int:
        """The budget on a full cache of `capacity` tokens, limited to the rows that these need."""
        return min(self.budget, max(capacity, self.fixed + 1))

    def allocations(self, model: Decoder, batch: int, capacity: int, tail: int) -> Allocations:
        """What a SelectedCache on the model's full cache of `capacity` rows a slot will allocate, by name."""
        like, dtype, n_rows = model.config, model.embed_tokens.weight.dtype, batch * (self.rows(capacity) + tail + 1)
        named = {"selected cache": [*cache_rows(like, n_rows, dtype), *delta_states(like, batch, dtype)]}
        if self.chunk > 1 and not self.recent:
            means = len(like.attention_layers), capacity // self.chunk, like.n_kv_heads, like.head_dim
            named["chunk means"] = [(means, dtype)]
        if slides := [window for window in like.cache_windows if window is not None]:
            window = min(max(slides), self.rows(capacity))
            named["windows that are copied"] = [((len(slides), batch * window, like.n_kv_heads, like.head_dim), dtype)]
        return named


class SelectedCache(KVCache):
    """The rows of a full cache that a selection picks for each layer and KV head, and every token committed since.

    Rows [0, fixed) always hold the text's first tokens, and rows [fixed, budget) are a ring. Together they stand for
    the text's first `held` tokens; if these exceed the budget, new tokens overwrite the least important ones. In layers
    with a sliding window the last tokens stand there instead, in their order. A tail follows: the rows that passes on
    this cache have committed (`append`, `commit`), which a step of the full cache drops. Before all picked rows are
    overwritten, a rebuild is `due`: `needs` asks for queries from the target's next pass, and the `on_step` after that
    pass rebuilds. Only a rebuild makes the host wait for the device.

    Attributes:
        held: int64 [B].
        needs: fields of TargetOutput that the target's next pass must return.

    Args:
        full: where exact rows come from. It must outlive this cache.
        tail: rows for passes on this cache, committed and pending.
        depth: depth of the longest path that a step usually accepts.
        stride: committed tokens after which a slot is rebuilt even if there is room.
        windows: of the full cache's layers, None for one without.
    """

    def __init__(
        self,
        full: KVCache,
        selection: Selection,
        tail: int,
        depth: int = 0,
        stride: int = sys.maxsize,
        windows: Sequence[int | None] = (),
    ):
        self.full, self.selection, self._depth, self._stride = full, selection, depth, stride
        self.fixed, self.budget = selection.fixed, selection.rows(full.capacity)
        # The extra last row takes writes that nobody reads, so that slots of unequal counts share one indexed copy.
        (n_layers, batch, _, n_kv_heads, head_dim), keys = full.keys.shape, full.keys
        capacity = self.budget + tail + 1
        super().__init__(n_layers, batch, capacity, n_kv_heads, head_dim, keys.dtype, keys.device)
        self._slots_B1 = torch.arange(batch, device=keys.device)[:, None]
        self.delta = copy.deepcopy(full.delta)
        slides = {layer: window for layer, window in enumerate(windows) if window is not None}
        self._sliding_L11 = torch.tensor([*slides], dtype=torch.int64, device=keys.device)[:, None, None]
        self._window = min(max(slides.values(), default=0), self.budget)
        self.held = torch.zeros_like(self.lengths)
        self._written = torch.full_like(self.lengths, -self.fixed)  # ring writes since row `fixed` was the next one
        # For each slot: how many tokens fit after a build (into free rows or, after a pick, over the picked ones), and
        # an upper bound on those that have come since.
        self._room, self._since = [self.budget] * full.batch, [0] * full.batch
        self.needs = frozenset[str]()

    def start(self, slot: int) -> None:
        """Empty this slot for the full cache's new sequence, and ask for the queries of its prompt."""
        self.reset([slot], self.full.prompt_lengths[slot : slot + 1])
        self.held[slot].fill_(0)
        self._written[slot].fill_(-self.fixed)
        self._room[slot], self._since[slot] = self.budget, 0
        self.needs = frozenset[str]() if self.selection.recent else frozenset({"queries"})

    def due(self, most: int) -> list[int]:
        """Slots whose room may run out within `most` more tokens, or that have reached their stride."""
        if self.selection.recent or self.budget >= self.full.capacity:  # all tokens that it should hold are there
            return []
        limits = [min(room - most + 1, self._stride) for room in self._room]
        return [slot for slot, since in enumerate(self._since) if since >= limits[slot]]

    def on_step(self, state: SlotState, accepted: AcceptResult, queries_LBHd: Tensor | None) -> list[int]:
        """Follow a step of the full cache, and rebuild the slots that are due, or ask for their queries.

        Args:
            state: that after the step.
            queries_LBHd: the former roots' queries, which see all tokens before them and themselves.

        Returns: the slots that were rebuilt.
        """
        most = accepted.nodes.shape[1]
        self.follow(most, state)
        slots = [] if queries_LBHd is None else self._due_soon(most)
        if queries_LBHd is not None and slots:
            totals, seen = torch.stack([self.full.lengths, state.positions - accepted.counts + 1]).tolist()
            for slot in slots:
                self.build(slot, queries_LBHd[:, slot], totals[slot], seen[slot])
            self._copy_unselected()
        self._ask(most)
        return slots

    def on_prefill(self, slot: int, queries_L1Hd: Tensor | None, length: int) -> None:
        """Build a slot at the end of its prefill. queries_L1Hd: of the last of the `length` prefilled tokens."""
        self.build(slot, None if queries_L1Hd is None else queries_L1Hd[:, 0], length, length)
        self._copy_unselected()
        self._ask(0)

    def _due_soon(self, most: int) -> list[int]:
        """Slots that are due within two steps: the next one, and the one whose pass brings the queries."""
        return self.due(2 * max(most, self._depth + 1))

    def _ask(self, most: int) -> None:
        self.needs = frozenset({"queries"} if self._due_soon(most) else ())

    def follow(self, most: int, state: SlotState) -> None:
        """Drop the tail, and copy the full cache's new rows, at most `most` a slot."""

        def take_new(_: SlotState) -> None:
            self._copy_new(most, self.full.lengths)
            self.lengths.copy_(self.held.clamp(max=self.budget))
            self._copy_unselected()

        state.run(("follow", most), (self, self.full), take_new)
        self._since = [since + most for since in self._since]

    def build(self, slot: int, queries_LHd: Tensor | None, total: int, seen: int) -> None:
        """Pick this slot's rows anew from its `total` committed keys, and drop its tail. Tokens after the first `seen`,
        which the queries do not see, and an incomplete last chunk are added as new ones.

        queries_LHd: post-RoPE queries of a committed token; not read for the last tokens.
        """
        full, held, chunk = self.full, min(seen, total), self.selection.chunk
        keys, values = self.keys[:, slot, : self.budget], self.values[:, slot, : self.budget]
        if held <= self.budget:  # all of them
            keys[:, :held], values[:, :held] = full.keys[:, slot, :held], full.values[:, slot, :held]
            written, self._room[slot] = held - self.fixed, self.budget - held
        else:
            held -= held % chunk
            picked_LRK = self.selection.pick(full.keys[:, slot, :held], queries_LHd)
            gather_rows(full.keys[:, slot], full.values[:, slot], picked_LRK, keys, values)
            written, self._room[slot] = 0, self.budget - self.fixed
        self.held[slot].fill_(held)
        self._written[slot].fill_(written)
        limits_B = self.held.clone()
        limits_B[slot].fill_(total)
        self._copy_new(max(1, total - held), limits_B)
        self._since[slot] = total - held
        self.lengths[slot].fill_(min(total, self.budget))

    def _copy_new(self, most: int, lengths_B: Tensor) -> None:
        """Copy the full cache's rows from `held` up to lengths_B, at most `most` a slot, into the ring. Rows that a
        later one overwrites, and rows beyond the count, go to the last row, which nobody reads."""
        counts_B, ring_size = (lengths_B - self.held).clamp(0, most), self.budget - self.fixed
        places_M = torch.arange(most, device=counts_B.device)
        positions_BM = (self.held[:, None] + places_M).clamp(max=self.full.capacity - 1)
        writes_BM, end_B1 = self._written[:, None] + places_M, (self._written + counts_B)[:, None]
        rows_BM = torch.where(writes_BM < 0, writes_BM, writes_BM % ring_size) + self.fixed
        lost_BM = (writes_BM >= end_B1) | ((writes_BM >= 0) & (writes_BM < end_B1 - ring_size))
        rows_BM = rows_BM.masked_fill(lost_BM, self.capacity - 1)
        self.keys[:, self._slots_B1, rows_BM] = self.full.keys[:, self._slots_B1, positions_BM]
        self.values[:, self._slots_B1, rows_BM] = self.full.values[:, self._slots_B1, positions_BM]
        self.held.add_(counts_B)
        self._written.add_(counts_B)

    def _copy_unselected(self) -> None:
        """Bring what is not selected to the full cache's state: the last rows of layers with a sliding window, and the
        states of linear attention."""
        if self._window:
            behind_M = torch.arange(-self._window, 0, device=self.lengths.device)
            positions_BM, rows_BM = self.full.lengths[:, None] + behind_M, self.lengths[:, None] + behind_M
            rows_BM = rows_BM.masked_fill(rows_BM < 0, self.capacity - 1)
            where = self._sliding_L11, self._slots_B1
            for own, full in ((self.keys, self.full.keys), (self.values, self.full.values)):
                own[*where, rows_BM] = full[*where, positions_BM.clamp(min=0)]
        if self.delta is not None and self.full.delta is not None:
            self.delta.follow(self.full.delta)
