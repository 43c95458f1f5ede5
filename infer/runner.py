"""One step on the device: propose, forward, accept, commit. There is no other loop.

The Runner takes steps on the cache and the state that the owner of the slots has given it: the engine's SlotPool
(infer/slot_pool.py), or a drafter that decodes on a cache of its own (infer/drafters/triforce.py). It records and
replays a step's work where that pays (infer/graphs.py), and takes the times by which infer/budget.py decides.
Shapes: B slots, N tree nodes.
"""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult, accept
from longdraft.infer.budget import Policy, widths_up_to
from longdraft.infer.choice.grammar import allowed_tokens, without_refused
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.graphs import graphs_for
from longdraft.infer.logprobs import TokenLogprob, path_logprobs, read_logprobs
from longdraft.infer.requests import Request
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels import backend
from longdraft.kernels.cpu import library
from longdraft.kernels.transfer import HostCopy, Moment, from_host
from longdraft.models.decoder import Decoder
from longdraft.models.device import on_device
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput, spread


@dataclass
class Step:
    """A queued step and, once `Runner.read` has read it, its results. Lists have one entry a slot.

    Draft, target and commit seconds are host times: on a GPU they measure launches. Where steps are recorded,
    `commit_seconds` includes all but the proposal. There the next step overwrites the tensors, so results are copied
    first.

    Attributes:
        proposed: the drafter's tree, before pruning.
        num_query_tokens: query tokens of the target's pass in each slot, padding counted.
        results: tensors on their way to the host: int64 [B, 2 + P] with each slot's `AcceptResult.counts`, number of
            verified nodes and `AcceptResult.tokens`; the `n_logprobs` tensors of `path_logprobs`; those of
            `TokenTree.unread`; and, if `undecided`, the expected tokens of `Policy.prune`.
        undecided: whether the policy chooses its next width when this step is read.
        drafting: when the proposal began and ended, on the device. ended: when the step ended.
        stages: draft stages of the proposal.
        tokens: the newly committed tokens; none for a slot that took no part.
        drafted: nodes that were verified below the root.
        logprobs: of each slot's tokens; empty if no request asks for them.
        seconds: time since the step began or the one before it was read, whichever was later; if prefill passes were
            queued, the device's time for the step.
        read_at: when it was read, by `time.perf_counter`.
    """

    proposed: TokenTree
    num_query_tokens: int
    results: HostCopy
    n_logprobs: int
    undecided: bool
    drafting: tuple[Moment, Moment]
    ended: Moment
    stages: int
    draft_seconds: float
    target_seconds: float
    commit_seconds: float
    tokens: list[list[int]] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    seconds: float = 0.0
    read_at: float = 0.0


class Runner:
    """Takes the steps of a target with one drafter.

    Args:
        nodes: how many of the proposed nodes are verified: "auto" decides by speed, a number is a limit, None is all.
        graphs: whether work is recorded and replayed; None: where possible.

    Attributes:
        cache, state: of the slots; their owner sets both.
        lag: by how many steps reading lags behind queueing: 1 on a GPU, so that its next step does not wait for the
            host; 0 on a CPU, which would gain nothing and run one useless step for each request.
        rehearsed: a placeholder request, with which work is recorded before the first real one.
        work_clock: seconds; on a CPU without the machine's other load, which must not affect the measured costs.
    """

    def __init__(self, model: Decoder, drafter: Drafter, nodes: int | str | None, graphs: bool | None):
        self.model, self.drafter = model, drafter
        self.max_nodes = min(nodes, drafter.max_nodes) if isinstance(nodes, int) else drafter.max_nodes
        self.cache: KVCache | None = None
        self.state: SlotState
        self.device = model.embed_tokens.weight.device
        self.on_cpu = backend.is_host(self.device)
        self.lag = 0 if self.on_cpu else 1
        self.work_clock: Callable[[], float] = library.work_seconds if self.on_cpu else time.perf_counter
        self.graphs, self.must_record = graphs_for(graphs, model), bool(graphs)
        automatic = nodes == "auto" and self.max_nodes > 0
        widths = widths_up_to(self.max_nodes, automatic, self.graphs.recording)
        # The prompt is longer than what drafters usually have to catch up with.
        length = min(64 + 2 * drafter.max_depth, model.config.max_positions - 1)
        self.rehearsed = Request(0, [0] * length, SamplingParams(seed=0, max_new_tokens=1))
        self.policy = Policy(drafter.class_stages, widths, automatic, on_host=self.on_cpu)
        self._began: tuple[float, float] | None = None  # time and work clock when the next step to be read began
        self._queued = 0  # steps that are not read yet
        self._disturbed = 0  # how many of the next steps to be read have an untypical time
        self._beside_prompts = 0  # during how many of the next steps to be read a GPU also prefills
        self._passed = 0.0  # when the target's pass of this step was queued

    def start(self) -> None:
        """Start a call, or resume after a wait: forget unread steps."""
        self._began, self._queued, self._disturbed, self._beside_prompts = None, 0, 0, 0

    def note_prompt(self) -> None:
        """Note that a prefill pass was queued: a GPU's times of the unread steps and of the next one may include it."""
        if self.lag:
            self._beside_prompts = 1 + self._queued

    def rehearse(self, lengths: Sequence[int]) -> None:
        """Record the work of all steps that requests may need, so that no request waits for a recording. All slots are
        free, so nothing is committed or learned.

        lengths: text lengths in tokens to record for, because some drafters decide by the length.
        """
        state, cache, policy = self.state, self.cache, self.policy
        assert cache is not None
        all_stages = range(1, 1 + policy.n_stages) if policy.automatic else [policy.n_stages]
        kinds = [(1, 0), *((width, stages) for stages in all_stages for width in policy.widths if self.max_nodes)]
        try:
            with self.graphs.rehearsal():
                for length, kind, fresh in product(lengths, kinds, (True, False)):
                    state.committed, policy.rehearsed = [range(length)] * cache.batch, kind
                    for slot in range(cache.batch) if fresh else ():  # in its first step a drafter may need more
                        self.drafter.on_start(slot, self.rehearsed, cache)
                    self.step()
        finally:
            state.committed, policy.rehearsed = [[] for _ in range(cache.batch)], None

    def step(self) -> Step:
        """Queue one step of all active slots."""
        state, cache = self.state, self.cache
        assert cache is not None
        with on_device(self.device), library.decoding(self.on_cpu), torch.no_grad():
            begin, draft_begin = time.perf_counter(), Moment(self.device, self.work_clock)
            self._began, self._queued = self._began or (begin, self.work_clock()), self._queued + 1
            working = state.working
            n_working = working.stop - working.start
            self.policy.start_step(n_working)
            proposed, allowed = self._propose(), None
            if state.matchers:
                proposed = without_refused(proposed, state.matchers)
            tree, expected = self.policy.prune(proposed, state)
            if state.matchers:
                allowed = from_host(allowed_tokens(tree, state.matchers, self.model.config.vocab_size), self.device)
            self._passed = drafted = time.perf_counter()
            drafting, needs = (draft_begin, Moment(self.device, self.work_clock)), self.drafter.needs
            tree = tree.to(self.device)
            inputs: tuple[Any, ...] = tree.tokens, tree.parents, allowed, *(tree.relations if tree.width > 1 else ())
            if n_working == cache.batch:
                key = "verify", needs, self.drafter.max_depth, state.logprobs
                verify = partial(self._verify, cache, needs)
                verified = state.run(key, (self.model, cache), verify, *inputs, widest=tree.width)
                accepted, output, results = verified
            else:
                some_cache = cache.slot(working.start, n_working)
                some_inputs: list[Any] = [None if x is None else x[working] for x in inputs]
                accepted, output, results = self._verify(some_cache, needs, state.of_slots(working), *some_inputs)
                accepted, output = accepted.among(working, cache.batch), output.among(working, cache.batch)
                results = tuple(spread(x, working, cache.batch) for x in results)
            self.drafter.on_step(state, tree, accepted, output)
            done = time.perf_counter()
            if self.graphs.fresh:  # recording took part of the time of this step, and of those not read yet
                self.graphs.fresh, self._disturbed = False, 1 + self.lag
            unread = proposed.unread if self.policy.automatic and proposed.width > 1 else ()
            ended = Moment(self.device, self.work_clock)
            return Step(
                proposed=proposed,
                num_query_tokens=tree.width,
                results=HostCopy(*results, *unread, *([] if expected is None else [expected])),
                n_logprobs=len(results) - 1,
                undecided=expected is not None,
                drafting=drafting,
                ended=ended,
                stages=self.policy.stages_run,
                draft_seconds=drafted - begin,
                target_seconds=self._passed - drafted,
                commit_seconds=done - self._passed,
            )

    def _verify(
        self,
        cache: KVCache,
        needs: frozenset[str],
        state: SlotState,
        tokens_BN: Tensor,
        parents_BN: Tensor,
        allowed_BNW: Tensor | None,
        ancestors_BNN: Tensor | None = None,
        depths_BN: Tensor | int = 0,
    ) -> tuple[AcceptResult, TargetOutput, tuple[Tensor, ...]]:
        """Run the target over the nodes, make its choices, commit the accepted path and advance the roots. This is the
        part of a step that is recorded. The third result holds the first tensors of `Step.results`."""
        nodes = TokenTree(tokens_BN, parents_BN)
        if ancestors_BNN is None and nodes.width > 1:
            ancestors_BNN, depths_BN = nodes.ancestors, nodes.depths
        positions_BN = state.positions[:, None] + depths_BN
        root_B = torch.zeros_like(state.positions) if "queries" in needs else None
        given = Pass(tokens_BN, cache, positions_BN, ancestors_BNN, needs | {"logits"}, queries_at_B=root_B)
        output = self.model(given)
        self._passed = time.perf_counter()
        assert output.logits is not None
        among = positions_BN, ancestors_BNN, allowed_BNW
        accepted = accept(nodes, output.logits, state, *among, self.drafter.max_depth)
        cache.commit(accepted.nodes, accepted.counts)
        state.positions += accepted.counts
        state.roots.copy_(torch.where(state.active, accepted.last(accepted.tokens), state.roots))
        n_verified_B = (parents_BN >= 0).sum(dim=1)
        results_BR = torch.cat([accepted.counts[:, None], n_verified_B[:, None], accepted.tokens], dim=1)
        logprobs = path_logprobs(output.logits, accepted.nodes, accepted.tokens) if state.logprobs else ()
        # Recorded work keeps its outputs in memory, so unused logits are omitted.
        return accepted, output if "logits" in needs else replace(output, logits=None), (results_BR, *logprobs)

    def _propose(self) -> TokenTree:
        """The drafter's tree, or the roots alone while the policy pauses the drafter."""
        state = self.state
        if self.max_nodes == 0 or self.policy.rests:
            return state.run(("roots",), (), lambda state: TokenTree.roots(state.roots))
        working = [slot for slot, tokens in enumerate(state.committed) if tokens]
        tree = self.drafter.propose(state, self.policy.budget(self.max_nodes, working))
        assert tree.width <= self.max_nodes + 1, f"the drafter proposed {tree.width - 1} nodes of {self.max_nodes}"
        assert self.lag or torch.equal(tree.tokens[:, 0], state.roots), "node 0 of the drafter's tree is not the root"
        return tree

    def read(self, step: Step, present: Container[int] | None = None) -> Step:
        """Wait for a step's results, let the policy learn from them, and return the step with them.

        present: the slots that still have the request of that step; None: all.
        """
        assert self._began is not None
        results, *rest = step.results.lists()
        expected = rest.pop() if step.undecided else None
        logprobs, proposed = rest[: step.n_logprobs], step.proposed.take_lists(rest[step.n_logprobs :])
        step.read_at, (began, work) = time.perf_counter(), self._began
        step.tokens = [tokens[:count] for count, _, *tokens in results]
        step.drafted = [n_verified for _, n_verified, *_ in results]
        draft_begin, draft_end = step.drafting
        typical, now = not self._disturbed, self.work_clock()
        step.seconds, work = step.read_at - began, now - work
        if self._beside_prompts:
            step.seconds = work = draft_begin.seconds_to(step.ended)
        self._disturbed, self._beside_prompts = (max(0, count - 1) for count in (self._disturbed, self._beside_prompts))
        self._queued -= 1
        self._began = (step.read_at, now) if self._queued else None
        if self.policy.automatic:
            taking_part = [slot for slot, new in enumerate(step.tokens) if new and (present is None or slot in present)]
            for slot in taking_part if proposed.width > 1 else ():
                self.policy.learn(slot, proposed.lists, step.tokens[slot])
            if expected is not None:
                self.policy.decide(expected)
            per_slot = sum(len(step.tokens[slot]) for slot in taking_part) / max(len(taking_part), 1)
            work, draft_seconds = self.model.ranks.numbers_of_first(work, draft_begin.seconds_to(draft_end))
            self.policy.record(step.num_query_tokens, work, draft_seconds, per_slot, step.stages, typical)
        if logprobs:
            of_slots = zip(step.tokens, *logprobs, strict=True)
            step.logprobs = [read_logprobs(new, *of_slot) for new, *of_slot in of_slots]
        return step
