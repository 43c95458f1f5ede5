"""One step on the device: propose, forward, accept, commit. There is no other loop.

The Runner owns the cache and the state of its slots, records and replays a step's work where that pays
(infer/graphs.py), and has the only clock. The engine's runner works on the full cache; a drafter that is an engine
itself has a runner on a cache of its own. Not here: requests (infer/engine.py), what pays (infer/policy.py), the
methods (infer/drafters). Shapes: B slots, N tree nodes, T tokens of a prefill chunk.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult, accept
from longdraft.infer.drafters.base import Drafter, Request, SlotState
from longdraft.infer.graphs import graphs_for
from longdraft.infer.history import History
from longdraft.infer.kept_prompts import KeptPrompts, Place
from longdraft.infer.memory import check_memory, describe, estimate_memory, fits
from longdraft.infer.policy import Policy, widths_up_to
from longdraft.infer.prune import prune
from longdraft.infer.sampling import SamplingParams, SlotSampling
from longdraft.infer.tree import TokenTree
from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.linear import prompt_in_c
from longdraft.kernels.transfer import HostCopy, Moment, from_host, integers
from longdraft.models.decoder import Decoder
from longdraft.models.device import on_device
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput, prompt_rows
from longdraft.models.rope import LENGTH_DEPENDENT

IDLE = SamplingParams()
# Query tokens of a prefill pass of several prompts, the padding counted.
MOST_PREFILL_TOKENS = 2048
# Steps are recorded for so many kinds of sampling (which filters and penalties there are, not how strong they are).
KINDS_OF_SAMPLING = 8


@dataclass(frozen=True)
class Step:
    """A step that is queued; `Runner.read` tells what it brought. Seconds are of the host: on a GPU, of launching;
    where steps are recorded, all but the proposal's are in `commit_seconds`.

    Where steps are recorded the next one overwrites the tensors: what the host reads of them is copied before.

    Attributes:
        proposed: the drafter's tree, before pruning.
        num_query_tokens: of the target's pass, for each slot, padding counted.
        expected: on its way to the host, what the policy decides the next width by: the tokens expected of the w best
            nodes, for each w; None where it has decided already.
        draft_pass: whether the drafter took the draft pass that is tried out; None without one, and where it rested.
        drafting: when the proposal began and ended, on the device. stages: of the proposal.
    """

    proposed: TokenTree
    num_query_tokens: int
    copy: HostCopy
    n_also: int
    expected: HostCopy | None
    draft_pass: bool | None
    drafting: tuple[Moment, Moment]
    stages: int
    draft_seconds: float
    target_seconds: float
    commit_seconds: float


@dataclass(frozen=True)
class Emitted:
    """What a step brought, on the host: lists of one entry a slot.

    Attributes:
        tokens: the newly committed ones; none for a slot that took no part.
        drafted: nodes that were verified below the root.
        also: what else was asked for with the step.
        seconds: since the step began or the last one was read. at: when this one was read, by `time.perf_counter`.
    """

    tokens: list[list[int]]
    drafted: list[int]
    also: list[list]
    step: Step
    seconds: float
    at: float


class Prefilled(NamedTuple):
    """A pass of a prefill: when it began, by `time.perf_counter`, the seconds that it took, whether it was the last."""

    began: float
    seconds: float
    last: bool


class Runner:
    """Takes the steps of a target with one drafter.

    Args:
        nodes: how many of the proposed nodes are verified: "auto" learns what pays, a number is the most, None is all.
        graphs: whether work is recorded and replayed; None: where it can be.
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        noise_in_ranking: whether drafters rank candidates with the noise that the target's choices will use.
        keep_prompts: whether a prompt takes over the rows of an earlier one that began alike.

    Attributes:
        cache, state: of the slots, made by `start`.
        lag: so many steps are read late, while a later one runs already: 1 on a GPU, whose next step shall not wait
            for the host; 0 on a CPU, which gains nothing by it and would take a step too many for each request.
        work_clock: seconds of work. What the policy learns of costs must not depend on what else the machine does.
    """

    def __init__(
        self,
        model: Decoder,
        drafter: Drafter,
        nodes: int | str | None = None,
        graphs: bool | None = None,
        prefill_chunk: int | None = None,
        noise_in_ranking: bool = True,
        keep_prompts: bool = False,
    ):
        self.model, self.drafter = model, drafter
        self.max_nodes = min(nodes, drafter.max_nodes) if isinstance(nodes, int) else drafter.max_nodes
        self.device = model.embed_tokens.weight.device
        self.prefill_chunk = prefill_chunk or prompt_rows(self.device.type)
        self.cache: KVCache | None = None
        self.state: SlotState
        # Some kinds of RoPE rotate a prompt by its length; weights that are gathered for each pass cannot be watched.
        self._keeps = keep_prompts and model.config.rope.type not in LENGTH_DEPENDENT and model.weights_stay
        self._kept: KeptPrompts | None = None
        self._on_cpu = backend.is_host(self.device)
        self.lag = 0 if self._on_cpu else 1
        self.work_clock: Callable[[], float] = rows.work_seconds if self._on_cpu else time.perf_counter
        self._graphs, self._noise_in_ranking = graphs_for(graphs, model), noise_in_ranking
        # benchmarks/classical.py looks over its shoulder.
        self.make_sampling: Callable[..., SlotSampling] = SlotSampling
        automatic = nodes == "auto" and self.max_nodes > 0
        self.policy = Policy(
            drafter.n_classes,
            widths_up_to(self.max_nodes, automatic),
            automatic,
            drafter.class_stages,
            self.lag > 0 or self._graphs.recording,
            self._on_cpu,
            drafter.draft_pass_budget,
        )
        self._samplings: list[SlotSampling] = []  # the last ones of each kind, where steps are recorded
        self._began: tuple[float, float] | None = None  # time and work at the begin of the first step not read
        self._disturbed = 0  # so many next steps have no typical time
        self._passed = 0.0  # when the target's pass of this step was queued

    # Slots and prompts.

    def start(self, batch: int, longest: int, log: Callable[[str], object]) -> None:
        """So many empty slots; no sequence will have more than `longest` tokens. `log` hears what is allocated."""
        capacity = longest + (self.lag + 1) * (self.drafter.max_depth + 1) + self.policy.widths[-1]
        cache, weight = self.cache, self.model.embed_tokens.weight
        suits = (
            cache is not None
            and (cache.keys.dtype, cache.keys.device) == (weight.dtype, weight.device)  # of the model as it is now
            and cache.batch == batch
            and cache.capacity >= capacity
        )
        with on_device(self.device):
            if not suits:
                self._allocate(batch, capacity, log)
            for slot in range(batch):  # of a call that was left early
                self._empty(slot)
            self.state.active.zero_()
        self.policy.start(batch)
        self._began, self._disturbed = None, 0

    def _allocate(self, batch: int, capacity: int, log: Callable[[str], object]) -> None:
        """Another cache and state; of the old one the kept prompts come along where there is room for both."""
        self._graphs.clear()
        self._samplings.clear()
        self.drafter.release()
        chunk = min(self.prefill_chunk, capacity)
        chunk = max(chunk, min(batch * chunk, MOST_PREFILL_TOKENS))
        keeps, widths = self._keeps and capacity > self.prefill_chunk, self.policy.widths
        aside = widths[-1] if keeps and batch > 1 else 0  # a single slot is in no pass of others
        parts = estimate_memory(self.model, self.drafter, batch, capacity, widths, chunk, self._graphs.recording, aside)
        before = self._kept if keeps and fits(parts, self.device) else None
        self.cache = self._kept = None  # else the old one is gone before the new one is allocated
        check_memory(parts, batch, capacity, self.device)
        log(f"memory for {batch} sequences of {capacity} positions: {describe(parts)}")
        cache = self.model.new_cache(batch, capacity)
        kept = KeptPrompts(self.model, cache, self.prefill_chunk, aside, before) if keeps else None
        zeros = torch.zeros(batch, dtype=torch.int64, device=self.device)
        history, idle = History(batch, capacity, self.device), SlotSampling([IDLE] * batch, self.device)
        nothing = [list[int]() for _ in range(batch)]
        asked = self.policy if self.policy.automatic else None
        self.state = SlotState(
            zeros, zeros.clone(), zeros.bool(), history, idle, nothing, self._graphs, asked,
            draft_pass=self.policy.draft_pass,
        )  # fmt: skip
        self.cache, self._kept = cache, kept  # now that all of them are there

    def fits_prefill(self, n_prompts: int, longest: int) -> bool:
        """Whether so many prompts, of at most `longest` tokens without their last one, go through in one pass."""
        return longest <= self.prefill_chunk and longest * n_prompts <= MOST_PREFILL_TOKENS

    def place(self, prompt: Sequence[int], free: Sequence[int]) -> Place:
        """Of the free slots the one that this prompt takes, and what it takes over of an earlier one."""
        return Place(free[0]) if self._kept is None else self._kept.place(prompt, free)

    def prefill(self, place: Place, requests: Sequence[Request]) -> Iterator[Prefilled]:
        """Prompts into the slots from the first one's place on, all of each but its last token, which becomes the root.

        Prompts of one chunk go through in one pass; a longer one comes alone. Yields behind every pass: steps may be
        taken there, in which the slot takes no part.
        """
        begin, cache, state = time.perf_counter(), self.cache, self.state
        assert cache is not None
        first, prompts = place.slot, [request.prompt for request in requests]
        slots = range(first, first + len(requests))
        with on_device(self.device), torch.no_grad():
            cache.reset(slots, prompt_lengths=[len(prompt) for prompt in prompts])
            for slot, request in zip(slots, requests, strict=True):
                state.history.start(slot, request.prompt)
                state.roots[slot].fill_(request.prompt[-1])
                state.positions[slot].fill_(len(request.prompt) - 1)
                self.policy.start_request(slot)
                self.drafter.on_start(slot, request, cache)
                if self._kept is not None:
                    self._kept.begin(place if slot == first else Place(slot), request.prompt)
            if place.count:
                self.drafter.on_prefill(first, prompts[0], 0, place.count, TargetOutput())
        longest, own = max(map(len, prompts)) - 1, cache.slot(first, len(requests))
        # Where nobody reads hidden states, the last layer's keys and values end the pass.
        needs, whole = self.drafter.needs or frozenset({"last_kv"}), longest <= self.prefill_chunk
        for start in range(place.count, max(longest, 1), self.prefill_chunk):
            end = min(start + self.prefill_chunk, longest)
            if end > start:
                with on_device(self.device), torch.no_grad():
                    self._prefill_pass(slots, prompts, start, end, own, needs, whole)
            if self._kept is not None and not whole:
                self._kept.reach(first, end)
            yield Prefilled(begin, time.perf_counter() - begin, end == longest)
            begin = time.perf_counter()

    def _prefill_pass(
        self,
        slots: Sequence[int],
        prompts: Sequence[list[int]],
        start: int,
        end: int,
        cache: KVCache,
        needs: frozenset[str],
        whole: bool,
    ) -> None:
        """Tokens [start:end] of each prompt, but for its last, padded behind their ends, in one pass; whole: they are
        all that the slots get."""
        chunks = [prompt[start : min(end, len(prompt) - 1)] for prompt in prompts]
        counts = [len(chunk) for chunk in chunks]
        padded = [chunk + [0] * (max(counts) - len(chunk)) for chunk in chunks]
        tokens_BT, counts_B = from_host(torch.tensor(padded), self.device), integers(counts, self.device)
        with self._prefill_threads(max(counts)):
            if whole:
                last_B = (counts_B - 1).clamp(min=0) if "queries" in needs else None
                given = Pass(tokens_BT, cache=cache, needs=needs, queries_at_B=last_B, prompt_lengths=counts)
            else:
                given = Pass(tokens_BT, cache=cache, needs=needs)
            output = self.model(given)
            cache.commit(None, counts_B)
            for place, (slot, prompt, count) in enumerate(zip(slots, prompts, counts, strict=True)):
                if count:
                    own = output.of_slot(place, count) if whole else output
                    self.drafter.on_prefill(slot, prompt, start, start + count, own)

    def _prefill_threads(self, n_tokens: int) -> AbstractContextManager[None]:
        """What a prefill pass of so many tokens a slot runs on: the C kernels' threads, or PyTorch's."""
        if prompt_in_c(n_tokens, self.model.embed_tokens.weight.dtype):
            return rows.decoding(self._on_cpu)
        return rows.free_processors(self._on_cpu)

    def assign(self, requests: Sequence[Request | None], committed: list[list[int]]) -> None:
        """These requests are on the slots from now on; committed: the tokens of each, which the caller appends to."""
        with on_device(self.device):
            # A free slot does as another where steps are recorded: one kind of sampling less.
            like = next(one.sampling for one in requests if one) if self._graphs.recording else IDLE
            params = [one.sampling if one else like for one in requests]
            self._take_sampling(self.make_sampling(params, self.device, self._noise_in_ranking))
            self.state.active.copy_(from_host(torch.tensor([one is not None for one in requests]), self.device))
            self.state.committed = committed

    def free(self, slot: int) -> None:
        """This slot has no request any more."""
        with on_device(self.device):
            self.state.active[slot].fill_(False)
            self._empty(slot)
        self.state.committed[slot] = []  # what the request has is its own

    def _empty(self, slot: int) -> None:
        """Its rows are void, but for what is kept of its prompt."""
        assert self.cache is not None
        if self._kept is not None:
            self._kept.leave(slot)
        self.cache.reset([slot])

    def _take_sampling(self, sampling: SlotSampling) -> None:
        """These parameters from now on; where steps are recorded, in the place where those of their kind find them."""
        if self._graphs.recording:
            found = next((kept for kept in self._samplings if kept.follow(sampling)), sampling)
            if found is sampling and len(self._samplings) == KINDS_OF_SAMPLING:
                self._graphs.forget(self._samplings.pop(0))
            self._samplings = [kept for kept in self._samplings if kept is not found] + [found]
            sampling = found
        self.state.sampling = sampling

    # Steps.

    def step(self, *also: Tensor) -> Step:
        """Queue one step of all active slots. also: what else is to be read on the host with it."""
        state, cache = self.state, self.cache
        assert cache is not None
        with on_device(self.device), rows.decoding(self._on_cpu), torch.no_grad():
            begin, before = time.perf_counter(), Moment(self.device, self.work_clock)
            self._began = self._began or (begin, self.work_clock())
            part, batch = self._part_at_work(), cache.batch
            self.policy.start_step(part.stop - part.start if part else batch)
            proposed, draft_pass = self._propose()
            tree, expected = prune(proposed, self.policy, state.active)
            drafted, drafting = time.perf_counter(), (before, Moment(self.device, self.work_clock))
            needs = self.drafter.needs
            self._passed = drafted
            inputs = tree.tokens, tree.parents, *(() if tree.width == 1 else (tree.ancestors, tree.depths))
            if part is None:
                key, verify = ("verify", needs, self.drafter.max_depth), partial(self._verify, cache, needs)
                accepted, output = state.run(key, (self.model, cache), verify, *inputs, widest=tree.width)
            else:
                own, some = cache.slot(part.start, part.stop - part.start), (x[part] for x in inputs)
                accepted, output = self._verify(own, needs, state.of_slots(part), *some)
                accepted, output = accepted.among(part, batch), output.among(part, batch)
            state.positions += accepted.counts
            state.roots = torch.where(state.active, accepted.last(accepted.tokens), state.roots)
            self.drafter.on_step(state, tree, accepted, output)
            done = time.perf_counter()
            if self._graphs.fresh:  # the time of this step, and of those not read yet, is that of recording
                self._graphs.fresh, self._disturbed = False, 1 + self.lag
            learnt = proposed.unread if self.policy.automatic and proposed.width > 1 else ()
            copy = HostCopy(accepted.counts, accepted.tokens, (tree.parents >= 0).sum(dim=1), *also, *learnt)
            return Step(
                proposed,
                tree.width,
                copy,
                len(also),
                expected,
                draft_pass,
                drafting,
                self.policy.depth.run,
                drafted - begin,
                self._passed - drafted,
                done - self._passed,
            )

    def _verify(
        self,
        cache: KVCache,
        needs: frozenset[str],
        state: SlotState,
        tokens_BN: Tensor,
        parents_BN: Tensor,
        ancestors_BNN: Tensor | None = None,
        depths_BN: Tensor | int = 0,
    ) -> tuple[AcceptResult, TargetOutput]:
        """The target's pass over the nodes, its choices, and the accepted path's rows; what is recorded of a step."""
        positions_BN = state.positions[:, None] + depths_BN
        root_B = torch.zeros_like(state.positions) if "queries" in needs else None
        given = Pass(tokens_BN, cache, positions_BN, ancestors_BNN, needs | {"logits"}, queries_at_B=root_B)
        output = self.model(given)
        self._passed = time.perf_counter()
        assert output.logits is not None
        nodes = TokenTree(tokens_BN, parents_BN)
        accepted = accept(nodes, output.logits, state, positions_BN, ancestors_BNN, self.drafter.max_depth)
        cache.commit(accepted.nodes, accepted.counts)
        # What recorded work returns, it keeps.
        return accepted, output if "logits" in needs else replace(output, logits=None)

    def _part_at_work(self) -> slice | None:
        """The slots from the first to the last one that has a request, where the host knows and it is not all of them:
        a CPU's pass costs by its rows (one query token of SmolLM2 9.8 ms, of each of 8 slots 15.2), and free slots
        shall not."""
        state = self.state
        if not self._on_cpu or state.graphs.recording or bool(state.active.all()):
            return None
        working = [slot for slot, active in enumerate(state.active.tolist()) if active]
        part = slice(working[0], working[-1] + 1) if working else slice(0, 0)
        return part if 0 < part.stop - part.start < len(state.roots) else None

    def _propose(self) -> tuple[TokenTree, bool | None]:
        """The drafter's tree, or the roots alone where it rests; and `Step.draft_pass`."""
        state = self.state
        if self.max_nodes == 0 or self.policy.rests:
            return TokenTree.roots(state.roots), None
        if self.policy.automatic:
            self.policy.depth.begin()
        if (choice := self.policy.draft_pass) is not None:
            choice.plan(max(map(len, state.committed), default=0))
        tree = self.drafter.propose(state, self.max_nodes)
        if tree.width > self.max_nodes + 1:
            raise ValueError(f"drafter: it proposed {tree.width - 1} nodes, of at most {self.max_nodes}")
        if self.lag == 0 and not torch.equal(tree.tokens[:, 0], state.roots):
            raise ValueError("drafter: node 0 of its tree is not the root, the last committed token of each slot")
        return tree, None if choice is None else choice.taken

    def read(self, step: Step, present: Sequence[bool] = ()) -> Emitted:
        """What a step brought; the policy learns from it. present: slots that have the request which they had then."""
        assert self._began is not None
        counts, tokens, drafted, *rest = step.copy.lists()
        also, proposed = rest[: step.n_also], step.proposed.take_lists(rest[step.n_also :])
        now, (began, work) = time.perf_counter(), self._began
        self._began = None
        emitted = [new[:count] for new, count in zip(tokens, counts, strict=True)]
        taking_part = [slot for slot, new in enumerate(emitted) if new and (not present or present[slot])]
        a_slot = sum(len(emitted[slot]) for slot in taking_part) / max(len(taking_part), 1)
        work = self.work_clock() - work
        choice = self.policy.draft_pass
        if choice is not None and step.draft_pass is not None and taking_part:
            choice.record(step.draft_pass, work, a_slot)
        if self.policy.automatic:
            if proposed.width > 1:  # else there is nothing to learn, and nothing to wait for
                for slot in taking_part:
                    self.policy.learn(slot, proposed.lists, emitted[slot])
            if step.expected is not None:
                self.policy.decide(step.expected.lists()[0])
            begin, end = step.drafting
            self.policy.record(
                step.num_query_tokens, work, begin.seconds_to(end), a_slot, not self._disturbed, step.stages
            )
            self._disturbed = max(0, self._disturbed - 1)
        return Emitted(emitted, drafted, also, step, now - began, now)
