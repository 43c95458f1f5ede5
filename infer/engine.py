"""The decoding loop: propose, one pass of the target, choose and walk, keep, observe. It knows no method's name.

Plain decoding is the same loop with the drafter that proposes only roots, so every method is measured against a
baseline that pays the same overhead. Shapes: B slots, N tree nodes, T rows of a prefill chunk.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.sampling import SamplingParams, SlotSampling, draw_seed, one_each
from longdraft.infer.verify import Verdict, walk
from longdraft.models.hf import Target
from longdraft.models.kv_cache import KVCache

Prompt = str | Sequence[int]
IDLE = SamplingParams()


@dataclass
class Statistics:
    """What one generation cost. Seconds are wall-clock time; on a GPU they are times of launching, not of running.

    The times of a step are shared by all slots that took part in it, so they are not divided by the batch.
    """

    steps: int = 0
    drafted: int = 0  # nodes proposed below the roots
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the start of the prefill to the first step's tokens
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    commit_seconds: float = 0.0  # choice, walk, keep, observe
    accepted_at_depth: list[int] = field(default_factory=list)  # [d] steps whose walk accepted at least d + 1 nodes


@dataclass
class Generation:
    """One finished request.

    Attributes:
        index: the prompt's place in the call.
        tokens: the new tokens, the stop token included.
        text: them decoded without special tokens; None where the target came without a tokenizer.
        seed: the seed that gave them.
        finish_reason: "stop" (an end token), "length" (max_new_tokens) or "capacity" (no positions left).
    """

    index: int
    prompt: list[int]
    tokens: list[int]
    text: str | None
    seed: int
    finish_reason: str
    stats: Statistics

    @property
    def tokens_per_step(self) -> float:
        """New tokens per pass of the target, prefill apart."""
        return len(self.tokens) / max(self.stats.steps, 1)

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens / drafted tokens; 0 where nothing was drafted."""
        return sum(self.stats.accepted_at_depth) / max(self.stats.drafted, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, prefill apart."""
        return len(self.tokens) / max(self.stats.decode_seconds, 1e-9)


@dataclass
class Piece:
    """What streaming yields: the next tokens of prompt `index`, and its Generation once it is finished."""

    index: int
    tokens: list[int]
    generation: Generation | None = None


@dataclass
class _Lane:
    """A request on its slot."""

    request: Request
    committed: list[int]
    stop_ids: frozenset[int]
    started: float
    stats: Statistics
    finish_reason: str = ""

    @property
    def new_tokens(self) -> list[int]:
        return self.committed[len(self.request.prompt) :]


@dataclass(frozen=True)
class _Step:
    """What one step leaves for the host to read."""

    verdict: Verdict
    drafted: Tensor  # int64 [B]
    draft_seconds: float
    target_seconds: float
    commit_seconds: float


class Engine:
    """Decodes prompts with a target and a drafter; the output does not depend on the drafter.

    Args:
        target: from `load_target`.
        drafter: a name of `infer/drafters/build.py` or a Drafter.
        draft: the trained draft of a named drafter: a draft folder or a loaded module.
        slots: sequences decoded together; None takes one a prompt, at most 8. More prompts wait for a free slot.
        max_length: positions a sequence may have; None is the target's own limit. The cache is allocated for what a
            call needs and kept for the next call.
        prefill_chunk: rows of a prefill pass.
        options: keyword arguments of a named drafter.
    """

    def __init__(
        self,
        target: Target,
        drafter: str | Drafter = "plain",
        draft=None,
        *,
        slots: int | None = None,
        max_length: int | None = None,
        prefill_chunk: int = 512,
        options: Mapping | None = None,
    ):
        limit = target.model.config.max_positions
        for name, value, holds in [
            ("slots", slots, slots is None or slots >= 1),
            ("max_length", max_length, max_length is None or 1 <= max_length <= limit),
            ("prefill_chunk", prefill_chunk, prefill_chunk >= 1),
        ]:
            if not holds:
                raise ValueError(f"{name}={value}: must be at least 1 (max_length at most the target's {limit})")
        self.target, self.slots, self.prefill_chunk = target, slots, prefill_chunk
        self.max_length = max_length or limit
        if isinstance(drafter, str):
            drafter = build_drafter(drafter, target, draft, options or {})
        elif draft is not None or options:
            raise ValueError("draft and options go with a drafter's name; a Drafter instance already has its own")
        self.drafter: Drafter = drafter
        self.widths = tuple(sorted({1, 1 + drafter.max_nodes}))
        self.device = next(target.model.parameters()).device
        # On a GPU the host reads a step's tokens while the next step already runs.
        self.lag = 0 if self.device.type == "cpu" else 1
        self._cache: KVCache | None = None
        self._running = False

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = IDLE
    ) -> list[Generation]:
        """Decode all prompts. `params`: one for all, or one a prompt. Results come in the prompts' order."""
        pieces = [piece.generation for piece in self.stream(prompts, params) if piece.generation]
        return sorted(pieces, key=lambda generation: generation.index)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = IDLE
    ) -> Iterator[Piece]:
        """Like `generate`, but yields every sequence's tokens as soon as they are committed."""
        requests = self._requests(prompts, params)
        return self._run(requests)

    def _requests(self, prompts, params) -> list[Request]:
        if isinstance(prompts, str):
            prompts = [prompts]
        if any(isinstance(prompt, int) for prompt in prompts):
            raise ValueError("prompts: token ids where prompts belong; give a list of prompts, as [[1, 2, 3]]")
        requests, config = [], self.target.model.config
        vocab = config.vocab_size
        for index, (prompt, sampling) in enumerate(zip(prompts, one_each(params, len(prompts)), strict=True)):
            tokens = self._tokens(prompt)
            if not tokens:
                raise ValueError(f"prompt {index} has no tokens; give at least one (the BOS token, for an open start)")
            if min(tokens) < 0 or max(tokens) >= vocab:
                found = f"{min(tokens)}..{max(tokens)}"
                raise ValueError(f"prompt {index}: token ids must lie in 0..{vocab - 1}, got {found}")
            if len(tokens) >= self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(tokens)} tokens; at most {self.max_length - 1} fit, so that one can "
                    f"follow (max_length={self.max_length}, the target has {config.max_positions} positions)"
                )
            seed = draw_seed() if sampling.seed is None else sampling.seed
            requests.append(Request(index, tokens, replace(sampling, seed=seed)))
        return requests

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.target.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer, and this target has none; give token ids")
        return self.target.tokenizer(prompt).input_ids

    def _run(self, requests: list[Request]) -> Iterator[Piece]:
        if self._running:
            raise RuntimeError("this engine is decoding already; finish or close its stream, or make a second Engine")
        self._running = True
        try:
            yield from self._decode(requests)
        finally:
            self._running = False

    def _decode(self, requests: list[Request]) -> Iterator[Piece]:
        waiting = deque(requests)
        batch = self.slots or min(max(len(requests), 1), 8)
        lanes: list[_Lane | None] = [None] * batch
        self._start(batch, requests)
        unread: deque[tuple[list[_Lane | None], _Step]] = deque()
        while waiting or any(lanes):
            self._fill(lanes, waiting)
            unread.append((list(lanes), self._step()))
            if len(unread) > self.lag:
                yield from self._collect(lanes, *unread.popleft())

    def _start(self, batch: int, requests: list[Request]) -> None:
        """Allocate the cache where the one at hand does not fit, and empty every slot."""
        longest = max((len(r.prompt) + r.sampling.max_new_tokens for r in requests), default=1)
        slack = (self.lag + 1) * (self.drafter.max_depth + 1) + self.widths[-1]
        capacity = min(longest, self.max_length) + slack
        cache, weight = self._cache, self.target.model.embed_tokens.weight
        if (
            cache is None
            or (cache.batch, cache.keys.dtype, cache.keys.device) != (batch, weight.dtype, weight.device)
            or cache.capacity < capacity
        ):
            self._cache = cache = None  # the old one is gone before the new one is allocated
            self._cache = cache = self.target.model.new_cache(batch, capacity)
        cache.reset()
        zeros = torch.zeros(batch, dtype=torch.int64, device=self.device)
        idle = SlotSampling([IDLE] * batch, self.device)
        self._state = SlotState(zeros, cache.lengths, zeros.bool(), idle, [[] for _ in range(batch)])

    def _fill(self, lanes: list[_Lane | None], waiting: deque[Request]) -> None:
        """Give every free slot the next prompt: prefill all but its last token, which becomes the root."""
        changed = False
        for slot, lane in enumerate(lanes):
            if lane is None and waiting:
                lanes[slot], changed = self._prefill(slot, waiting.popleft()), True
        if changed:
            params = [lane.request.sampling if lane else IDLE for lane in lanes]
            self._state.sampling = SlotSampling(params, self.device)
            self._state.active = torch.tensor([lane is not None for lane in lanes], device=self.device)
            self._state.committed = [lane.committed if lane else [] for lane in lanes]

    @torch.no_grad()
    def _prefill(self, slot: int, request: Request) -> _Lane:
        begin = time.perf_counter()
        cache, prompt = self._cache, request.prompt
        assert cache is not None
        cache.reset([slot], prompt_lengths=torch.tensor([len(prompt)]))
        self.drafter.begin([slot], [request], cache)
        # Where nobody reads hidden states, the last layer's keys and values end the pass.
        one, needs = cache.slot(slot), self.drafter.needs or frozenset({"last_kv"})
        for start in range(0, len(prompt) - 1, self.prefill_chunk):
            chunk = prompt[start : min(start + self.prefill_chunk, len(prompt) - 1)]
            tokens = torch.tensor([chunk], device=self.device)
            output = self.target.model(tokens, cache=one, needs=needs)
            one.keep(None, torch.tensor([len(chunk)], device=self.device))
            self.drafter.read([slot], tokens, output)
        self._state.roots[slot] = prompt[-1]
        now = time.perf_counter()
        ends = () if request.sampling.ignore_eos else self.target.eos_token_ids
        stop_ids = frozenset(ends) | frozenset(request.sampling.stop_token_ids)
        return _Lane(request, list(prompt), stop_ids, now, Statistics(prefill_seconds=now - begin))

    @torch.no_grad()
    def _step(self) -> _Step:
        """One step of all slots; nothing in it waits for the device but what the attention reads of the lengths."""
        state, cache = self._state, self._cache
        assert cache is not None
        times = [time.perf_counter()]
        state.sampling.new_step()
        tree = self.drafter.propose(state, room=self.widths[-1] - 1)
        if tree.width > self.widths[-1]:
            raise ValueError(
                f"drafter: a tree of {tree.width - 1} nodes, above its own max_nodes={self.widths[-1] - 1}"
            )
        if self.lag == 0 and not torch.equal(tree.tokens[:, 0], state.roots):
            raise ValueError("drafter: node 0 of its tree is not the root, the last committed token of each slot")
        tree = tree.pad_to(next(width for width in self.widths if width >= tree.width))
        times.append(time.perf_counter())
        alone = tree.width == 1
        output = self.target.model(
            tree.tokens,
            cache=cache,
            positions_BT=None if alone else cache.lengths[:, None] + tree.depths,
            tree_mask_BTT=None if alone else tree.ancestors,
            needs=self.drafter.needs | {"logits"},
        )
        times.append(time.perf_counter())
        verdict = self._verify(tree, output.logits)
        cache.keep(verdict.rows, verdict.counts)
        state.roots = torch.where(state.active, verdict.last(verdict.tokens), state.roots)
        self.drafter.observe(tree, verdict, output)
        times.append(time.perf_counter())
        drafted = (tree.parents >= 0).sum(dim=1)
        return _Step(verdict, drafted, *(later - earlier for earlier, later in pairwise(times)))

    def _verify(self, tree, logits_BNV: Tensor) -> Verdict:
        state, slots = self._state, torch.arange(tree.tokens.shape[0], device=self.device)

        def choose(nodes_B: Tensor, depth: int) -> Tensor:
            logits_BV = logits_BNV[slots, nodes_B]
            return state.sampling.choose(logits_BV, state.noise(depth + 1, logits_BV.shape[-1]))

        return walk(tree, choose, state.active, self.drafter.max_depth)

    def _collect(self, lanes, stepped: list[_Lane | None], step: _Step) -> Iterator[Piece]:
        """Read one step's tokens on the host; lanes that finished meanwhile take nothing more."""
        read = (part.tolist() for part in (step.verdict.counts, step.verdict.tokens, step.drafted))
        for lane, count, tokens, drafted in zip(stepped, *read, strict=True):
            if lane is None or lane.finish_reason:
                continue
            fresh = self._commit(lane, tokens[:count])
            stats = lane.stats
            stats.steps += 1
            stats.decode_seconds = time.perf_counter() - lane.started
            if stats.steps == 1:
                stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
            stats.drafted += drafted
            stats.draft_seconds += step.draft_seconds
            stats.target_seconds += step.target_seconds
            stats.commit_seconds += step.commit_seconds
            stats.accepted_at_depth += [0] * (count - 1 - len(stats.accepted_at_depth))
            for depth in range(count - 1):
                stats.accepted_at_depth[depth] += 1
            yield Piece(lane.request.index, fresh, self._generation(lane) if lane.finish_reason else None)
        for slot, lane in enumerate(lanes):
            if lane is not None and lane.finish_reason:
                lanes[slot] = None
                self._state.active[slot] = False

    def _commit(self, lane: _Lane, tokens: list[int]) -> list[int]:
        """Append tokens up to the first that ends the sequence; returns what was appended."""
        before, prompt_length = len(lane.committed), len(lane.request.prompt)
        for token in tokens:
            lane.committed.append(token)
            if token in lane.stop_ids:
                lane.finish_reason = "stop"
            elif len(lane.committed) - prompt_length >= lane.request.sampling.max_new_tokens:
                lane.finish_reason = "length"
            elif len(lane.committed) >= self.max_length:
                lane.finish_reason = "capacity"
            if lane.finish_reason:
                break
        return lane.committed[before:]

    def _generation(self, lane: _Lane) -> Generation:
        tokenizer, tokens, seed = self.target.tokenizer, lane.new_tokens, lane.request.sampling.seed
        assert seed is not None
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        return Generation(lane.request.index, lane.request.prompt, tokens, text, seed, lane.finish_reason, lane.stats)
