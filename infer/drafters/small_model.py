"""A small model of the same vocabulary drafts a chain: classic draft-model speculation, and TriForce's lowest tier
(arXiv 2404.11912, section 4.2), on a cache of sinks and recent tokens, so that it drafts at any length.

It chooses as the target would, with the noise that the target's choices will use (infer/choice/slots.py). Rows of its
own passes stay as far as the committed tokens agree with them; other tokens are read when they are next needed. The
cache is in infer/caches/ring.py. Shapes: B slots, T rows of a pass, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.caches.ring import StreamingCache, check_streaming
from longdraft.infer.drafters.base import Count, CountOrZero, DeviceDrafter, Request
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels.transfer import integers
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.footprint import Allocations, cache_rows
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# A position after every sequence's end.
NOWHERE = 2**40


class SmallModelDrafter(DeviceDrafter):
    """Proposes a chain of `gamma` tokens of another model.

    Args:
        target: the loaded target.
        small: any loaded model with the target's vocabulary, on its device.
        gamma: tokens a step (TriForce: 2).
        sinks: first tokens that always stay in its cache.
        window: rows of its cache, sinks included.
        taken_back: how many tokens an outer level may take back (`rewind`), beside those of a proposal.

    Raises:
        ValueError: vocabularies or tokenizers that differ, a RoPE type whose table depends on the length,
            sliding windows, or numbers out of range.
    """

    @validated
    def __init__(
        self,
        target: Instance[Target],
        small: Instance[Target],
        gamma: Count = 2,
        sinks: CountOrZero = 16,
        window: Count = 256,
        taken_back: CountOrZero = 0,
    ):
        check_vocabularies(target, small)
        self.slack = gamma + taken_back
        check_streaming(small.model, window, sinks, self.slack)
        self.small, self.gamma, self._sinks, self._window = small, gamma, sinks, window
        self.max_nodes = self.max_depth = gamma
        self._widest = min(max(window, 2), MOST_ROWS)
        self._cache: StreamingCache | None = None
        self._behind = 0  # the most tokens before its root that a slot lacks

    @property
    def class_stages(self) -> Sequence[int]:
        return range(1 + self.gamma)

    def allocations(self, batch: int, capacity: int) -> Allocations:
        rows, model = batch * (self._window + self._tail + 1), self.small.model
        return {"small model's cache": cache_rows(model.config, rows, model.embed_tokens.weight.dtype)}

    @property
    def _tail(self) -> int:
        """Rows of a catch-up pass and of the drafted tokens after it."""
        return self._widest + self.gamma

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        if self._cache is None or self._cache.batch != cache.batch:
            sizes = {"window": self._window, "sinks": self._sinks, "slack": self.slack, "widest": self._tail}
            self._cache = StreamingCache(self.small.model, cache.batch, **sizes)
            self._drafted = torch.full((cache.batch, self.gamma - 1), -1, device=cache.lengths.device)
            self._drafted_at = torch.zeros_like(cache.lengths)  # position of the first of them
        self._cache.reset([slot])
        self._drafted[slot].fill_(-1)
        self._drafted_at[slot].fill_(NOWHERE)

    def buffers(self) -> tuple[object, ...]:
        return self._cache, self._drafted, self._drafted_at

    @torch.no_grad()
    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        cache = self._cache
        assert cache is not None
        slot_cache = cache.slot(slot)
        for tokens_T in integers(prompt[start:end], cache.lengths.device).split(self._widest):
            cache.settle()
            positions_1T = (cache.tokens[slot] + torch.arange(len(tokens_T), device=tokens_T.device))[None]
            self.small.model(Pass(tokens_T[None], slot_cache, positions_1T, needs=frozenset({"last_kv"})))
            slot_cache.commit(None, torch.full_like(slot_cache.lengths, len(tokens_T)))

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, int]:
        """How many tokens to draft, and the most tokens that a slot must read before its root."""
        count = min(self.gamma, budget.max_nodes, budget.stages)
        behind, self._behind = max(0, self._behind), -1  # the root is read
        if behind < self._widest:  # a few more rows before the root cost little
            behind = min(state.rounded(behind + 1), self._widest) - 1
        return count, behind

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, int]) -> TokenTree:
        count, behind = plan
        self._drop_disagreeing(state)
        logits_BV = self._catch_up(state, behind)
        chain_BC = torch.full_like(state.roots, -1)[:, None].repeat(1, count)
        for i in range(count):
            if i > 0:
                logits_BV = self._pass(chain_BC[:, i - 1 : i], state.positions + i, state.active.long())
            chain_BC[:, i] = state.ranking(logits_BV, 1 + i).argmax(-1)
            if 1 + i < count and not budget.goes_on(TokenTree.from_chain(state.roots, chain_BC[:, : 1 + i])):
                break
        self._drafted[:, : count - 1] = chain_BC[:, : count - 1]
        self._drafted[:, count - 1 :] = -1
        self._drafted_at.copy_(state.positions + 1)
        return TokenTree.from_chain(state.roots, chain_BC)

    def _drop_disagreeing(self, state: SlotState) -> None:
        """Keep the drafted rows whose tokens were committed, except the root's: its logits are still needed."""
        assert self._cache is not None
        committed_BG = state.history.read(self._drafted_at, self.gamma - 1)
        agreeing_B = (committed_BG == self._drafted).cumprod(1).sum(1)
        self._cache.rewind(torch.minimum(self._drafted_at + agreeing_B, state.positions))

    def _catch_up(self, state: SlotState, behind: int) -> Tensor:
        """Run the model over the tokens committed since its last pass, and over the root: the root's logits [B, V].

        behind: the most tokens before the root that an active slot lacks.
        """
        cache = self._cache
        assert cache is not None
        behind_B = torch.where(state.active, state.positions - cache.tokens, 0).clamp(min=0)
        while behind >= self._widest:
            counts_B = behind_B.clamp(max=self._widest)
            cache.settle()
            self._pass(state.history.read(cache.tokens, self._widest), cache.tokens, counts_B)
            behind_B, behind = behind_B - counts_B, behind - self._widest
        cache.settle()
        tokens_BT, counts_B = state.history.read(cache.tokens, behind + 1), behind_B + state.active
        return self._pass(tokens_BT, cache.tokens, counts_B, behind_B[:, None])

    def _pass(self, tokens_BT: Tensor, first_B: Tensor, counts_B: Tensor, at_B1: Tensor | None = None) -> Tensor:
        """Run the model over tokens at positions first_B, first_B + 1, ... and commit the first counts_B of them.
        Returns the logits [B, V] of one token of each slot, at index at_B1 (None: the last)."""
        width = tokens_BT.shape[1]
        at_B1 = torch.full_like(first_B, width - 1)[:, None] if at_B1 is None else at_B1
        positions_BT = first_B[:, None] + torch.arange(width, device=first_B.device)
        output = self.small.model(Pass(tokens_BT, self._cache, positions_BT, logits_at_BR=at_B1))
        assert output.logits is not None and self._cache is not None
        self._cache.commit(None, counts_B)
        return output.logits[:, 0]

    def on_step(self, state: SlotState, tree: TokenTree, accepted: AcceptResult, output: TargetOutput) -> None:
        self._behind += accepted.nodes.shape[1]

    def release(self) -> None:
        self._cache = None

    def rewind(self, lengths_B: Tensor, most: int) -> None:
        """An outer level took back the tokens of the last proposals at positions >= lengths_B[b] (int64), and committed
        at most `most` tokens behind the root of the first of these proposals."""
        assert self._cache is not None
        self._cache.rewind(lengths_B)
        self._behind = most - 1


def check_vocabularies(target: Target, small: Target) -> None:
    """Raise ValueError if the small model differs from the target in its vocabulary or its tokenizer."""
    sizes = [model.model.config.vocab_size for model in (small, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"small: {small.name} has a vocabulary of {sizes[0]} tokens and {target.name} one of {sizes[1]}; "
            f"choose a small model of the target's family"
        )
    prints = [model.fingerprint.get("tokenizer", "none") for model in (small, target)]
    if "none" not in prints and prints[0] != prints[1]:
        raise ValueError(
            f"small: {small.name} has another tokenizer than {target.name}, so the same number is another token; "
            f"choose a small model with the target's tokenizer"
        )
