"""The engine: prompts in, generations out, on slots that take the next prompt as soon as one is done.

A step itself is infer/step.py's, and the engine knows no method's name. Plain decoding is the same loop with the
drafter that proposes only roots, so every method is measured against a baseline that pays the same overhead.
Shapes: B slots, T rows of a prefill chunk.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from longdraft.infer.budget import Budget
from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.graphs import graphs_for
from longdraft.infer.history import History
from longdraft.infer.memory import check_memory, estimate_memory, words
from longdraft.infer.options import check_integer_or
from longdraft.infer.requests import Lane, Prompt, read_requests
from longdraft.infer.results import Generation, Piece, Statistics
from longdraft.infer.sampling import SamplingParams, SlotSampling
from longdraft.infer.step import Step, take_step
from longdraft.infer.tree import Lists
from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.linear import prompt_in_c
from longdraft.kernels.transfer import HostCopy, from_host, integers
from longdraft.models.device import on_device
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, prompt_rows
from longdraft.models.target import Target

IDLE = SamplingParams()
MOST_SLOTS = 8
# Rows of a prefill pass of several prompts, the padding counted.
PREFILL_ROWS = 2048
# Steps are recorded for so many kinds of sampling (which filters and penalties there are, not how strong they are).
KINDS_OF_SAMPLING = 8
# Rows a pass may have, where the engine chooses them; the widest is the drafter's own.
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Engine:
    """Decodes prompts with a target and a drafter; the output does not depend on the drafter.

    Args:
        target: from `load_target`.
        drafter: a name of `infer/drafters/build.py` or a Drafter.
        draft: the trained draft of a named drafter: a draft folder or a loaded module.
        nodes: how many of the proposed nodes a step verifies: "auto" learns what pays (infer/budget.py), a number is
            the most, None is all. Only speed depends on it.
        slots: sequences decoded together; None takes one a prompt, at most 8. More prompts wait for a free slot.
        max_length: positions a sequence may have; None is the target's own limit. The cache is allocated for what a
            call needs and kept for the next call.
        prefill_chunk: rows of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        options: keyword arguments of a named drafter.
        graphs: whether a step's work is recorded once and then replayed (infer/graphs.py); None: where it can be, which
            is on CUDA. Only speed depends on it.
        noise_in_ranking: drafters rank candidates with the noise that the target's choices will use; False shows what
            that is worth.
        log: told in a line what will be allocated; None: the logger "longdraft", level INFO.
    """

    def __init__(
        self,
        target: Target,
        drafter: str | Drafter = "plain",
        draft=None,
        *,
        nodes: int | str | None = "auto",
        slots: int | None = None,
        max_length: int | None = None,
        prefill_chunk: int | None = None,
        options: Mapping | None = None,
        graphs: bool | None = None,
        noise_in_ranking: bool = True,
        log: Callable[[str], object] | None = None,
    ):
        limit = target.model.config.max_positions
        check_integer_or("slots", slots, [None], 1)
        check_integer_or("max_length", max_length, [None], 1, limit)
        check_integer_or("prefill_chunk", prefill_chunk, [None], 1)
        check_integer_or("nodes", nodes, ["auto", None], 1)
        self.device = target.model.embed_tokens.weight.device
        if isinstance(drafter, str):
            with on_device(self.device):
                drafter = build_drafter(drafter, target, draft, options or {})
        elif not isinstance(drafter, Drafter):
            raise ValueError(f"drafter={drafter!r}: must be a drafter's name or a Drafter")
        elif draft is not None or options:
            raise ValueError("draft and options go with a drafter's name; a Drafter instance already has its own")
        self.target, self.slots, self.drafter = target, slots, drafter
        self.max_length = max_length or limit
        self._noise_in_ranking = noise_in_ranking
        self._log = log or logging.getLogger("longdraft").info
        self._on_cpu = self.device.type == "cpu"
        self.prefill_chunk = prefill_chunk or prompt_rows(self.device.type)
        # What the budget learns of costs must not depend on what else the machine does.
        self._work_clock = rows.work_seconds if self._on_cpu else time.perf_counter
        self._max_nodes = min(nodes, drafter.max_nodes) if isinstance(nodes, int) else drafter.max_nodes
        automatic = nodes == "auto" and drafter.max_nodes > 0
        chosen = [width for width in WIDTHS if automatic and width <= self._max_nodes]
        self._graphs = graphs_for(graphs, target.model)
        # A replay is launched at once, and what it takes is in the step's time.
        timed = not self._graphs.recording
        self._budget = Budget(drafter.n_classes, [1, *chosen, 1 + self._max_nodes], automatic, timed, self._on_cpu)
        # On a GPU the host reads a step's tokens while the next step already runs.
        self.lag = 0 if backend.is_host(self.device) else 1
        self._cache: KVCache | None = None
        self._state: SlotState  # made with the cache
        self._samplings: list[SlotSampling] = []  # the last ones of each kind, where steps are recorded
        self._read_at, self._worked = 0.0, 0.0  # when a step was last read, by time and by the clock of work
        self._disturbed = 0  # so many next steps have no typical time
        self._running = False
        self._cancelled: set[int] = set()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = IDLE
    ) -> list[Generation]:
        """Decode all prompts: texts, lists of token ids, or lists of chat messages ({"role": ..., "content": ...}).

        Args:
            params: one for all, or one a prompt.

        Returns: in the prompts' order.
        """
        pieces = [piece.generation for piece in self.stream(prompts, params) if piece.generation]
        return sorted(pieces, key=lambda generation: generation.index)

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = IDLE
    ) -> Generator[Piece]:
        """Like `generate`, but yields every sequence's tokens as soon as they are committed; closing it ends all."""
        requests = read_requests(self.target, prompts, params, self.max_length)
        if not self._running:
            self._cancelled.clear()
        return self._run(requests)

    def cancel(self, index: int) -> None:
        """End prompt `index` of the running stream: its generation so far comes with its next piece."""
        self._cancelled.add(index)

    def _run(self, requests: list[Request]) -> Generator[Piece]:
        if not requests:
            return
        if self._running:
            raise RuntimeError("this engine is decoding already; finish or close its stream, or make a second Engine")
        self._running = True
        pieces = self._decode(requests)
        try:
            while True:
                # Not around the yield: the current device is the caller's in between.
                with on_device(self.device):
                    piece = next(pieces, None)
                if piece is None:
                    return
                yield piece
        finally:
            pieces.close()
            self._running = False

    def _decode(self, requests: list[Request]) -> Generator[Piece]:
        waiting = deque(requests)
        batch = self.slots or min(max(len(requests), 1), MOST_SLOTS)
        lanes: list[Lane | None] = [None] * batch
        self._start(batch, requests)
        unread: deque[tuple[list[Lane | None], Step, HostCopy]] = deque()
        self._disturbed = 0
        self._start_clocks()
        while waiting or any(lanes):
            if self._cancelled:
                yield from self._drop(lanes, waiting)
            self._fill(lanes, waiting)
            if any(lanes):
                with rows.decoding(self._on_cpu):
                    step = self._step()
                unread.append((list(lanes), step, self._to_host(step)))
            if len(unread) > self.lag:
                yield from self._collect(lanes, *unread.popleft())

    def _start_clocks(self) -> None:
        """The next step begins."""
        self._read_at, self._worked = time.perf_counter(), self._work_clock()

    def _start(self, batch: int, requests: list[Request]) -> None:
        """Allocate the cache where the one at hand does not fit, and empty every slot."""
        longest = max((len(r.prompt) + r.sampling.max_new_tokens for r in requests), default=1)
        slack = (self.lag + 1) * (self.drafter.max_depth + 1) + self._budget.widths[-1]
        capacity = min(longest, self.max_length) + slack
        cache, weight = self._cache, self.target.model.embed_tokens.weight
        if (
            cache is None
            or (cache.batch, cache.keys.dtype, cache.keys.device) != (batch, weight.dtype, weight.device)
            or cache.capacity < capacity
        ):
            # The old one is gone before the new one is allocated.
            self._cache = cache = None
            self._graphs.clear()
            self.drafter.release()
            widths, chunk = self._budget.widths, min(self.prefill_chunk, capacity)
            chunk, graphs = max(chunk, min(batch * chunk, PREFILL_ROWS)), self._graphs.recording
            parts = estimate_memory(self.target.model, self.drafter, batch, capacity, widths, chunk, graphs)
            check_memory(parts, batch, capacity, self.device)
            self._log(f"memory for {batch} sequences of {capacity} positions: {words(parts)}")
            self._cache = cache = self.target.model.new_cache(batch, capacity)
            self._state = self._new_state(cache)
            self._samplings.clear()
        cache.reset()
        self._state.active.zero_()
        self._budget.start(batch)

    def _new_state(self, cache: KVCache) -> SlotState:
        """Every slot idle."""
        zeros = torch.zeros(cache.batch, dtype=torch.int64, device=self.device)
        history = History(cache.batch, cache.capacity, self.device)
        idle, nothing = SlotSampling([IDLE] * cache.batch, self.device), [list[int]() for _ in range(cache.batch)]
        return SlotState(zeros, zeros.clone(), zeros.bool(), history, idle, nothing, self._graphs)

    def _take_sampling(self, sampling: SlotSampling) -> None:
        """These parameters from now on; where steps are recorded, in the place where those of their kind find them."""
        if self._graphs.recording:
            found = next((kept for kept in self._samplings if kept.follow(sampling)), sampling)
            if found is sampling and len(self._samplings) == KINDS_OF_SAMPLING:
                self._graphs.forget(self._samplings.pop(0))
            self._samplings = [kept for kept in self._samplings if kept is not found] + [found]
            sampling = found
        self._state.sampling = sampling

    def _drop(self, lanes: list[Lane | None], waiting: deque[Request]) -> Iterator[Piece]:
        """End what was cancelled, on a slot or still waiting."""
        # Who reads a piece may cancel another prompt: that is for the next time.
        cancelled, self._cancelled = self._cancelled, set()
        for request in [request for request in waiting if request.index in cancelled]:
            waiting.remove(request)
            lane = Lane(request, self.target, self.max_length, 0.0, Statistics(), "cancelled")
            yield lane.piece([], 0, self._decisions)
        for slot, lane in enumerate(lanes):
            if lane is not None and lane.request.index in cancelled:
                lane.finish_reason = "cancelled"
                self._leave(lanes, slot)
                yield lane.piece([], 0, self._decisions)

    def _leave(self, lanes: list[Lane | None], slot: int) -> None:
        """This slot has no request any more."""
        lanes[slot] = None
        self._state.active[slot].fill_(False)
        self._state.committed[slot] = []  # what the request has is its own

    def _fill(self, lanes: list[Lane | None], waiting: deque[Request]) -> None:
        """Give every free slot the next prompt."""
        changed = False
        for slot in range(len(lanes)):
            if lanes[slot] is None and waiting:
                group = self._take_group(lanes[slot:], waiting)
                lanes[slot : slot + len(group)], changed = self._prefill(slot, group), True
        if changed:
            # A free slot does as another where steps are recorded: one kind of sampling less.
            like = next(lane.request.sampling for lane in lanes if lane) if self._graphs.recording else IDLE
            params = [lane.request.sampling if lane else like for lane in lanes]
            self._take_sampling(SlotSampling(params, self.device, self._noise_in_ranking))
            self._state.active.copy_(from_host(torch.tensor([lane is not None for lane in lanes]), self.device))
            self._state.committed = [lane.committed if lane else [] for lane in lanes]
            self._start_clocks()

    def _take_group(self, lanes: Sequence[Lane | None], waiting: deque[Request]) -> list[Request]:
        """The next request, and those behind it that fit into the same pass on the free slots from here on."""
        group = [waiting.popleft()]
        longest = len(group[0].prompt) - 1
        for lane in lanes[1:]:
            if lane is not None or not waiting:
                break
            longest = max(longest, len(waiting[0].prompt) - 1)
            if longest > self.prefill_chunk or longest * (len(group) + 1) > PREFILL_ROWS:
                break
            group.append(waiting.popleft())
        return group

    @torch.no_grad()
    def _prefill(self, first: int, requests: list[Request]) -> list[Lane]:
        """Prompts into the slots from `first` on, all of each but its last token, which becomes the root.

        Prompts of one chunk go through in one pass; a longer one comes alone.
        """
        begin = time.perf_counter()
        cache, state = self._cache, self._state
        assert cache is not None
        slots = range(first, first + len(requests))
        prompts = [request.prompt for request in requests]
        cache.reset(slots, prompt_lengths=[len(prompt) for prompt in prompts])
        for slot, request in zip(slots, requests, strict=True):
            state.history.start(slot, request.prompt)
            state.roots[slot].fill_(request.prompt[-1])
            state.positions[slot].fill_(len(request.prompt) - 1)
            self._budget.begin(slot)
            self.drafter.on_start([slot], [request], cache)
        own = cache.slot(first, len(requests))
        longest = max(len(prompt) for prompt in prompts) - 1
        if 0 < longest <= self.prefill_chunk:
            self._prefill_whole(slots, prompts, own)
        for start in range(0, longest if longest > self.prefill_chunk else 0, self.prefill_chunk):
            chunk = prompts[0][start : min(start + self.prefill_chunk, longest)]
            tokens = integers(chunk, self.device)[None]
            with self._threads(len(chunk)):
                # Where nobody reads hidden states, the last layer's keys and values end the pass.
                output = self.target.model(Pass(tokens, cache=own, needs=self.drafter.needs or frozenset({"last_kv"})))
                own.commit(None, torch.full((1,), len(chunk), device=self.device))
                self.drafter.on_prefill([first], tokens, output)
        seconds = time.perf_counter() - begin
        return [
            Lane(request, self.target, self.max_length, begin, Statistics(prefill_seconds=seconds))
            for request in requests
        ]

    def _prefill_whole(self, slots: Sequence[int], prompts: list[list[int]], cache: KVCache) -> None:
        """These prompts in one pass, padded behind their ends."""
        counts = [len(prompt) - 1 for prompt in prompts]
        padded = [prompt[:-1] + [0] * (max(counts) - count) for prompt, count in zip(prompts, counts, strict=True)]
        tokens, counts_B = from_host(torch.tensor(padded), self.device), integers(counts, self.device)
        needs = self.drafter.needs or frozenset({"last_kv"})
        last_B = (counts_B - 1).clamp(min=0) if "queries" in needs else None
        with self._threads(max(counts)):
            output = self.target.model(
                Pass(tokens, cache=cache, needs=needs, queries_at_B=last_B, prompt_lengths=counts)
            )
            cache.commit(None, counts_B)
            for place, (slot, count) in enumerate(zip(slots, counts, strict=True)):
                if count:
                    self.drafter.on_prefill([slot], tokens[place : place + 1, :count], output.of_slot(place, count))

    def _threads(self, n_rows: int) -> AbstractContextManager[None]:
        """What a prefill pass of so many rows a slot runs on: the C kernels' threads, or PyTorch's."""
        if prompt_in_c(n_rows, self.target.model.embed_tokens.weight.dtype):
            return rows.decoding(self._on_cpu)
        return rows.free_processors(self._on_cpu)

    def _step(self) -> Step:
        """One step of all slots; a drafter that did not pay is not asked for a while."""
        assert self._cache is not None
        max_nodes = 0 if self._budget.rests else self._max_nodes
        model = self.target.model
        model.recorded_layers.fresh = False  # what a prompt's passes recorded took none of this step's time
        step = take_step(
            model,
            self._cache,
            self.drafter,
            self._state,
            max_nodes,
            self._budget.prune,
            self.lag == 0,
            self._work_clock,
        )
        if self._graphs.fresh or model.recorded_layers.fresh:
            # The time of this step, and of those not read yet, is that of recording.
            self._graphs.fresh, self._disturbed = False, 1 + self.lag
        return step

    def _to_host(self, step: Step) -> HostCopy:
        """What `_collect` reads of a step, on its way; the proposal where it is not on the host already."""
        accepted, tree = step.accepted, step.proposed
        parts = [accepted.counts, accepted.tokens, step.drafted]
        if self._budget.automatic and tree.width > 1 and not tree.on_host:
            parts += [tree.tokens, tree.parents] + ([] if tree.classes is None else [tree.classes])
        return HostCopy(*parts)

    def _collect(
        self, lanes: list[Lane | None], stepped: list[Lane | None], step: Step, copy: HostCopy
    ) -> Iterator[Piece]:
        """Read one step's tokens on the host; lanes that finished meanwhile take nothing more."""
        counts, tokens, drafted, *proposal = copy.lists()
        now = time.perf_counter()
        seconds, work = now - self._read_at, self._work_clock() - self._worked
        self._start_clocks()
        if self._budget.automatic:
            present = [lane is not None and lanes[slot] is lane for slot, lane in enumerate(stepped)]
            lists = Lists(*proposal, *[None] * (3 - len(proposal))) if proposal else None
            self._learn(step, lists, present, counts, tokens, work)
        for slot, lane in enumerate(stepped):
            if lane is None or lane.finish_reason:
                continue
            fresh = lane.commit(tokens[slot][: counts[slot]])
            if lane.stats.steps == 0:
                lane.stats.first_token_seconds = now - lane.begun
            self._count(lane.stats, step, drafted[slot], min(counts[slot], len(fresh)) - 1, seconds)
            yield lane.piece(fresh, counts[slot] - 1, self._decisions)
        for slot, lane in enumerate(lanes):
            if lane is not None and lane.finish_reason:
                self._leave(lanes, slot)
        # What whoever reads the stream took is no part of the next step.
        self._start_clocks()

    def _learn(
        self,
        step: Step,
        lists: Lists | None,
        present: list[bool],
        counts: list[int],
        tokens: list[list[int]],
        work: float,
    ) -> None:
        """Tell the budget which proposed nodes were right and what the step cost. present: slots not given on since;
        work: seconds of the clock of work."""
        budget = self._budget
        taking_part = [slot for slot, count in enumerate(counts) if count and present[slot]]
        if step.proposed.width > 1:  # else there is nothing to learn, and nothing to wait for
            lists = lists or step.proposed.lists
            for slot in taking_part:
                classes = None if lists.classes is None else lists.classes[slot]
                emitted = tokens[slot][: counts[slot]]
                budget.learn(slot, lists.tokens[slot], lists.parents[slot], classes, emitted)
        emitted_a_slot = sum(counts[slot] for slot in taking_part) / max(len(taking_part), 1)
        budget.record(step.width, work, step.draft_work, emitted_a_slot, typical=not self._disturbed)
        self._disturbed = max(0, self._disturbed - 1)

    def _count(self, stats: Statistics, step: Step, drafted: int, accepted: int, seconds: float) -> None:
        stats.steps += 1
        stats.decode_seconds += seconds
        stats.drafted += drafted
        for part in ("draft", "draft_pass", "target", "commit", "choice"):
            name = f"{part}_seconds"
            setattr(stats, name, getattr(stats, name) + getattr(step, name))
        stats.accepted_at_depth += [0] * (accepted - len(stats.accepted_at_depth))
        for depth in range(accepted):
            stats.accepted_at_depth[depth] += 1

    def _decisions(self) -> dict[str, str]:
        """What was decided by itself, the drafter's part and the engine's."""
        if self.drafter.max_nodes == 0:
            return {}
        return {**self.drafter.decisions(), "nodes": self._budget.words()}
