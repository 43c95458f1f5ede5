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
from longdraft.kernels.transfer import HostCopy, integers
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.footprint import Allocations, cache_rows
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput
from longdraft.models.schema import Instance, validated
from longdraft.models.target import Target

# Tokens that a rewind can take back by default, if the window has room for twice as many.
SLACK = 16
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
        slack: how many tokens can be taken back without reading the text again; None is 16, or a quarter of the window
            if that is less.

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
        slack: CountOrZero | None = None,
    ):
        check_vocabularies(target, small)
        self.slack = max(0, min(SLACK, (window - sinks) // 4)) if slack is None else slack
        check_streaming(small.model, window, sinks, self.slack)
        self.small, self.gamma, self._sinks, self._window = small, gamma, sinks, window
        self.max_nodes = self.max_depth = gamma
        self._widest = min(max(window, 2), MOST_ROWS)
        self._cache: StreamingCache | None = None
        # A slot lacks at most `_most_behind` tokens, and those that `_lacked` counted after the last rewind.
        self._most_behind, self._lacked = 0, None
        self._appended = 0  # the most rows that a slot has appended since the cache was settled

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
            self._cache, self._appended = self._new_cache(cache.batch), 0
            self._drafted = torch.full((cache.batch, self.gamma - 1), -1, device=cache.lengths.device)
            self._drafted_at = torch.zeros_like(cache.lengths)  # position of the first of them
            self._half_read = set[int]()  # slots whose prompt is being read, or was given up before its end
        self._half_read.discard(slot)
        if len(request.prompt) > 1:
            self._half_read.add(slot)
        self._cache.reset([slot])
        self._drafted[slot].fill_(-1)
        self._drafted_at[slot].fill_(NOWHERE)

    def buffers(self) -> tuple[object, ...]:
        return self._cache, self._drafted, self._drafted_at

    def _new_cache(self, batch: int) -> StreamingCache:
        sizes = {"window": self._window, "sinks": self._sinks, "slack": self.slack, "widest": self._tail}
        return StreamingCache(self.small.model, batch, **sizes)

    def _settle(self) -> None:
        assert self._cache is not None
        self._cache.settle(self._appended)
        self._appended = 0

    @torch.no_grad()
    def on_prefill(self, slot: int, prompt: Sequence[int], start: int, end: int, output: TargetOutput) -> None:
        cache = self._cache
        assert cache is not None
        if end == len(prompt) - 1:
            self._half_read.discard(slot)
        self._settle()
        slot_cache = cache.slot(slot)
        for tokens_T in integers(prompt[start:end], cache.lengths.device).split(self._widest):
            positions_1T = (cache.tokens[slot] + torch.arange(len(tokens_T), device=tokens_T.device))[None]
            self.small.model(Pass(tokens_T[None], slot_cache, positions_1T, needs=frozenset({"last_kv"})))
            slot_cache.commit(None, torch.full_like(slot_cache.lengths, len(tokens_T)))
            self._appended = len(tokens_T)
            self._settle()  # or the prompt's length would be part of the next step's plan

    def plan(self, state: SlotState, budget: Budget) -> tuple[int, int, int]:
        """How many tokens to draft, the most tokens that a slot must read before that, and the most rows appended to
        the cache since it was settled."""
        count = budget.stages(min(self.gamma, budget.max_nodes))
        # Reading `_lacked` hardly waits: the rewind was queued before anything of this step. A slot whose prompt is
        # half read does not count: it lacks the rest of the prompt, which may never come.
        lacks = [] if self._lacked is None else self._lacked.lists()[0]
        lacked = max([0, *(count for slot, count in enumerate(lacks) if slot not in self._half_read)])
        behind, appended = max(0, self._most_behind + lacked), self._appended
        if behind < self._widest:  # a few more rows before the root cost little
            behind = min(state.rounded(behind + 1), self._widest) - 1
        self._most_behind, self._lacked = -1, None  # the root is read
        self._appended = behind % self._widest + count
        return count, behind, appended

    def grow(self, state: SlotState, budget: Budget, plan: tuple[int, int, int]) -> TokenTree:
        count, behind, appended = plan
        self._drop_disagreeing(state)
        logits_BV = self._catch_up(state, behind, appended)
        chain, tree = list[Tensor](), TokenTree.roots(state.roots)
        for offset in range(1, count + 1):
            if offset > 1:
                logits_BV = self._pass(chain[-1][:, None], state.positions + offset - 1, state.active.long())
            chain.append(state.ranking(logits_BV, offset).argmax(-1))
            tree = TokenTree.from_chain(state.roots, torch.stack(chain, 1))
            if offset < count and not budget.goes_on(tree):
                break
        self._drafted[:, : len(chain) - 1] = torch.stack(chain, 1)[:, :-1]
        self._drafted[:, len(chain) - 1 :] = -1
        self._drafted_at.copy_(state.positions + 1)
        return tree

    def _drop_disagreeing(self, state: SlotState) -> None:
        """Keep the drafted rows whose tokens were committed, except the root's: its logits are still needed."""
        assert self._cache is not None
        committed_BG = state.history.read(self._drafted_at, self.gamma - 1)
        agreeing_B = (committed_BG == self._drafted).cumprod(1).sum(1)
        self._cache.rewind(torch.minimum(self._drafted_at + agreeing_B, state.positions))

    def _catch_up(self, state: SlotState, behind: int, appended: int) -> Tensor:
        """Run the model over the tokens committed since its last pass, and over the root: the root's logits [B, V].

        behind: the most tokens before the root that an active slot lacks.
        """
        cache = self._cache
        assert cache is not None
        behind_B = torch.where(state.active, state.positions - cache.tokens, 0).clamp(min=0)
        while behind >= self._widest:
            counts_B = behind_B.clamp(max=self._widest)
            cache.settle(appended)
            self._pass(state.history.read(cache.tokens, self._widest), cache.tokens, counts_B)
            behind_B, behind, appended = behind_B - counts_B, behind - self._widest, self._widest
        cache.settle(appended)
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
        self.advance(accepted.nodes.shape[1])

    def advance(self, most: int) -> None:
        self._most_behind += most

    def release(self) -> None:
        self._cache = None

    def rewind(self, lengths_B: Tensor) -> None:
        if self._cache is not None:
            self._cache.rewind(lengths_B)
            self._most_behind, self._lacked = -1, HostCopy(lengths_B - self._cache.tokens)


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
