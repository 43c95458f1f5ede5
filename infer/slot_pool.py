"""The slots that an engine decodes on: their memory, and how a sequence gets into one of them and leaves it.

The pool allocates the cache and the state, reads prompts, and says which sequence is on which slot. The steps between
are the Runner's (infer/runner.py). Shapes: T tokens of a prefill pass.
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
from longdraft.infer.kept_prompts import KeptPrompts
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.kernels.cpu import library
from longdraft.kernels.linear import prompt_in_c
from longdraft.kernels.transfer import from_host, integers
from longdraft.models.decoder import Decoder
from longdraft.models.device import on_device
from longdraft.models.footprint import check_memory, estimate_memory, sizes, text_of
from longdraft.models.passes import Pass, TargetOutput, prompt_rows
from longdraft.models.rope import LENGTH_DEPENDENT

IDLE = SamplingParams()
# Steps are recorded for this many kinds of sampling: which filters and penalties there are, not how strong they are,
# but of bans, biases and held back end tokens also which ones.
KINDS_OF_SAMPLING = 8


class SlotPool:
    """The slots of one engine, whose runner gets their cache and state from here.

    Args:
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        keep_prompts: whether a prompt reuses the keys and values of an earlier one that began alike.

    Attributes:
        sequences: of each slot; None for a free one.
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
        self._reading: int | None = None  # the slot whose prompt is being read, in these passes
        self._passes: Iterator[None] = iter(())

    @property
    def decoding(self) -> list[ActiveSequence | None]:
        """The sequences of the slots that take part in a step: without the one whose prompt is being read."""
        return [None if slot == self._reading else one for slot, one in enumerate(self.sequences)]

    def start(self, batch: int, longest: int, log: Callable[[str], object]) -> None:
        """Prepare `batch` empty slots for sequences of at most `longest` tokens. Allocations are reported through
        `log`."""
        runner = self.runner
        self.sequences, self._reading = [None] * batch, None
        capacity = longest + (runner.lag + 1) * (self.drafter.max_depth + 1) + runner.policy.widths[-1]
        with on_device(self.device):
            if runner.cache is None or runner.cache.batch != batch or runner.cache.capacity < capacity:
                self._allocate(batch, capacity, log)
            for slot in range(batch):  # a call that was left early may have left requests there
                self._empty(slot)
            runner.state.active.zero_()
        runner.start()

    def _allocate(self, batch: int, capacity: int, log: Callable[[str], object]) -> None:
        """Replace cache and state."""
        runner, widths = self.runner, self.runner.policy.widths
        runner.graphs.clear()
        self._samplings.clear()
        self.drafter.release()
        runner.cache = self._kept = None  # freed before the new one is allocated
        chunk, recording = min(self.prefill_chunk, capacity), runner.graphs.recording
        parts = memory_parts(self.model, self.drafter, batch, capacity, widths, chunk, recording)
        check_memory(parts, batch, capacity, self.device)
        log(f"memory for {batch} x {capacity} positions: {text_of(parts)}")
        cache, zeros_B = (
            self.model.new_cache(batch, capacity),
            torch.zeros(batch, dtype=torch.int64, device=self.device),
        )
        runner.state = SlotState(
            roots=zeros_B,
            positions=zeros_B.clone(),
            active=zeros_B.bool(),
            history=History(batch, capacity, self.device),
            sampling=SlotSampling([IDLE] * batch, self.device),
            committed=[[] for _ in range(batch)],
            graphs=runner.graphs,
        )
        if self._keeps and capacity > self.prefill_chunk:
            self._kept = KeptPrompts(self.model, cache, self.prefill_chunk, widths[-1])
        runner.cache = cache  # only now that everything was allocated

    def admit(self, waiting: deque[ActiveSequence]) -> None:
        """Give free slots the next of the waiting sequences. While sequences are decoded, only one pass over a prompt
        runs between two steps."""
        others_decode = any(self.decoding)
        while self._reading is not None or (waiting and None in self.sequences):
            if self._reading is None:
                self._passes = self._prefill(waiting.popleft())
            next(self._passes, None)
            if others_decode:
                break

    def _prefill(self, sequence: ActiveSequence) -> Iterator[None]:
        """Read a prompt into a free slot: all tokens but the last, which becomes the root. Then let it take part in
        steps. Yields between two passes; the caller may take steps there, in which this slot takes no part."""
        begin, stats, prompt = time.perf_counter(), sequence.result.stats, sequence.request.prompt
        slot, end, length = self._start_slot(sequence), stats.taken_over, len(prompt) - 1
        sequence.began = begin
        # Asked once, because steps between two passes change it. Where nobody reads hidden states, the last layer's
        # keys and values end the pass.
        needs = self.drafter.needs or frozenset({"last_kv"})
        while end < length:
            start, end = end, min(end + self.prefill_chunk, length)
            with on_device(self.device), torch.no_grad():
                self._prefill_pass(slot, prompt, start, end, needs)
            if self._kept is not None and length > self.prefill_chunk:
                self._kept.extend(slot, prompt[:end])
            if end < length:
                stats.prefill_seconds += time.perf_counter() - begin
                yield
                begin = time.perf_counter()
        stats.prefill_seconds += time.perf_counter() - begin
        self._reading = None
        self._assign()

    def _start_slot(self, sequence: ActiveSequence) -> int:
        """Begin a prompt in a free slot, with what it reuses of an earlier one. Returns the slot."""
        cache, state, request = self.runner.cache, self.runner.state, sequence.request
        assert cache is not None
        free = [slot for slot, other in enumerate(self.sequences) if other is None]
        slot = free[0] if self._kept is None else self._kept.choose_slot(request.prompt, free)
        self.sequences[slot], self._reading = sequence, slot
        with on_device(self.device), torch.no_grad():
            cache.reset([slot], prompt_lengths=[len(request.prompt)])
            state.history.start(slot, request.prompt)
            state.roots[slot].fill_(request.prompt[-1])
            state.positions[slot].fill_(len(request.prompt) - 1)
            self.runner.policy.start_request()
            self.drafter.on_start(slot, request, cache)
            if self._kept is not None and (count := self._kept.begin(slot, request.prompt)):
                sequence.result.stats.taken_over = count
                self.drafter.on_prefill(slot, request.prompt, 0, count, TargetOutput())
        return slot

    def _prefill_pass(self, slot: int, prompt: Sequence[int], start: int, end: int, needs: frozenset[str]) -> None:
        """One pass over the tokens prompt[start:end] of this slot."""
        assert self.runner.cache is not None
        cache = self.runner.cache.slot(slot)
        tokens_1T = integers(prompt[start:end], self.device)[None]
        with self._prefill_threads(end - start):
            output = self.model(Pass(tokens_1T, cache, needs=needs))
            cache.commit(None, integers([end - start], self.device))
            self.drafter.on_prefill(slot, prompt, start, end, output)

    def _prefill_threads(self, n_tokens: int) -> AbstractContextManager[None]:
        """The threads of a prefill pass of `n_tokens` tokens: the C kernels', or PyTorch's."""
        if prompt_in_c(n_tokens, self.model.embed_tokens.weight.dtype):
            return library.decoding(self.runner.on_cpu)
        return library.free_processors(self.runner.on_cpu)

    def _assign(self) -> None:
        """Give the state the sequences that take part in steps now."""
        state, recording, decoding = self.runner.state, self.runner.graphs.recording, self.decoding
        given = [sequence and sequence.request.sampling for sequence in decoding]
        with on_device(self.device):
            # Where steps are recorded, a free slot has the parameters of another one: one kind of sampling less.
            idle = next(one for one in given if one) if recording else IDLE
            sampling = SlotSampling([one or idle for one in given], self.device)
            state.sampling = self._recorded_sampling(sampling) if recording else sampling
            state.active.copy_(from_host(torch.tensor([one is not None for one in given]), self.device))
        state.committed = [sequence.committed if sequence else [] for sequence in decoding]
        state.logprobs = self._ask_for_logprobs()

    def _ask_for_logprobs(self) -> bool:
        return any(one is not None and one.result.logprobs is not None for one in self.decoding)

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
        self._reading = None if self._reading == slot else self._reading
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
    model: Decoder, drafter: Drafter, batch: int, capacity: int, widths: Sequence[int], chunk: int, recording=False
) -> dict[str, int]:
    """Bytes by name of what decoding takes: the target's (`estimate_memory`), the choices', and the drafter's."""
    recorded = [*(drafter.needs | drafter.learns_from), *drafter.learns_from] if recording else None
    parts = estimate_memory(model, batch, capacity, widths, chunk, recorded)
    parts["passes"] += choice_bytes(batch, max(widths), model.config.vocab_size, model.embed_tokens.weight.device)
    drafted = sizes(drafter.allocations(batch, capacity))
    return parts | {name if name.startswith("draft") else f"draft {name}": count for name, count in drafted.items()}
