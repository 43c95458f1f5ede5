"""TriForce (arXiv 2404.11912): an engine used as a drafter.

In the inner level a small model drafts for the target on a cache of retrieved rows. The chain of tokens that the inner
level commits is the proposal that the outer level verifies, the target on the full cache. The inner level has its own
runner (infer/runner.py), with the same noise and parameters; the levels exchange only tokens. Without a small model the
inner level is self-speculation; with recent rows instead of retrieved ones it is the naive policy (MagicDec). The small
model is in infer/drafters/small_model.py, the cache and what is retrieved in infer/caches/partial.py.
Shapes: L layers, B slots, H query heads, C chain.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.partial import Recent, SelectedCache, TopChunks, selected_rows
from longdraft.infer.caches.ring import RingCache, refuse_windows
from longdraft.infer.drafters.base import Count, CountOrZero, Drafter, Request
from longdraft.infer.drafters.plain import Plain
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.history import History
from longdraft.infer.runner import Runner
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# The rolling acceptance is a mean over about this many steps.
ROLLING_STEPS = 8
ACCEPTANCE_FLOOR = 0.5


def _refuse(where: str, **given: object) -> None:
    """Raise ValueError for the first option that has a value although nothing uses it."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: {where}")


class TriForceDrafter(Drafter):
    """Proposes the chain that the target chooses on a cache of `budget` rows.

    Args:
        target: the loaded target.
        small: what drafts for the inner level: a loaded model of the same vocabulary, any Drafter, or None for none.
        gamma: tokens that a small model drafts at a time; None is 2.
        chain: tokens collected for the outer verification.
        budget: rows of the target's partial cache, for each layer and KV head.
        chunk: keys that are retrieved together; None is 8.
        stride: accepted tokens after which the rows are retrieved again; None is 256. After a quarter of them already
            if the rolling fraction of the chain's accepted tokens is below ACCEPTANCE_FLOOR.
        policy: "retrieval", or "streaming" for the sinks and the most recent rows.
        sinks: first tokens that always stay, in a small model's cache and under "streaming"; None is 16.
        window: rows of a small model's cache; None is 256.

    Raises:
        ValueError: options out of range, or given where nothing uses them (gamma, window and sinks belong to a loaded
            small model, sinks to "streaming" too; chunk and stride to "retrieval"); a small model
            that does not fit (see SmallModelDrafter), or whose window is too small for the chain; a target with
            sliding windows.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        small: Instance[Target] | Instance[Drafter] | None = None,
        *,
        gamma: Count | None = None,
        chain: Count = 6,
        budget: Count = 4096,
        chunk: Count | None = None,
        stride: Count | None = None,
        policy: Literal["retrieval", "streaming"] = "retrieval",
        sinks: CountOrZero | None = None,
        window: Count | None = None,
    ):
        retrieval, loaded = policy == "retrieval", isinstance(small, Target)
        if not loaded:
            _refuse("goes with a loaded model as small; leave it out or give one", gamma=gamma, window=window)
        if not retrieval:
            _refuse("goes with policy='retrieval'; leave it out or choose that", chunk=chunk, stride=stride)
        elif not loaded:
            _refuse("goes with policy='streaming' or a loaded model as small; leave it out", sinks=sinks)
        self.target, self.chain, self._stride = target, chain, stride or 256
        sinks = 16 if sinks is None else sinks
        refuse_windows(target.model.config, f"budget={budget}: a cache of selected rows")
        self._policy = TopChunks(budget, chunk or 8) if retrieval else Recent(budget, sinks)
        self.inner: Drafter
        if isinstance(small, Target):  # it takes back a whole rejected chain
            gamma = gamma or 2
            self.inner = SmallModelDrafter(target, small, gamma, sinks, window or 256, slack=chain + gamma + 1)
        else:
            self.inner = Plain() if small is None else small
        self.max_nodes = self.max_depth = chain
        self._runner = Runner(target.model, self.inner, nodes=chain, graphs=False)  # `state.graphs` records instead
        self._cache: SelectedCache | None = None
        self._rebuilds = {"stride": 0, "acceptance": 0, "room": 0}
        self._set_needs(self._policy.scored)

    @property
    def parts(self) -> Sequence[Drafter]:
        return [self.inner]

    def decisions(self) -> Mapping[str, str]:
        if not self._policy.scored:
            return self.inner.decisions()
        counts = ", ".join(f"{count} by {why}" for why, count in self._rebuilds.items())
        return {**self.inner.decisions(), "rebuilds of the retrieval cache": counts}

    def allocations(self, batch: int, capacity: int) -> Allocations:
        model = self.target.model
        dtype = model.embed_tokens.weight.dtype
        selected = selected_rows(self._policy, model.config, dtype, batch, capacity, self._tail)
        return {**selected, **self.inner.allocations(batch, capacity)}

    @property
    def _tail(self) -> int:
        """Rows after the budget: a chain, and the widest inner pass."""
        return self.chain + 1 + self._runner.max_nodes + self.inner.max_depth

    def _set_needs(self, queries: bool) -> None:
        self.needs = frozenset({"queries"}) if queries else frozenset()

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if isinstance(cache, RingCache):
            raise ValueError("small: a TriForce drafter cannot draft for another one, whose cache is a part already")
        if self._cache is None or self._cache.full is not cache:
            self._allocate(cache)
        assert self._cache is not None
        self._cache.reset([slot])
        self.inner.on_start(slot, request, self._cache)
        self._committed[slot], self._known[slot] = [], 0
        self._forget(slot)
        self._set_needs(self._policy.scored)
        self.needs = self.needs | self.inner.needs

    def _allocate(self, full: KVCache) -> None:
        self._cache = SelectedCache(full, self._policy, self.target.model.config, self._tail)
        self._runner.cache = self._cache
        batch = full.batch
        # The inner level has its own history, because the outer level must not see what it adds.
        self._history = History(batch, full.capacity, full.keys.device)
        self._committed: list[list[int]] = [[] for _ in range(batch)]
        self._known = [0] * batch  # how many of these the outer level has committed
        self._step_tokens = 0  # the most tokens that an outer step has committed to a slot
        self._since_build, self._acceptance = [0] * batch, [1.0] * batch
        self._wanted: dict[int, str] = {}  # slots to rebuild with the next pass's queries, and why
        self._offered = 0  # tokens of the last proposal, 0 if the step had none

    def _forget(self, slot: int) -> None:
        """Start the statistics of this slot's selection anew."""
        self._since_build[slot], self._acceptance[slot] = 0, 1.0
        self._wanted.pop(slot, None)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        assert self._cache is not None
        self.inner.on_prefill(slot, prompt, start, end, output)
        if end == len(prompt) - 1:
            self._cache.build_from_prompt(slot, output.queries if self._policy.scored else None, end)

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        assert self._cache is not None
        self._offered = count = min(self.chain, budget.max_nodes)
        self._set_needs(bool(self._wanted) or self._cache.needs_queries)
        begin_B, late = state.positions.clone(), [self._late(state)]
        self._runner.state = inner = self._inner_state(state)
        collected = [0] * len(self._committed)
        while True:
            # The host reads every pass, because one pass too many costs far more than waiting.
            emitted = self._runner.read(self._runner.step(*late))
            if late:
                self._list_late(*emitted.also)
                late = []
            for slot, new in enumerate(emitted.tokens):
                self._committed[slot] += new
                collected[slot] += len(new)
            if all(tokens == 0 or tokens >= count for tokens in collected):
                break
            inner.active = inner.active & (inner.positions < begin_B + count)
        self._outer, self._positions = begin_B, inner.positions  # positions of both levels' roots
        chain_BC = self._history.read(begin_B + 1, count).masked_fill(~state.active[:, None], -1)
        return TokenTree.from_chain(state.roots, chain_BC)

    def _inner_state(self, state: SlotState) -> SlotState:
        """The inner level's state, equal to the outer one's. Only new tokens of the lists are copied. The history is
        copied whole: a megabyte a slot at 128K tokens, little beside a pass over these."""
        self._history.tokens.copy_(state.history.tokens)
        self._history.prompt_lengths.copy_(state.history.prompt_lengths)
        for slot, tokens in enumerate(state.committed):
            self._committed[slot][self._known[slot] :] = tokens[self._known[slot] :]
        self._known = [len(tokens) for tokens in self._committed]
        places = state.roots.clone(), state.positions.clone(), state.active.clone()
        return SlotState(*places, self._history, state.sampling, self._committed, state.graphs)

    def _late(self, state: SlotState) -> Tensor:
        """[B, 2 + R], for `_list_late`: active, position, and the last R tokens up to the root, of which the outer
        level's lists may lack those of one step when the host lags."""
        most = 1 + self._step_tokens
        active_B1, places_B1 = state.active.long()[:, None], state.positions[:, None]
        recent_BR = state.history.read(state.positions - (most - 1), most)
        return torch.cat([active_B1, places_B1, recent_BR], dim=1)

    def _list_late(self, rows: list[list[int]]) -> None:
        """Extend the inner level's lists up to the outer roots. rows: what `_late` returned."""
        for tokens, (active, position, *recent) in zip(self._committed, rows, strict=True):
            if active and (missing := position + 1 - len(tokens)) > 0:
                tokens += recent[len(recent) - missing :]
        self._known = [len(tokens) for tokens in self._committed]

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._cache is not None
        most, agreed_B = accepted.nodes.shape[1], torch.zeros_like(state.positions)
        if self._offered:
            agreed_B = self._agreed(state)
            self.inner.rewind(self._outer + 1 + agreed_B)
        self.inner.advance(most)
        self._step_tokens = max(self._step_tokens, most)
        rebuilt = self._cache.on_step(state.positions, accepted, output.queries, self.chain, list(self._wanted))
        if self._policy.scored:
            counts, agreements, positions = torch.stack([accepted.counts, agreed_B, state.positions]).tolist()
            for slot in rebuilt:
                if counts[slot] and positions[slot] > self._cache.budget:  # not for a slot without a request
                    self._rebuilds[self._wanted.get(slot, "room")] += 1
                self._forget(slot)
            self._want(counts, agreements, positions)
        self._offered = 0
        self._set_needs(bool(self._wanted) or self._cache.needs_queries)

    def _agreed(self, state: SlotState) -> Tensor:
        """int64 [B]: how many of the inner level's tokens after the last proposal's root the outer level committed."""
        most = self.chain + self.inner.max_depth + 1
        first_B, ahead = self._outer + 1, torch.arange(most, device=self._outer.device)
        last_B = torch.minimum(self._positions, state.positions)
        same = (self._history.read(first_B, most) == state.history.read(first_B, most)) & (
            first_B[:, None] + ahead <= last_B[:, None]
        )
        return same.cumprod(1).sum(1)

    def _want(self, counts: list[int], agreements: list[int], positions: list[int]) -> None:
        """Note the slots to rebuild by stride or acceptance, before they run out of rows."""
        assert self._cache is not None
        for slot, (count, agreed, position) in enumerate(zip(counts, agreements, positions, strict=True)):
            if not count or slot in self._wanted:
                continue
            self._since_build[slot] += count
            if self._offered:
                share = min(agreed, self._offered) / self._offered
                self._acceptance[slot] += (share - self._acceptance[slot]) / ROLLING_STEPS
            since = self._since_build[slot]
            if self._cache.holds_all or position < self._cache.budget - self.chain:
                self._since_build[slot] = 0  # the cache still holds every token
            elif since >= self._stride:
                self._wanted[slot] = "stride"
            elif self._acceptance[slot] < ACCEPTANCE_FLOOR and 4 * since >= self._stride:
                self._wanted[slot] = "acceptance"

    def release(self) -> None:
        self._cache = self._runner.cache = None
        self.inner.release()
