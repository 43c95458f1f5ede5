"""TriForce (arXiv 2404.11912): an engine used as a drafter.

In the inner level a small model drafts for the target on a cache of retrieved rows. The chain of tokens that the inner
level commits is the proposal that the outer level verifies, the target on the full cache. The inner level has its own
runner (infer/runner.py), with the same noise and parameters; the levels exchange only tokens. Without a small model the
inner level is self-speculation; with recent rows instead of retrieved ones it is the naive policy (MagicDec). The small
model is in infer/drafters/small_model.py, the cache and what is retrieved in infer/caches/partial.py.
Shapes: L layers, B slots, H query heads, C chain.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.partial import Recent, SelectedCache, TopChunks, selected_rows
from longdraft.infer.caches.ring import refuse_windows
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

# The rolling acceptance of a chain's tokens is a mean over about this many steps. Below the floor the cache is stale.
ROLLING_STEPS = 8
ACCEPTANCE_FLOOR = 0.5


class TriForceDrafter(Drafter):
    """Proposes the chain that the target chooses on a cache of `budget` rows.

    Args:
        target: the loaded target.
        small: a loaded model of the same vocabulary, which drafts for the inner level; None for none.
        gamma: tokens that a small model drafts at a time.
        chain: tokens collected for the outer verification.
        budget: rows of the target's partial cache, for each layer and KV head.
        chunk: keys that are retrieved together.
        stride: accepted tokens after which the rows are retrieved again. After a quarter of them already if the rolling
            fraction of the chain's accepted tokens is below ACCEPTANCE_FLOOR.
        policy: "retrieval", or "streaming" for the sinks and the most recent rows, which need neither chunk nor stride.
        sinks: first tokens that always stay, in a small model's cache and under "streaming".
        window: rows of a small model's cache.

    Raises:
        ValueError: options out of range; a small model that does not fit (see SmallModelDrafter), or whose window is
            too small for the chain; a target with sliding windows.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        small: Instance[Target] | None = None,
        *,
        gamma: Count = 2,
        chain: Count = 6,
        budget: Count = 4096,
        chunk: Count = 8,
        stride: Count = 256,
        policy: Literal["retrieval", "streaming"] = "retrieval",
        sinks: CountOrZero = 16,
        window: Count = 256,
    ):
        self.target, self.chain, self._stride = target, chain, stride
        refuse_windows(target.model.config, f"budget={budget}: a cache of selected rows")
        self._policy = TopChunks(budget, chunk) if policy == "retrieval" else Recent(budget, sinks)
        self.inner: Drafter = Plain()
        if small is not None:
            self.inner = SmallModelDrafter(target, small, gamma, sinks, window, taken_back=chain + 1)
        self.parts = [self.inner]
        self.max_nodes = self.max_depth = chain
        self._runner = Runner(target.model, self.inner, nodes=chain, graphs=False)  # `state.graphs` records instead
        self._cache: SelectedCache | None = None
        self._ask_for_queries(self._policy.scored)

    def allocations(self, batch: int, capacity: int) -> Allocations:
        model = self.target.model
        dtype = model.embed_tokens.weight.dtype
        selected = selected_rows(self._policy, model.config, dtype, batch, capacity, self._tail)
        return {**selected, **super().allocations(batch, capacity)}

    @property
    def _tail(self) -> int:
        """Rows after the budget: a chain, and the widest inner pass."""
        return self.chain + 1 + self._runner.max_nodes + self.inner.max_depth

    def _ask_for_queries(self, wanted: bool) -> None:
        self.needs = frozenset({"queries"}) if wanted else frozenset()

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._cache is None or self._cache.full is not cache:
            self._allocate(cache)
        assert self._cache is not None
        self._cache.reset([slot])
        super().on_start(slot, request, self._cache)
        self._acceptance[slot] = 1.0
        self._ask_for_queries(self._policy.scored)
        self.needs = self.needs | self.inner.needs

    def _allocate(self, full: KVCache) -> None:
        config, batch = self.target.model.config, full.batch
        self._cache = SelectedCache(full, self._policy, config, self._tail, self.chain, self._stride)
        self._runner.cache = self._cache
        # The inner level has its own history, because the outer level must not see what it adds.
        self._history = History(batch, full.capacity, full.keys.device)
        self._acceptance = [1.0] * batch  # of each slot's chains, rolling
        self._offered = 0  # tokens of the last proposal, 0 if the step had none

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        assert self._cache is not None
        super().on_prefill(slot, prompt, start, end, output)
        if end == len(prompt) - 1:
            self._cache.build_from_prompt(slot, output.queries, end)
            self._ask_for_queries(self._cache.needs_queries)

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        assert self._cache is not None
        self._offered = most = min(self.chain, budget.max_nodes)
        begin_B = state.positions.clone()
        self._runner.state = inner = self._inner_state(state)
        collected = [0] * len(begin_B)
        while True:
            # The host reads every pass, because one pass too many costs far more than waiting.
            step = self._runner.read(self._runner.step())
            collected = [count + len(new) for count, new in zip(collected, step.tokens, strict=True)]
            if all(tokens == 0 or tokens >= most for tokens in collected):
                break
            inner.active = inner.active & (inner.positions < begin_B + most)
        self._outer, self._positions = begin_B, inner.positions  # positions of both levels' roots
        chain_BC = self._history.read(begin_B + 1, most).masked_fill(~state.active[:, None], -1)
        return TokenTree.from_chain(state.roots, chain_BC)

    def _inner_state(self, state: SlotState) -> SlotState:
        """The inner level's state, equal to the outer one's. The history is copied whole: a megabyte a slot at 128K
        tokens, little beside a pass over these."""
        self._history.tokens.copy_(state.history.tokens)
        self._history.prompt_lengths.copy_(state.history.prompt_lengths)
        own = {"roots": state.roots.clone(), "positions": state.positions.clone(), "active": state.active.clone()}
        return replace(state, **own, history=self._history, logprobs=False)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._cache is not None
        agreed_B = self._agreed(state) if self._offered else torch.zeros_like(state.positions)
        if not self._offered:
            self.inner.on_step(state, tree, accepted, output)
        elif isinstance(self.inner, SmallModelDrafter):
            self.inner.rewind(self._outer + 1 + agreed_B, accepted.nodes.shape[1])
        counts, stale = None, list[int]()
        if self._policy.scored:
            counts, agreements = torch.stack([accepted.counts, agreed_B]).tolist()
            for slot, agreed in enumerate(agreements):
                if counts[slot] and self._offered:
                    fraction = min(agreed, self._offered) / self._offered
                    self._acceptance[slot] += (fraction - self._acceptance[slot]) / ROLLING_STEPS
            stale = [slot for slot, fraction in enumerate(self._acceptance) if fraction < ACCEPTANCE_FLOOR]
        for slot in self._cache.on_step(state.positions, accepted, output.queries, counts, stale):
            self._acceptance[slot] = 1.0
        self._offered = 0
        self._ask_for_queries(self._cache.needs_queries)

    def _agreed(self, state: SlotState) -> Tensor:
        """int64 [B]: how many of the inner level's tokens after the last proposal's root the outer level committed."""
        most = self.chain + self.inner.max_depth + 1
        first_B, ahead = self._outer + 1, torch.arange(most, device=self._outer.device)
        last_B = torch.minimum(self._positions, state.positions)
        same = (self._history.read(first_B, most) == state.history.read(first_B, most)) & (
            first_B[:, None] + ahead <= last_B[:, None]
        )
        return same.cumprod(1).sum(1)

    def release(self) -> None:
        self._cache = self._runner.cache = None
        super().release()
