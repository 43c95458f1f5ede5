"""The slots that an engine decodes on: their memory, and how a prompt gets into one of them and leaves it.

The pool allocates the cache and the state, prefills prompts, and says which request is on which slot. The steps between
are the Runner's (infer/runner.py); which request comes next is for the engine to say (infer/engine.py). Shapes: B
slots, T tokens of a prefill pass.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from longdraft.infer.choice.slots import SlotSampling, choice_bytes
from longdraft.infer.drafters.base import Drafter, Request
from longdraft.infer.history import History
from longdraft.infer.kept_prompts import KeptPrompts, Place
from longdraft.infer.logprobs import TokenLogprob, prompt_logprobs
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.kernels.cpu import library
from longdraft.kernels.linear import prompt_in_c
from longdraft.kernels.transfer import from_host, integers
from longdraft.models.decoder import Decoder
from longdraft.models.device import on_device
from longdraft.models.footprint import check_memory, estimate_memory, fits, sizes, text_of
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, TargetOutput, prompt_rows
from longdraft.models.rope import LENGTH_DEPENDENT

IDLE = SamplingParams()
# Query tokens of a prefill pass of several prompts, the padding counted.
MOST_PREFILL_TOKENS = 2048
# Steps are recorded for this many kinds of sampling: which filters and penalties there are, not how strong they are,
# but of bans, biases and held back end tokens also which ones.
KINDS_OF_SAMPLING = 8


class Prefilled(NamedTuple):
    """One pass of a prefill: when it began (`time.perf_counter`), the seconds it took, whether it was the last one, and
    for each prompt the log-probabilities of the tokens behind those it read, if its request asks for them."""

    began: float
    seconds: float
    last: bool
    logprobs: Sequence[list[TokenLogprob]] = ()


class SlotPool:
    """The slots of one engine, whose runner gets their cache and state from here.

    Args:
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        noise_in_ranking: whether drafters rank candidates with the noise that the target's choices will use.
        keep_prompts: whether a prompt reuses the keys and values of an earlier one that began alike.

    Attributes:
        make_sampling: makes the slots' sampling; benchmarks/drafters/rejection_sampling.py puts one here that records
            what it sees.
    """

    def __init__(self, runner: Runner, prefill_chunk: int | None, noise_in_ranking: bool, keep_prompts: bool):
        self.runner, self.model, self.drafter, self.device = runner, runner.model, runner.drafter, runner.device
        self.prefill_chunk = prefill_chunk or prompt_rows(self.device.type)
        self.make_sampling: Callable[..., SlotSampling] = SlotSampling
        self._noise_in_ranking = noise_in_ranking
        # Some kinds of RoPE rotate a prompt by its length; weights that are gathered for each pass cannot be watched.
        length_dependent = self.model.config.rope.type in LENGTH_DEPENDENT
        self._keeps = keep_prompts and not length_dependent and self.model.weights_stay
        self._kept: KeptPrompts | None = None
        self._samplings: list[SlotSampling] = []  # the last one of each kind, where steps are recorded
        self._asking = set[int]()  # slots whose requests ask for log-probabilities

    def start(self, batch: int, longest: int, log: Callable[[str], object]) -> None:
        """Prepare `batch` empty slots for sequences of at most `longest` tokens. Allocations are reported through
        `log`."""
        runner = self.runner
        capacity = longest + (runner.lag + 1) * (self.drafter.max_depth + 1) + runner.policy.widths[-1]
        with on_device(self.device):
            if not self._suits(batch, capacity):
                self._allocate(batch, capacity, log)
            for slot in range(batch):  # a call that was left early may have left requests there
                self._empty(slot)
            runner.state.active.zero_()
        runner.start(batch)

    def _suits(self, batch: int, capacity: int) -> bool:
        """Whether the present cache is large enough, and of the model's dtype and device as they are now."""
        cache, weight = self.runner.cache, self.model.embed_tokens.weight
        return (
            cache is not None
            and (cache.keys.dtype, cache.keys.device) == (weight.dtype, weight.device)
            and cache.batch == batch
            and cache.capacity >= capacity
        )

    def _allocate(self, batch: int, capacity: int, log: Callable[[str], object]) -> None:
        """Replace cache and state. The old cache's kept prompts are copied where there is room for both caches."""
        runner, recording = self.runner, self.runner.graphs.recording
        runner.graphs.clear()
        self._samplings.clear()
        self.drafter.release()
        chunk = min(self.prefill_chunk, capacity)
        chunk = max(chunk, min(batch * chunk, MOST_PREFILL_TOKENS))
        keeps, widths = self._keeps and capacity > self.prefill_chunk, runner.policy.widths
        aside = widths[-1] if keeps and batch > 1 else 0  # a single slot is in no pass of others
        parts = memory_parts(self.model, self.drafter, batch, capacity, widths, chunk, recording, aside)
        before = self._kept if keeps and fits(parts, self.device) else None
        # Unless its prompts are kept, the old cache is freed before the new one is allocated.
        runner.cache = self._kept = None
        check_memory(parts, batch, capacity, self.device)
        log(f"memory for {batch} sequences of {capacity} positions: {text_of(parts)}")
        cache = self.model.new_cache(batch, capacity)
        kept = KeptPrompts(self.model, cache, self.prefill_chunk, aside, before) if keeps else None
        zeros_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        runner.state = SlotState(
            roots=zeros_B,
            positions=zeros_B.clone(),
            active=zeros_B.bool(),
            history=History(batch, capacity, self.device),
            sampling=SlotSampling([IDLE] * batch, self.device),
            committed=[[] for _ in range(batch)],
            graphs=runner.graphs,
        )
        runner.cache, self._kept = cache, kept  # only now that everything was allocated

    def fits_prefill(self, n_prompts: int, longest: int) -> bool:
        """Whether `n_prompts` prompts fit in one prefill pass. longest: tokens of the longest one, without its last."""
        return longest <= self.prefill_chunk and longest * n_prompts <= MOST_PREFILL_TOKENS

    def place(self, request: Request, free: Sequence[int]) -> Place:
        """Choose a free slot for this prompt, and how much of an earlier prompt's keys and values it can reuse."""
        place = Place(free[0]) if self._kept is None else self._kept.place(request.prompt, free)
        # Log-probabilities of the prompt need all of its passes.
        return place if request.sampling.prompt_logprobs is None else Place(place.slot)

    def prefill(self, place: Place, requests: Sequence[Request]) -> Iterator[Prefilled]:
        """Read prompts into the slots from `place.slot` on: all tokens but the last, which becomes the root.

        Several prompts, of one chunk each, go through in one pass; a longer prompt comes alone. Yields after every
        pass; the caller may take steps there, in which these slots take no part.
        """
        begin, cache, state = time.perf_counter(), self.runner.cache, self.runner.state
        assert cache is not None
        first, prompts = place.slot, [request.prompt for request in requests]
        slots = range(first, first + len(requests))
        with on_device(self.device), torch.no_grad():
            cache.reset(slots, prompt_lengths=[len(prompt) for prompt in prompts])
            for slot, request in zip(slots, requests, strict=True):
                state.history.start(slot, request.prompt)
                state.roots[slot].fill_(request.prompt[-1])
                state.positions[slot].fill_(len(request.prompt) - 1)
                self.runner.policy.start_request(slot)
                self.drafter.on_start(slot, request, cache)
                if self._kept is not None:
                    self._kept.begin(place if slot == first else Place(slot), request.prompt)
            if place.count:
                self.drafter.on_prefill(first, prompts[0], 0, place.count, TargetOutput())
        longest, some_cache = max(map(len, prompts)) - 1, cache.slot(first, len(requests))
        # Asked once, because steps between two passes change it. Where nobody reads hidden states, the last layer's
        # keys and values end the pass.
        needs, asked = self.drafter.needs or frozenset({"last_kv"}), [one.sampling.prompt_logprobs for one in requests]
        if any(k is not None for k in asked):
            needs |= {"post_norm"}
        for start in range(place.count, max(longest, 1), self.prefill_chunk):
            end, logprobs = min(start + self.prefill_chunk, longest), list[list[TokenLogprob]]()
            if end > start:
                with on_device(self.device), torch.no_grad():
                    logprobs = self._prefill_pass(some_cache, first, prompts, start, end, needs, asked)
            if self._kept is not None and longest > self.prefill_chunk:
                self._kept.reach(first, end)
            yield Prefilled(begin, time.perf_counter() - begin, end == longest, logprobs)
            begin = time.perf_counter()

    def _prefill_pass(
        self,
        cache: KVCache,
        first: int,
        prompts: Sequence[list[int]],
        start: int,
        end: int,
        needs: frozenset[str],
        asked: Sequence[int | None],
    ) -> list[list[TokenLogprob]]:
        """One pass over the tokens [start:end] of each prompt but its last one, padded to the longest.

        cache: of these slots alone. first: the first one. asked: each request's `prompt_logprobs`. Returns the
        log-probabilities of the tokens behind those of the pass, for each prompt.
        """
        only_pass = start == 0 and end == max(map(len, prompts)) - 1
        chunks = [prompt[start : min(end, len(prompt) - 1)] for prompt in prompts]
        counts = [len(chunk) for chunk in chunks]
        padded = [chunk + [0] * (max(counts) - len(chunk)) for chunk in chunks]
        tokens_BT, counts_B = from_host(torch.tensor(padded), self.device), integers(counts, self.device)
        with self._prefill_threads(max(counts)):
            if only_pass:
                last_B = (counts_B - 1).clamp(min=0) if "queries" in needs else None
                given = Pass(tokens_BT, cache=cache, needs=needs, queries_at_B=last_B, prompt_lengths=counts)
            else:
                given = Pass(tokens_BT, cache=cache, needs=needs)
            output = self.model(given)
            cache.commit(None, counts_B)
            found = [list[TokenLogprob]() for _ in prompts]
            for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
                if count:
                    of_slot = output.of_slot(row, count) if only_pass else output
                    self.drafter.on_prefill(first + row, prompt, start, start + count, of_slot)
                    if (k := asked[row]) is not None and of_slot.post_norm is not None:
                        tokens = integers(prompt[start + 1 : start + count + 1], self.device)
                        found[row] = prompt_logprobs(self.model.lm_head, of_slot.post_norm[0], tokens, k)
        return found

    def _prefill_threads(self, n_tokens: int) -> AbstractContextManager[None]:
        """The threads of a prefill pass of `n_tokens` tokens a slot: the C kernels', or PyTorch's."""
        if prompt_in_c(n_tokens, self.model.embed_tokens.weight.dtype):
            return library.decoding(self.runner.on_cpu)
        return library.free_processors(self.runner.on_cpu)

    def assign(self, requests: Sequence[Request | None], committed: list[list[int]]) -> None:
        """Put these requests on the slots, None for a free one. committed: each slot's tokens, prompt included; the
        caller appends to them."""
        state, recording = self.runner.state, self.runner.graphs.recording
        with on_device(self.device):
            # Where steps are recorded, a free slot has the parameters of another one: one kind of sampling less.
            idle = next(one.sampling for one in requests if one) if recording else IDLE
            params = [one.sampling if one else idle for one in requests]
            sampling = self.make_sampling(params, self.device, self._noise_in_ranking)
            state.sampling = self._recorded_sampling(sampling) if recording else sampling
            state.active.copy_(from_host(torch.tensor([one is not None for one in requests]), self.device))
            state.committed = committed
            self._asking = {i for i, one in enumerate(requests) if one and one.sampling.logprobs is not None}
            state.logprobs = bool(self._asking)

    def _recorded_sampling(self, sampling: SlotSampling) -> SlotSampling:
        """The sampling that recorded steps of this kind read, with these parameters; if there is none yet, this one."""
        found = next((kept for kept in self._samplings if kept.follow(sampling)), sampling)
        if found is sampling and len(self._samplings) == KINDS_OF_SAMPLING:
            self.runner.graphs.forget(self._samplings.pop(0))
        self._samplings = [kept for kept in self._samplings if kept is not found] + [found]
        return found

    def free(self, slot: int) -> None:
        """Take the request off this slot."""
        state = self.runner.state
        with on_device(self.device):
            state.active[slot].fill_(False)
            self._empty(slot)
        state.committed[slot] = []  # the request keeps its own list
        self._asking.discard(slot)
        state.logprobs = bool(self._asking)

    def _empty(self, slot: int) -> None:
        """Void the slot's rows, except for what is kept of its prompt."""
        assert self.runner.cache is not None
        if self._kept is not None:
            self._kept.leave(slot)
        self.runner.cache.reset([slot])


def memory_parts(
    model: Decoder,
    drafter: Drafter,
    batch: int,
    capacity: int,
    widths: Sequence[int],
    chunk: int,
    recording: bool = False,
    aside: int = 0,
) -> dict[str, int]:
    """Bytes by name of what decoding takes: the target's (`estimate_memory`), the choices', and the drafter's."""
    recorded = [*(drafter.needs | drafter.learns_from), *drafter.learns_from] if recording else None
    parts = estimate_memory(model, batch, capacity, widths, chunk, recorded, aside)
    parts["passes"] += choice_bytes(batch, max(widths), model.config.vocab_size, model.embed_tokens.weight.device)
    drafted = sizes(drafter.allocations(batch, capacity))
    return parts | {f"draft {name}": count for name, count in drafted.items()}
