"""The slots that an engine decodes on: their memory, and how a sequence gets into one of them and leaves it.

The pool allocates the cache and the state, reads prompts, and says which sequence is on which slot. The steps between
are the Runner's (infer/runner.py). Shapes: B slots, T tokens of a prefill pass.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from longdraft.infer.choice.slots import SlotSampling, choice_bytes
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.generation import ActiveSequence
from longdraft.infer.history import History
from longdraft.infer.kept_prompts import KeptPrompts, Place
from longdraft.infer.requests import Request
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


class SlotPool:
    """The slots of one engine, whose runner gets their cache and state from here.

    Args:
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        keep_prompts: whether a prompt reuses the keys and values of an earlier one that began alike.

    Attributes:
        sequences: of each slot; None for a free one, and where a prompt is still read.
        reading: by slot, the sequences whose prompts are being read. With steps between the passes it is one.
    """

    def __init__(self, runner: Runner, prefill_chunk: int | None, keep_prompts: bool):
        self.runner, self.model, self.drafter, self.device = runner, runner.model, runner.drafter, runner.device
        self.prefill_chunk = prefill_chunk or prompt_rows(self.device.type)
        # Some kinds of RoPE rotate a prompt by its length; weights that are gathered for each pass cannot be watched.
        length_dependent = self.model.config.rope.type in LENGTH_DEPENDENT
        self._keeps = keep_prompts and not length_dependent and self.model.weights_stay
        self._kept: KeptPrompts | None = None
        self._samplings: list[SlotSampling] = []  # the last one of each kind, where steps are recorded
        self.sequences: list[ActiveSequence | None] = []
        self.reading: dict[int, ActiveSequence] = {}
        self._passes: Iterator[None] = iter(())  # those over the prompts of `reading`

    @property
    def busy(self) -> bool:
        """Whether a slot has a sequence."""
        return bool(self.reading) or any(self.sequences)

    def start(self, batch: int, longest: int, log: Callable[[str], object]) -> None:
        """Prepare `batch` empty slots for sequences of at most `longest` tokens. Allocations are reported through
        `log`."""
        runner = self.runner
        self.sequences, self.reading, self._passes = [None] * batch, {}, iter(())
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
        log(f"memory for {batch} x {capacity} positions: {text_of(parts)}")
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

    def admit(self, waiting: deque[ActiveSequence]) -> None:
        """Give free slots the next of the waiting sequences. While sequences are decoded, only one pass over a prompt
        runs between two steps."""
        others_decode = any(self.sequences)
        while self.reading or (waiting and None in self.sequences):
            if not self.reading:
                self._begin(waiting)
            next(self._passes, None)
            if others_decode:
                break

    def _begin(self, waiting: deque[ActiveSequence]) -> None:
        """Begin to read the next prompt, and those after it that fit in the same pass and would be placed in the slots
        right behind."""
        free, together = [slot for slot, sequence in enumerate(self.sequences) if sequence is None], [waiting.popleft()]
        place, longest = self._place(together[0].request, free), len(together[0].request.prompt) - 1
        free.remove(place.slot)
        while waiting and free:
            longest, slot = max(longest, len(waiting[0].request.prompt) - 1), place.slot + len(together)
            if longest > self.prefill_chunk or longest * (len(together) + 1) > MOST_PREFILL_TOKENS:
                break
            if self._place(waiting[0].request, free).slot != slot:
                break
            free.remove(slot)
            together.append(waiting.popleft())
        together[0].result.stats.taken_over = place.count  # 0 with more than one prompt
        self.reading = dict(enumerate(together, place.slot))
        self._passes = self._prefill(place)

    def _place(self, request: Request, free: Sequence[int]) -> Place:
        """Choose a free slot for this prompt, and how much of an earlier prompt's keys and values it can reuse."""
        return Place(free[0]) if self._kept is None else self._kept.place(request.prompt, free)

    def _prefill(self, place: Place) -> Iterator[None]:
        """Read the prompts of `reading`: all tokens but the last, which becomes the root. Then put them on their slots.

        Several prompts, of one chunk each, go through in one pass; a longer prompt comes alone. Yields between two
        passes; the caller may take steps there, in which these slots take no part.
        """
        begin, first, sequences = time.perf_counter(), place.slot, list(self.reading.values())
        cache, longest = self._start_slots(place), max(len(one.request.prompt) for one in sequences) - 1
        # Asked once, because steps between two passes change it. Where nobody reads hidden states, the last layer's
        # keys and values end the pass.
        needs = self.drafter.needs or frozenset({"last_kv"})
        for sequence in sequences:
            sequence.began = begin
        for start in range(place.count, max(longest, 1), self.prefill_chunk):
            end = min(start + self.prefill_chunk, longest)
            if end > start:
                with on_device(self.device), torch.no_grad():
                    self._prefill_pass(cache, first, sequences, start, end, needs)
            if self._kept is not None and longest > self.prefill_chunk:
                self._kept.reach(first, end)
            seconds = time.perf_counter() - begin
            for sequence in sequences:
                sequence.result.stats.prefill_seconds += seconds
            if end < longest:
                yield
                begin = time.perf_counter()
        self.sequences[first : first + len(sequences)] = sequences
        self.reading = {}
        self._assign()

    def _start_slots(self, place: Place) -> KVCache:
        """Begin the prompts of `reading` in their slots, the first one with what it reuses. Returns the cache of these
        slots."""
        cache, state = self.runner.cache, self.runner.state
        assert cache is not None
        requests = {slot: sequence.request for slot, sequence in self.reading.items()}
        with on_device(self.device), torch.no_grad():
            cache.reset(list(requests), prompt_lengths=[len(request.prompt) for request in requests.values()])
            for slot, request in requests.items():
                state.history.start(slot, request.prompt)
                state.roots[slot].fill_(request.prompt[-1])
                state.positions[slot].fill_(len(request.prompt) - 1)
                self.runner.policy.start_request(slot)
                self.drafter.on_start(slot, request, cache)
                if self._kept is not None:
                    self._kept.begin(place if slot == place.slot else Place(slot), request.prompt)
            if place.count:
                self.drafter.on_prefill(place.slot, requests[place.slot].prompt, 0, place.count, TargetOutput())
        return cache.slot(place.slot, len(requests))

    def _prefill_pass(
        self,
        cache: KVCache,
        first: int,
        sequences: Sequence[ActiveSequence],
        start: int,
        end: int,
        needs: frozenset[str],
    ) -> None:
        """One pass over the tokens [start:end] of each prompt but its last one, padded to the longest.

        cache: of these slots alone. first: the first one.
        """
        prompts = [sequence.request.prompt for sequence in sequences]
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
            for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
                if count:
                    of_slot = output.of_slot(row, count) if only_pass else output
                    self.drafter.on_prefill(first + row, prompt, start, start + count, of_slot)

    def _prefill_threads(self, n_tokens: int) -> AbstractContextManager[None]:
        """The threads of a prefill pass of `n_tokens` tokens a slot: the C kernels', or PyTorch's."""
        if prompt_in_c(n_tokens, self.model.embed_tokens.weight.dtype):
            return library.decoding(self.runner.on_cpu)
        return library.free_processors(self.runner.on_cpu)

    def _assign(self) -> None:
        """Give the state the sequences that are on the slots now."""
        state, recording = self.runner.state, self.runner.graphs.recording
        given = [sequence and sequence.request.sampling for sequence in self.sequences]
        with on_device(self.device):
            # Where steps are recorded, a free slot has the parameters of another one: one kind of sampling less.
            idle = next(one for one in given if one) if recording else IDLE
            sampling = SlotSampling([one or idle for one in given], self.device)
            state.sampling = self._recorded_sampling(sampling) if recording else sampling
            state.active.copy_(from_host(torch.tensor([one is not None for one in given]), self.device))
        state.committed = [sequence.committed if sequence else [] for sequence in self.sequences]
        state.logprobs = self._ask_for_logprobs()

    def _ask_for_logprobs(self) -> bool:
        return any(one is not None and one.result.logprobs is not None for one in self.sequences)

    def _recorded_sampling(self, sampling: SlotSampling) -> SlotSampling:
        """The sampling that recorded steps of this kind read, with these parameters; if there is none yet, this one."""
        found = next((kept for kept in self._samplings if kept.follow(sampling)), sampling)
        if found is sampling and len(self._samplings) == KINDS_OF_SAMPLING:
            self.runner.graphs.forget(self._samplings.pop(0))
        self._samplings = [kept for kept in self._samplings if kept is not found] + [found]
        return found

    def free(self, slot: int) -> None:
        """Take the sequence off this slot."""
        state = self.runner.state
        self.sequences[slot] = None
        if self.reading.pop(slot, None):
            self._passes = iter(())
        with on_device(self.device):
            state.active[slot].fill_(False)
            self._empty(slot)
        state.committed[slot] = []  # the sequence keeps its own list
        state.logprobs = self._ask_for_logprobs()

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
    return parts | {name if name.startswith("draft") else f"draft {name}": count for name, count in drafted.items()}
