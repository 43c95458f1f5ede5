"""TriForce (arXiv 2404.11912): an engine used as a drafter.

In the inner level a small model drafts for the target on a cache of selected rows. The chain of tokens that the inner
level commits is the proposal that the outer level verifies, the target on the full cache. The inner level has its own
runner (infer/runner.py), with the same noise and parameters; the levels exchange only tokens. Without a small model the
inner level is self-speculation. The small model is in infer/drafters/small_model.py, the cache and what is retrieved in
infer/partial_cache.py. Shapes: B slots, C chain.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Count, Drafter, Plain, Request
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.history import History
from longdraft.infer.partial_cache import SelectedCache, Selection
from longdraft.infer.runner import Runner
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.footprint import Allocations
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# Committed tokens after which the rows are retrieved again.
STRIDE = 256
GAMMA = 2


class TriForceDrafter(Drafter):
    """Proposes the chain that the target chooses on a cache of `budget` rows.

    Args:
        target: the loaded target.
        small: a loaded model of the same vocabulary, which drafts for the inner level; None: no small model.
        gamma: tokens that the small model drafts at a time; only with `small`.
        chain: tokens collected for the outer verification.
        budget: rows of the target's partial cache, for each layer and KV head.
        chunk: keys that are retrieved together. The first chunk always stays.
        select: "retrieved" rows, or the "recent" ones, which are the last tokens (without `small` that is MagicDec's
            self-speculation, arXiv 2408.11049, at its simplest).

    Raises:
        ValueError: options out of range; a small model that does not fit (see SmallModelDrafter).
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        small: Instance[Target] | None = None,
        *,
        gamma: Count = GAMMA,
        chain: Count = 6,
        budget: Count = 4096,
        chunk: Count = 8,
        select: Literal["retrieved", "recent"] = "retrieved",
    ):
        if small is None and gamma != GAMMA:
            raise ValueError(f"gamma={gamma}: only for a small model, but there is none; give small, or omit gamma")
        self.target, self.chain = target, chain
        self._selection = Selection(budget, fixed=chunk, chunk=chunk, recent=select == "recent")
        self.inner: Drafter = Plain() if small is None else SmallModelDrafter(target, small, gamma)
        self.parts = [self.inner]
        self.max_nodes = self.max_depth = chain
        self._runner = Runner(target.model, self.inner, nodes=chain, graphs=False)  # `state.graphs` records instead
        self._tail = chain + 1 + self._runner.max_nodes + self.inner.max_depth  # a chain, and the widest inner pass
        self._cache: SelectedCache | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self._cache is None else self._cache.needs

    def allocations(self, batch: int, capacity: int) -> Allocations:
        selected = self._selection.allocations(self.target.model, batch, capacity, self._tail)
        return {**selected, **super().allocations(batch, capacity)}

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._cache is None or self._cache.full is not cache:
            windows = self.target.model.config.cache_windows
            self._cache = SelectedCache(cache, self._selection, self._tail, self.chain, STRIDE, windows)
            self._runner.cache = self._cache
            # The inner level has its own history, because the outer level must not see what it adds.
            self._history = History(cache.batch, cache.capacity, cache.keys.device)
            numbers_B = torch.zeros_like(cache.lengths)
            self._own = {"roots": numbers_B, "positions": numbers_B.clone(), "active": numbers_B.bool()}
        self._cache.start(slot)
        super().on_start(slot, request, self._cache)

    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        assert self._cache is not None
        super().on_prefill(slot, prompt, start, end, output)
        if end == len(prompt) - 1:
            self._cache.on_prefill(slot, output.queries, end)

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        most, owners = min(self.chain, budget.max_nodes), (self._history, *self._own.values())
        state.run(("inner begin",), owners, self._begin)
        self._runner.state = replace(state, **self._own, history=self._history, matchers=(), logprobs=False)
        left = most
        with self.inner.trying(most) if isinstance(self.inner, SmallModelDrafter) else nullcontext():
            while left > 0:
                # A useless pass costs far more than a wait, so the host queues only passes needed in any case.
                n_passes = math.ceil(left / (1 + self.inner.max_depth))
                for _ in range(n_passes):
                    self._runner.step()
                    left_0 = state.run(("inner left", most), owners, partial(self._left, most))
                left -= n_passes  # a pass commits one token at least
                if left > 0:
                    left = int(left_0)
        return state.run(("inner chain", most), owners, partial(self._chain, most))

    def _begin(self, state: SlotState) -> None:
        """Make the inner level's state equal to the outer one's. The full history is copied: a megabyte a slot at 128K
        tokens, little beside a pass over these."""
        self._history.tokens.copy_(state.history.tokens)
        self._history.prompt_lengths.copy_(state.history.prompt_lengths)
        for name, x_B in self._own.items():
            x_B.copy_(getattr(state, name))

    def _left(self, most: int, state: SlotState) -> Tensor:
        """The most tokens that any slot lacks of `most`. Slots that lack none become inactive."""
        left_B = (state.positions + most - self._own["positions"]) * state.active
        self._own["active"].copy_(left_B > 0)
        return left_B.max()

    def _chain(self, most: int, state: SlotState) -> TokenTree:
        """The tokens that the inner level has committed after each root of the outer level."""
        chain_BC = self._history.read(state.positions + 1, most).masked_fill(~state.active[:, None], -1)
        return TokenTree.from_chain(state.roots, chain_BC)

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        assert self._cache is not None
        super().on_step(state, tree, accepted, output)
        self._cache.on_step(state, accepted, output.queries)

    def release(self) -> None:
        self._cache = self._runner.cache = None
        super().release()
