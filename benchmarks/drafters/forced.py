"""Forced acceptance: the speed that a drafter would have at given acceptance rates, and the engine's upper bound.

A drafter runs with all its costs. Then the tokens on one path of its tree are replaced by plain decoding's next tokens,
down to a depth that is drawn from the rates. Verification, commit, cache and speed are real; only the acceptance is
not. The oracle is forced acceptance around a drafter that costs nothing. Only benchmarks use this. Shapes: B
slots, N tree nodes, L positions, K levels, C candidates.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longdraft.benchmarks.drafters.answering import Answerer, of_engine
from longdraft.benchmarks.drafters.exactness import Builder
from longdraft.benchmarks.drafters.record import Answer
from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Count, CountOrZero, DeviceDrafter, Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.requests import Request
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree, TreeShape
from longdraft.kernels.transfer import integers
from longdraft.models.kv_cache import KVCache
from longdraft.models.schema import validated
from longdraft.models.target import Target

LABEL = "forced acceptance: no decoding result of this draft"
ORACLE = "oracle"
UNKNOWN = -1  # the token of a position after the end of the known text
TRIES = 6  # most answers to one prompt; each corrects the text where the last answer differed
# The acceptance rate of each level, for a drafter of this depth.
RatesFor = Callable[[int], Sequence[float]]


class Blank(DeviceDrafter):
    """Proposes a constant tree: a chain of `depth` nodes, and `siblings` further nodes beside each of them."""

    @validated
    def __init__(self, depth: Count = 12, siblings: CountOrZero = 0):
        self.shape = TreeShape(tuple((0,) * level + (rank,) for level in range(depth) for rank in range(1 + siblings)))
        self.max_nodes, self.max_depth = len(self.shape.nodes), depth

    def grow(self, state: SlotState, budget: Budget, plan: int) -> TokenTree:
        shape = self.shape.first(plan)
        ranks_K = torch.arange(shape.ranks, device=state.roots.device)
        return shape.fill(state.roots, ranks_K.expand(len(state.roots), shape.depth, -1))


class Forced(Drafter):
    """Proposes `inner`'s tree, with right tokens, drawn by the rates, on the path to the first of its deepest nodes.

    The draw depends on the seed, the prompt and the position alone. The drawn nodes are right and all others are wrong,
    except after the end of the known text.

    Args:
        inner: proposes the tree and learns from every step.
        target: plainly decodes every prompt without a kept text.
        rates: for each level, the chance that its node on the path is right if the one above is.
        plain: the engine for that, which may have kept prompts; None: an engine of its own.
    """

    def __init__(
        self, inner: Drafter, target: Target, rates: Sequence[float], seed: int = 0, plain: Engine | None = None
    ):
        self.inner, self.rates, self.seed, self.parts = inner, tuple(rates), seed, [inner]
        self.max_nodes, self.max_depth = inner.max_nodes, inner.max_depth
        self._plain, self._texts = plain or Engine(target), dict[str, list[int]]()
        # For each position: its token, and how many right tokens are proposed when the root is there.
        self._replay_2BL = torch.empty(2, 0, 0, dtype=torch.int64)

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    @property
    def learns_from(self) -> frozenset[str]:
        return self.inner.learns_from

    @property
    def class_stages(self) -> Sequence[int]:
        return self.inner.class_stages

    def keep(self, prompt: Sequence[int], params: SamplingParams, text: list[int]) -> None:
        """Replay this text after this prompt."""
        self._texts[_key(prompt, params)] = text

    def text(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The text that is replayed after this prompt: what is kept, else plain decoding's."""
        key = _key(prompt, params)
        if key not in self._texts:
            self._texts[key] = self._plain.generate([prompt], params)[0].tokens
        return self._texts[key]

    def answering(self, answer: Answerer) -> Answerer:
        """An Answerer for an engine with this drafter, which does all plain decoding before the timed answer.

        In half precision a pass of several rows may flip a near-tie, after which plain decoding's text is wrong for the
        rest of the answer. The prompt is then answered again, with the text that continues from the flip.
        """

        def answered(prompt: list[int], params: SamplingParams) -> Answer:
            text = self.text(prompt, params)
            for _ in range(TRIES):
                found = answer(prompt, params)
                pairs = enumerate(zip(found.tokens, text, strict=False))
                same = next((i for i, (one, other) in pairs if one != other), len(text))
                left = params.max_new_tokens - same - 1
                if same >= len(found.tokens) or left < 1:
                    break
                begun = found.tokens[: same + 1]
                rest = self._plain.generate([prompt + begun], replace(params, max_new_tokens=left))
                self._texts[_key(prompt, params)] = text = begun + rest[0].tokens
            return found

        return answered

    def on_start(self, slot: int, request: Request, cache: KVCache) -> None:
        super().on_start(slot, request, cache)
        device, shape = cache.lengths.device, (2, cache.batch, cache.capacity + 1)
        if self._replay_2BL.shape != shape:
            self._replay_2BL = torch.zeros(shape, dtype=torch.int64, device=device)
        prompt, text = request.prompt, self.text(request.prompt, request.sampling)
        random = np.random.default_rng([self.seed, zlib.crc32(repr(prompt).encode())])
        right_LK = random.random((1 + len(text), len(self.rates))) < self.rates
        root, end = len(prompt) - 1, len(prompt) + len(text)
        self._replay_2BL[:, slot].fill_(UNKNOWN)
        self._replay_2BL[0, slot, root:end] = integers(prompt[-1:] + text, device)
        self._replay_2BL[1, slot, root:end] = integers(right_LK.cumprod(axis=1).sum(axis=1), device)

    @torch.no_grad()
    def propose(self, state: SlotState, budget: Budget) -> TokenTree:
        tree = self.inner.propose(state, budget)
        if tree.on_host and state.graphs.recording:  # it may have any width, and each one would be recorded
            tree = tree.pad_to(1 + budget.max_nodes)
        if tree.width == 1:
            return tree
        tree = tree.to(state.roots.device)
        return tree.with_tokens(state.run(("force",), (self, self._replay_2BL), self._force, tree))

    def _force(self, state: SlotState, tree: TokenTree) -> Tensor:
        """The tree's tokens, with as many right ones as were drawn for the root's position."""
        tokens_BN, parents_BN, ancestors_BNN, depths_BN = tree.tokens, tree.parents, tree.ancestors, tree.depths
        width, last, (text_BL, drawn_BL) = tokens_BN.shape[1], self._replay_2BL.shape[2] - 1, self._replay_2BL
        nodes_N = torch.arange(width, device=tokens_BN.device)
        leaf_B11 = (depths_BN * width - nodes_N).argmax(dim=1)[:, None, None]
        path_BN = ancestors_BNN.gather(1, leaf_B11.expand(-1, 1, width))[:, 0]
        child_BN = path_BN.gather(1, parents_BN.clamp(min=0)) & (parents_BN >= 0)  # children of nodes on the path
        right_BN = text_BL.gather(1, (state.positions[:, None] + depths_BN).clamp(max=last))
        drawn_B1 = drawn_BL.gather(1, state.positions[:, None].clamp(max=last))
        forced_BN = path_BN & child_BN & (depths_BN <= drawn_B1) & (right_BN >= 0)
        # Any other right child gets the lowest token that is nowhere in the tree: siblings must differ.
        taken_BM = torch.cat([tokens_BN, right_BN], dim=1)
        some_C = torch.arange(width + self.max_depth + 2, device=tokens_BN.device)
        is_taken_BC = (some_C[:, None] == taken_BM[:, None]).any(dim=2)
        unused_B1 = torch.where(is_taken_BC, len(some_C), some_C).amin(dim=1, keepdim=True)
        others_BN = torch.where(child_BN & (tokens_BN == right_BN), unused_B1, tokens_BN)
        return torch.where(forced_BN, right_BN, others_BN)


def _key(prompt: Sequence[int], params: SamplingParams) -> str:
    """The key of a prompt's text. It excludes stop tokens, because a request's include the target's end tokens."""
    return repr((list(prompt), replace(params, stop_token_ids=())))


def oracle(options: Mapping[str, Any]) -> Builder:
    """A builder of the drafter that is forced to be an oracle. Raises ValueError for options that are not Blank's."""
    own = {key.removeprefix(f"{ORACLE}."): value for key, value in options.items()}
    try:
        Blank(**own)
    except TypeError:
        raise ValueError(f"options: {ORACLE} has only depth and siblings, not {', '.join(options)}") from None
    return lambda target: Blank(**own)


def forced(build: Builder, rates: RatesFor, seed: int, nodes: int | None) -> Builder:
    """A builder of the drafter with forced acceptance. nodes: the most that are verified below the root, or None."""

    def builder(target: Target) -> Forced:
        inner = build(target)
        depth = inner.max_depth if nodes is None else min(nodes, inner.max_depth)
        return Forced(inner, target, rates(depth), seed)

    return builder


def replaying(engines: Mapping[str, Engine]) -> tuple[dict[str, Answerer], dict[str, list[float]]]:
    """Answerers for engines, including "plain", whose text those with forced acceptance replay; and the latter's rates
    by name."""
    answerers = {name: of_engine(engine) for name, engine in engines.items()}
    drafters = {name: engine.drafter for name, engine in engines.items() if isinstance(engine.drafter, Forced)}
    plain = answerers["plain"]

    def kept(prompt: list[int], params: SamplingParams) -> Answer:
        found = plain(prompt, params)
        for drafter in drafters.values():
            drafter.keep(prompt, params, found.tokens)
        return found

    answerers |= {name: drafter.answering(answerers[name]) for name, drafter in drafters.items()}
    return answerers | {"plain": kept}, {name: [round(x, 4) for x in one.rates] for name, one in drafters.items()}


def at_rates(given: Sequence[float], depth: int) -> list[float]:
    """The given rates for a drafter of this depth; the last one applies to all deeper levels."""
    if len(given) > depth:
        raise ValueError(
            f"--accept-rates: {len(given)} rates, but the drafter has a depth of {depth}; give at most that"
        )
    return [*given, *[given[-1]] * (depth - len(given))]


def at_tokens_per_step(tokens: float, depth: int) -> list[float]:
    """The rate, equal for all levels, at which a chain of this depth commits `tokens` a step, the target's included."""
    if tokens > 1 + depth:
        raise ValueError(
            f"--tokens-per-step: {tokens:g}, but a depth of {depth} gives at most {1 + depth}; ask for less"
        )
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(accumulate([rate] * depth, mul, initial=1.0)) < tokens else (low, rate)
    return [high] * depth
