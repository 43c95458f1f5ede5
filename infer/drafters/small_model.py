"""A small model of the same vocabulary drafts a chain: classic draft-model speculation, and TriForce's lowest tier
(arXiv 2404.11912, section 4.2).

It reads the first tokens of the text (the attention sinks of StreamingLLM, arXiv 2309.17453) and the last ones, at
their positions in its cache, so it drafts at any length. A full cache is emptied and refilled with the sinks and the
last tokens, half a window in total. Rows stay valid as long as the text agrees with their tokens. Linear attention
cannot drop tokens, so its states before the last root are kept, and a proposal reads the text from there on. The model
chooses with the noise of the target's choices (infer/choice/slots.py).
Shapes: B slots, T tokens of a pass, C chain, W rows of the cache, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Count, DeviceDrafter, Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.footprint import Allocations, cache_rows, delta_states, pending_bytes
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# The usual number of tokens before the root in a recorded pass: a few more rows cost a GPU little.
FEW = 16


class SmallModelDrafter(DeviceDrafter):
    """Proposes a chain of `gamma` tokens of another model.

    Args:
        target: the loaded target.
        small: any loaded model with the target's vocabulary, on its device.
        gamma: tokens a step (TriForce: 2).

    Attributes:
        window: rows of its cache. sinks: rows for the first tokens of the text (TriForce: 256 and 16).

    Raises ValueError for vocabularies or tokenizers that differ, and if gamma exceeds half the window.
    """

    window, sinks = 256, 16

    @validated
    def __init__(self, target: Instance[Target], small: Instance[Target], gamma: Count = 2):
        check_small(target, small)
        if 2 * gamma > self.window:
            raise ValueError(f"gamma={gamma}: give at most half of the small model's window of {self.window} tokens")
        self.small, self.gamma = small, gamma
        self.max_nodes = self.max_depth = gamma
        self._linear = small.model.config.delta is not None
        self._cache: KVCache | None = None
        self._kept: KVCache | None = None  # without rows: linear attention's states before the last root, and lengths
        # Upper bounds over all slots: cache rows for the tokens before the root; missing rows, the root's included.
        self._span = self._missing = 0
        self._most_missing = self.window
        self._trial: list[bool] | None = None  # within `trying`: whether each proposal so far refilled the caches
        self._usual = FEW  # a recorded pass reads this many tokens before the root, or half a window

    @property
    def class_stages(self) -> Sequence[int]:
        return range(1 + self.gamma)

    def allocations(self, batch: int, capacity: int) -> Allocations:
        model = self.small.model
        dtype = model.embed_tokens.weight.dtype
        rows = cache_rows(model.config, batch * self.window, dtype)
        named = {"small model's cache": [*rows, *delta_states(model.config, 2 * batch, dtype)]}
        pending = pending_bytes(model.config, batch * (1 + self.window // 2), dtype, model.embed_tokens.weight.device)
        return named | ({"small model's pass": [((pending,), torch.uint8)]} if pending else {})

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._cache is None or self._kept is None or self._cache.batch != cache.batch:
            self._cache = self.small.model.new_cache(cache.batch, self.window)
            self._read = torch.zeros(cache.batch, self.window, dtype=torch.int64, device=cache.lengths.device)
            self._skipped = torch.zeros_like(cache.lengths)  # tokens of the text between the sinks and the next row
            self._kept = self.small.model.new_cache(cache.batch, 0)
        before = min(len(request.prompt) - 1, self.window // 2)
        self._cache.reset([slot])
        self._kept.reset([slot])
        self._skipped[slot].fill_(len(request.prompt) - 1 - before)
        self._span, self._missing = max(self._span, before), max(self._missing, 1 + before)

    def buffers(self) -> tuple[object, ...]:
        return self._cache, self._read, self._skipped, self._kept

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, int, bool, bool]:
        """How many tokens to draft, the most tokens that a slot must read before its root, whether the caches of all
        slots are refilled, and whether the states before the roots are kept."""
        count = min(self.gamma, budget.max_nodes, budget.stages)
        half = self.window // 2
        missing = state.rounded(max(0, self._missing - 1), min(self._usual, half), half)
        if begins_anew := missing == half or self._span + missing + self.gamma > self.window:
            self._span = missing = half
        keeps = self._linear and (begins_anew or not self._trial)
        if keeps or not self._linear:
            self._missing = int(self._linear)  # the root's row is kept, but not its state
        if self._trial is not None:
            self._trial.append(begins_anew)
        return count, missing, begins_anew, keeps

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, int, bool, bool]) -> TokenTree:
        count, missing, begins_anew, keeps = plan
        cache, kept = self._cache, self._kept
        assert cache is not None and kept is not None
        if begins_anew:
            cache.reset()
            kept.reset()
            self._skipped.copy_((state.positions - missing).clamp(min=0))
        self._keep_agreeing(state, cache, kept)
        missing_B = state.positions - self._skipped - cache.lengths
        tokens_BT = self._text(state, cache.lengths[:, None] + torch.arange(1 + missing, device=missing_B.device))
        logits_B1V = self._pass(cache, tokens_BT, 1 + missing_B, missing_B, kept if keeps else None)
        chain_BC = torch.full_like(state.roots, -1)[:, None].repeat(1, count)
        zeros_B = torch.zeros_like(missing_B)
        for i in range(count):
            if i > 0:
                logits_B1V = self._pass(cache, chain_BC[:, i - 1 : i], zeros_B + 1, zeros_B)
            chain_BC[:, i] = state.best(logits_B1V, 1 + i, 1)[1][:, 0, 0]
            if 1 + i < count and not budget.goes_on(TokenTree.from_chain(state.roots, chain_BC[:, : 1 + i])):
                break
        return TokenTree.from_chain(state.roots, chain_BC)

    def _keep_agreeing(self, state: SlotState, cache: KVCache, kept: KVCache) -> None:
        """Drop all rows from the first whose token differs from the text on, and the root's: its logits are needed."""
        # In TriForce the cache may have been refilled at a root of the inner level that the outer one rejected.
        self._skipped.copy_(torch.minimum(self._skipped, state.positions))
        rows_1W = torch.arange(self.window, device=state.positions.device)[None]
        agreeing_BW = (self._text(state, rows_1W) == self._read) & (rows_1W < cache.lengths[:, None])
        agreeing_B = torch.minimum(agreeing_BW.cumprod(1).sum(1), state.positions - self._skipped)
        if self._linear:
            agreeing_B = torch.minimum(agreeing_B, kept.lengths)
        cache.rewind(agreeing_B, kept.delta)

    def _text(self, state: SlotState, rows_BT: Tensor) -> Tensor:
        """The text's tokens at these rows of the cache."""
        return state.history.read_at(torch.where(rows_BT < self.sinks, rows_BT, rows_BT + self._skipped[:, None]))

    def _pass(
        self, cache: KVCache, tokens_BT: Tensor, counts_B: Tensor, at_B: Tensor, kept: KVCache | None = None
    ) -> Tensor:
        """Run the model over these tokens and commit the first counts_B of them. Returns the logits [B, 1, V] of the
        tokens at index at_B; kept: gets linear attention's states before these."""
        rows_BT = cache.lengths[:, None] + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        self._read.scatter_(1, rows_BT, tokens_BT)
        output = self.small.model(Pass(tokens_BT, cache, logits_at_BR=at_B[:, None]))
        if kept is not None and kept.delta is not None and cache.delta is not None:
            kept.delta.pending = [*cache.delta.pending]
            kept.commit(None, at_B)
        cache.commit(None, counts_B)
        assert output.logits is not None
        return output.logits

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        most = accepted.nodes.shape[1]
        self._span, self._missing = self._span + most, min(self._missing + most, self._most_missing)
        self._usual = max(self._usual, 2 * most)

    @contextmanager
    def trying(self, most: int) -> Iterator[None]:
        """In this context it drafts after roots that are then rejected, until each slot has `most` tokens more. The
        next root follows the present one."""
        span, refills = self._span, list[bool]()
        self._trial, self._most_missing = refills, 1 + most + self.gamma
        yield
        self._trial, self._most_missing, self._missing = None, self.window, int(self._linear)
        # States that were kept after a refill may have read what is now rejected, so the next proposal refills again.
        self._span = self.window if self._linear and any(refills[1:]) else min(span, self._span)

    def release(self) -> None:
        self._cache = self._kept = None


def check_small(target: Target, small: Target) -> None:
    """Raise ValueError if the small model differs from the target in its vocabulary, its tokenizer or its device."""
    tokenizers = [model.fingerprint.get("tokenizer", "none") for model in (target, small)]
    differ = "none" not in tokenizers and tokenizers[0] != tokenizers[1]
    if differ or target.model.config.vocab_size != small.model.config.vocab_size:
        raise ValueError(
            f"small: {small.name} and {target.name} differ in vocabulary; choose a small model of the target's family"
        )
    devices = [model.model.embed_tokens.weight.device for model in (target, small)]
    if devices[0] != devices[1]:
        raise ValueError(f"small: {small.name} is on {devices[1]}, but {target.name} on {devices[0]}; load both there")
