"""The engine decodes prompts with continuous batching: a slot takes the next prompt as soon as it is free.

The loop is `_decode`; infer/slot_pool.py prefills prompts into slots, infer/runner.py takes a step. Plain decoding is
the same loop with a drafter that proposes only roots.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from longdraft.infer.drafters.base import Count, Drafter
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.generation import ActiveSequence, Generation, Piece, Statistics
from longdraft.infer.requests import Prompt, Request, read_requests
from longdraft.infer.runner import Runner, Step
from longdraft.infer.sampling import GREEDY, SamplingParams
from longdraft.infer.slot_pool import SlotPool
from longdraft.kernels import backend
from longdraft.kernels.tree import MOST_ROWS
from longdraft.models.schema import Bool, Instance, Int, Str, validated
from longdraft.models.target import Target

# The kinds of sampling that a server records before its first request; any other kind is recorded at its first use.
SERVED = (GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
MOST_SLOTS = 8
POSITIONS = 2048  # a larger cache is rounded up to a multiple of this, up to max_length
# Called between two steps; returns the newly arrived requests, or None when no more will arrive. The argument says
# whether the engine is idle, so that the call may block.
Arrivals = Callable[[bool], Sequence[Request] | None]


class Engine:
    """Decodes prompts with a target and a drafter; the output does not depend on the drafter.

    Args:
        target: from `load_target`.
        drafter: a name from `infer/drafters/build.py`, or a Drafter, which serves one engine at a time.
        draft: the trained draft of a named drafter: a draft folder or a loaded module.
        nodes: how many of the proposed nodes a step verifies: "auto" decides by measured speed (infer/budget.py), a
            number is an upper limit, None verifies all. Only speed depends on it.
        slots: how many sequences are decoded together. None: one per prompt, at most 8; 8 for `serve`. Further prompts
            wait for a free slot.
        max_length: positions a sequence may have; None is the target's own limit. The cache is allocated for what a
            call needs, rounded up to a power of two or, above 2,048, to a multiple of that, and kept for the next call.
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        options: keyword arguments of a named drafter.
        graphs: whether to record work as CUDA graphs before the first request and replay it (infer/graphs.py). None:
            where possible. Only speed depends on it.
        keep_prompts: prefix caching: whether a prompt of several prefill passes reuses the keys and values of an
            earlier prompt with the same prefix. Only complete passes are reused, so the bits are those of a fresh
            prefill. Changed weights are noticed through PyTorch's count of writes, which `weight.data` and fused
            optimizers bypass, and through `refresh`. Nothing is kept while weights require gradients.
        log: receives lines about allocations and recordings; None is the logger "longdraft", level INFO.
    """

    @validated
    @torch.inference_mode(False)  # tensors kept for later calls must not be inference tensors of the caller
    def __init__(
        self,
        target: Instance[Target],
        drafter: Str | Instance[Drafter] = "plain",
        draft: Any = None,
        *,
        nodes: Literal["auto", None] | Count = "auto",
        slots: Count | None = None,
        max_length: Annotated[Int, Field(ge=2)] | None = None,  # a prompt's token and a new one
        prefill_chunk: Count | None = None,
        options: Mapping[Str, Any] | None = None,
        graphs: Bool | None = None,
        keep_prompts: Bool = True,
        log: Callable[[str], object] | None = None,
    ):
        limit = target.model.config.max_positions
        if max_length is not None and max_length > limit:
            raise ValueError(f"max_length: {max_length}, but the target has {limit} positions; give at most that many")
        if isinstance(drafter, str):
            drafter = build_drafter(drafter, target, draft, options)
        elif draft is not None or options:
            raise ValueError("draft and options apply to a named drafter; a Drafter instance already has its own")
        self.target, self.slots, self.drafter, self.ranks = target, slots, drafter, target.model.ranks
        self.max_length = max_length or limit
        self.runner = Runner(target.model, drafter, nodes, graphs)
        check_exact(target, self.runner.max_nodes)
        self.pool = SlotPool(self.runner, prefill_chunk, keep_prompts, log or logging.getLogger("longdraft").info)
        self._cancelled: set[int] = set()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> list[Generation]:
        """Decode all prompts: texts, lists of token ids, or lists of chat messages ({"role": ..., "content": ...}).

        Args:
            params: one for all prompts, or one for each.

        Returns: the generations in the prompts' order.
        """
        pieces = self._decode(*self._prepare(prompts, params))
        return sorted((piece.generation for piece in pieces if piece.generation), key=lambda one: one.index)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY
    ) -> Generator[Piece]:
        """Like `generate`, but yields every sequence's tokens as soon as they are committed. Closing the generator ends
        all sequences."""
        return self._decode(*self._prepare(prompts, params))

    @torch.inference_mode(False)
    def reserve(self) -> None:
        """Allocate the memory and record the work that `serve` needs; otherwise `serve` does so when it starts. Raises
        ValueError if memory is too small."""
        with self.drafter.used_by(self) as stayed:
            self.pool.start(self.slots or MOST_SLOTS, self.max_length, SERVED, stayed)

    def serve(self, arrivals: Arrivals) -> Generator[Piece]:
        """Like `stream`, for requests that arrive while others run. `read_requests` makes requests; each needs its own
        index. A request starts as soon as a slot is free. Slots are allocated for `max_length`.

        Of several ranks the first one's arrivals and cancellations count."""
        self._cancelled.clear()
        return self._decode((), self.slots or MOST_SLOTS, self.max_length, arrivals)

    def cancel(self, index: int) -> None:
        """End prompt `index` of the running stream. Its next piece carries the generation so far."""
        self._cancelled.add(index)

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> tuple[list[Request], int, int]:
        """Check the prompts. Returns the requests, the number of slots for them and the positions of each slot."""
        requests = self.ranks.from_first(read_requests(self.target, prompts, params, self.max_length))
        if self.drafter.user is not self:
            self._cancelled.clear()
        longest = max((len(one.prompt) + one.sampling.max_new_tokens for one in requests), default=0)
        # Rounded up, because a new cache for a slightly longer text would lose kept prompts and recorded work.
        unit = min(POSITIONS, 1 << max(longest - 1, 0).bit_length())
        longest = -(-longest // unit) * unit
        return requests, self.slots or min(len(requests), MOST_SLOTS), min(longest, self.max_length)

    @torch.inference_mode(False)
    def _decode(
        self, requests: Sequence[Request], slots: int, longest: int, arrivals: Arrivals | None = None
    ) -> Generator[Piece]:
        """Decode all requests to their ends on `slots` slots of `longest` positions: the decoding loop."""
        if not requests and arrivals is None:
            return
        with self.drafter.used_by(self) as stayed:
            runner, pool, unread = self.runner, self.pool, deque[tuple[list[ActiveSequence | None], Step]]()
            waiting = deque(self._sequence(request) for request in requests)
            serves = arrivals is not None
            pool.start(slots, longest, [one.sampling for one in requests] or SERVED, stayed)
            while True:
                idle, came = not (waiting or any(pool.sequences)), ()
                if arrivals is not None:
                    if idle:
                        unread.clear()  # the sequences of these steps are done, and their time would include the wait
                        runner.start()
                    came = arrivals(idle)
                elif idle:
                    return
                # The reader of a piece, or another thread, may cancel more; the next turn handles those.
                cancelled, self._cancelled = self._cancelled, set()
                if serves:
                    came, cancelled = self.ranks.from_first((came, cancelled))
                if came is None:
                    arrivals, came = None, ()
                waiting.extend(map(self._sequence, came))
                if cancelled:
                    yield from self._drop(waiting, cancelled)
                pool.admit(waiting, one_pass=arrivals is not None)  # requests may arrive or be cancelled between passes
                while unread and runner.state.matchers:  # a grammar needs all tokens before the next step
                    yield from self._collect(*unread.popleft())
                if any(decoding := pool.decoding):
                    unread.append((decoding, runner.step()))
                if len(unread) > runner.lag:
                    yield from self._collect(*unread.popleft())

    def _sequence(self, request: Request) -> ActiveSequence:
        return ActiveSequence(request, self.target, self.max_length)

    def _drop(self, waiting: deque[ActiveSequence], cancelled: Set[int]) -> Iterator[Piece]:
        """End the cancelled requests: those on a slot, in a prefill or still waiting."""
        ended = [sequence for sequence in waiting if sequence.request.index in cancelled]
        for sequence in ended:
            waiting.remove(sequence)
        for slot, sequence in enumerate(self.pool.sequences):
            if sequence is not None and sequence.request.index in cancelled:
                ended.append(sequence)
                self.pool.free(slot)
        for sequence in ended:
            yield sequence.cancel()

    def _collect(self, decoding: list[ActiveSequence | None], step: Step) -> Iterator[Piece]:
        """Read a step, and give its tokens to the sequences that it decoded and that have not finished meanwhile."""
        present = {slot: one for slot, one in enumerate(decoding) if one and not one.result.finish_reason}
        self.runner.read(step, present)
        for slot, sequence in present.items():
            piece = sequence.commit(step.tokens[slot], step.logprobs[slot] if step.logprobs else ())
            if sequence.result.stats.steps == 0:
                sequence.result.stats.first_token_seconds = step.read_at - sequence.began
            _count(sequence.result.stats, step, slot, min(piece.accepted, len(piece.tokens) - 1))
            if piece.generation:
                self.pool.free(slot)
            yield piece


def check_exact(target: Target, max_nodes: int) -> None:
    """Raise ValueError if LONGDRAFT_EXACT=1 asks for plain decoding's bits in half precision on a GPU, and they are not
    available: the tree has more nodes than the kernels take, transformers' own classes compute the target, or packages
    are missing."""
    weight = target.model.embed_tokens.weight
    exact = backend.exact_kernels("linear", weight) is not None
    if exact and max_nodes >= MOST_ROWS:
        raise ValueError(
            f"nodes: a tree of {max_nodes} nodes, but with LONGDRAFT_EXACT=1 in {weight.dtype} at most "
            f"{MOST_ROWS - 1} are exact; give that number as nodes, or a smaller shape"
        )
    if exact and target.loader != "longdraft":
        raise ValueError(
            f"LONGDRAFT_EXACT=1: {target.name} is computed by transformers' own classes, which is not exact in "
            f"{weight.dtype}; omit the variable, or decode in fp32"
        )


def _count(stats: Statistics, step: Step, slot: int, accepted: int) -> None:
    """Add a step to a sequence's statistics. accepted: how many of its nodes were committed."""
    stats.steps += 1
    stats.decode_seconds += step.seconds
    stats.drafted += step.drafted[slot]
    stats.speculative_steps += step.drafted[slot] > 0
    stats.draft_seconds += step.draft_seconds
    stats.target_seconds += step.target_seconds
    stats.commit_seconds += step.commit_seconds
    stats.accepted_at_depth += [0] * (accepted - len(stats.accepted_at_depth))
    for depth in range(accepted):
        stats.accepted_at_depth[depth] += 1
