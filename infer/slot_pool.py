"""The slots that an engine decodes on: their memory, and how sequences are admitted and freed.

The pool allocates the cache and the state, prefills prompts, and maps sequences to slots. The Runner (infer/runner.py)
takes the steps. Shapes: T tokens of a prefill pass.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from longdraft.infer.choice.slots import SlotSampling, choice_bytes
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.generation import ActiveSequence
from longdraft.infer.history import History
from longdraft.infer.kept_prompts import KeptPrompts
from longdraft.infer.runner import Runner
from longdraft.infer.sampling import GREEDY, SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.kernels.cpu import library
from longdraft.kernels.linear import prompt_in_c
from longdraft.kernels.transfer import fill_from_host, integers
from longdraft.kernels.tree import MOST_ROWS
from longdraft.kernels.tree_attention import tune
from longdraft.models.decoder import Decoder
from longdraft.models.device import on_device
from longdraft.models.footprint import check_memory, estimate_memory, sizes, text_of
from longdraft.models.passes import Pass, TargetOutput, prompt_rows
from longdraft.models.rope import LENGTH_DEPENDENT

# Steps are recorded for at most this many kinds of sampling. A kind is the set of filters and penalties in use,
# whatever their strength, with or without biases and bans, and with or without held-back end tokens.
KINDS_OF_SAMPLING = 8
# Row counts of recorded prefill passes, besides `prefill_chunk`. A pass has the smallest that fits the rest of the
# prompt with fewer than SPARE_ROWS unused, which cost little beside reading the weights; else the largest full one.
RECORDED_ROWS, SPARE_ROWS = (128, 256, 512), 256


def tune_for(model: Decoder, capacity: int, n_slots: int, widths: Iterable[int], log: Callable[[str], object]) -> None:
    """`kernels.tree_attention.tune` for the passes of this model."""
    config, weight = model.config, model.embed_tokens.weight
    shape = config.n_heads, config.n_kv_heads, config.head_dim, config.windows
    tune(*shape, weight.dtype, weight.device, capacity, n_slots, widths, log)


class SlotPool:
    """The slots of one engine. The pool gives the engine's runner their cache and state.

    Args:
        prefill_chunk: query tokens of a prefill pass; None is 2048 on a GPU and 512 on a CPU.
        keep_prompts: whether a prompt reuses the keys and values of an earlier prompt with the same prefix.
        log: receives lines about allocations and recordings.

    Attributes:
        sequences: one a slot; None for a free slot.
    """

    def __init__(self, runner: Runner, prefill_chunk: int | None, keep_prompts: bool, log: Callable[[str], object]):
        self.runner, self.model, self.drafter, self.device = runner, runner.model, runner.drafter, runner.device
        self._log, self.prefill_chunk = log, prefill_chunk or prompt_rows(self.device.type)
        # Not if RoPE depends on the prompt's length, or if weights are gathered for each pass: changes would go unseen.
        length_dependent = self.model.config.rope.type in LENGTH_DEPENDENT
        self._keeps = keep_prompts and not length_dependent and self.model.weights_stay
        self._kept: KeptPrompts | None = None
        # Where steps are recorded: the last sampling of each kind, and for which values of `state.logprobs` its steps
        # are recorded.
        self._samplings: dict[SlotSampling, set[bool]] = {}
        self.sequences: list[ActiveSequence | None] = []
        self._row_counts: Sequence[int] = ()  # of the recorded prefill passes, ascending; may be empty
        self._prefilling: int | None = None  # the slot that is being prefilled
        self._prefill_passes: Iterator[None] = iter(())

    @property
    def decoding(self) -> list[ActiveSequence | None]:
        """Each slot's sequence that takes part in a step; None for free slots and the one that is being prefilled."""
        return [None if slot == self._prefilling else one for slot, one in enumerate(self.sequences)]

    def start(self, batch: int, longest: int, samplings: Sequence[SamplingParams], stayed: bool) -> None:
        """Prepare `batch` empty slots for sequences of at most `longest` tokens. Where steps are recorded, those for
        these parameters are recorded now. stayed: whether no other engine has used the drafter since this one did."""
        runner, kinds = self.runner, list[tuple[SlotSampling, bool]]()
        recorded = samplings if runner.graphs.recording else ()  # seed and length make no kind of sampling
        for params in dict.fromkeys(replace(one, seed=0, max_new_tokens=1 << 60) for one in recorded):
            sampling, logprobs = SlotSampling([params] * batch, self.device), params.logprobs is not None
            if all(sampling.kind != known.kind or logprobs != asked for known, asked in kinds):
                kinds.append((sampling, logprobs))
        self.sequences, self._prefilling = [None] * batch, None
        capacity = longest + (runner.lag + 1) * (self.drafter.max_depth + 1) + runner.policy.widths[-1]
        if runner.graphs.recording:
            capacity += min(SPARE_ROWS, self.prefill_chunk) - 1
        with on_device(self.device):
            if runner.cache is None or runner.cache.batch != batch or runner.cache.capacity < capacity:
                self._allocate(batch, capacity, min(len(kinds), KINDS_OF_SAMPLING))
            elif not stayed and self.drafter.allocations(batch, capacity):
                # Another engine has made it replace its buffers, which recorded work would keep alive.
                runner.graphs.clear()
                self._samplings.clear()
            for slot in range(batch):  # a call that was left early may have left requests there
                self._empty(slot)
            runner.state.active.zero_()
            # Drafters read the texts of free slots, too, but after a rehearsal, or for another engine, they no longer
            # have what belongs to the last one there.
            runner.state.positions.zero_()
            runner.state.matchers = ()
            if runner.graphs.recording:
                self._record(kinds)
        runner.start()

    def _allocate(self, batch: int, capacity: int, n_kinds: int) -> None:
        """Replace cache and state. n_kinds: kinds of sampling that will be recorded."""
        runner, widths = self.runner, self.runner.policy.widths
        runner.graphs.clear()
        self._samplings.clear()
        self._row_counts = ()
        self.drafter.release()
        runner.cache = self._kept = None  # freed before the new one is allocated
        chunk = min(self.prefill_chunk, capacity)
        if runner.graphs.recording:
            self._row_counts = sorted({count for count in (*RECORDED_ROWS, self.prefill_chunk) if count <= chunk})
        parts = memory_parts(self.model, self.drafter, batch, capacity, widths, chunk, self._row_counts, n_kinds)
        check_memory(parts, batch, capacity, self.model)
        self._log(f"memory for {batch} x {capacity} positions: {text_of(parts)}")
        tune_for(self.model, capacity, batch, widths, self._log)
        # A prompt's short passes too, each over one slot: a shape's first launch fixes its tuning for the process.
        tune_for(self.model, capacity, 1, [min(MOST_ROWS, chunk)], self._log)
        cache = self.model.new_cache(batch, capacity)
        zeros_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        runner.state = SlotState(
            roots=zeros_B,
            positions=zeros_B.clone(),
            active=zeros_B.bool(),
            history=History(batch, capacity, self.device),
            sampling=SlotSampling([GREEDY] * batch, self.device),
            committed=[[] for _ in range(batch)],
            graphs=runner.graphs,
            ranks=self.model.ranks,
        )
        if self._keeps and capacity > self.prefill_chunk:
            self._kept = KeptPrompts(self.model, cache, self.prefill_chunk, widths[-1])
        runner.cache = cache  # set last, so that it stays None if an allocation fails

    def _record(self, kinds: Sequence[tuple[SlotSampling, bool]]) -> None:
        """Record the prefill passes, and the steps of these kinds of sampling with or without log-probabilities, unless
        they are recorded already. All slots must be free.

        If the target's passes do what cannot be recorded, nothing is recorded from now on; ValueError if recording is
        wanted."""
        runner, begin, before = self.runner, time.perf_counter(), len(self.runner.graphs)
        try:
            if not self._samplings:
                self._record_prompts()
            for given, logprobs in kinds:
                runner.state.sampling = sampling = self._recorded_sampling(given)
                runner.state.logprobs = logprobs
                if logprobs not in self._samplings[sampling]:
                    self._samplings[sampling].add(logprobs)
                    assert runner.cache is not None
                    runner.rehearse((0, runner.cache.capacity))
        except RuntimeError as error:
            if not self.model.may_fail_to_record or isinstance(error, torch.OutOfMemoryError):
                raise
            if runner.must_record:
                raise ValueError(f"graphs=True: this target's passes cannot be recorded: {error}") from error
            self._log(f"nothing is recorded, which makes steps slower: {error}")
            runner.graphs.stop()
            self._samplings.clear()
            self._row_counts = ()
            return
        if count := len(runner.graphs) - before:
            self._log(f"recorded {count} pieces of work in {time.perf_counter() - begin:.1f} s")

    def _record_prompts(self) -> None:
        """Record the prefill passes of each slot, if attention can be recorded there."""
        runner = self.runner
        assert runner.cache is not None
        try:
            for slot, n_rows in product(range(len(self.sequences)), self._row_counts):
                self.drafter.on_start(slot, runner.rehearsed, runner.cache)
                with runner.graphs.rehearsal(), torch.no_grad():
                    self._forward(slot, [], n_rows, self._needs())
        except RuntimeError as error:
            if self.model.ranks.size > 1:  # the others would record on
                raise
            self._log(f"prefill passes are not recorded: {error}")
            self._row_counts = ()

    def admit(self, waiting: deque[ActiveSequence], one_pass: bool = False) -> None:
        """Prefill waiting sequences into free slots. While sequences are decoded, or with `one_pass`, run only one
        prefill pass."""
        one_pass = one_pass or any(self.decoding)
        while self._prefilling is not None or (waiting and None in self.sequences):
            if self._prefilling is None:
                self._prefill_passes = self._prefill(waiting.popleft())
            next(self._prefill_passes, None)
            self.runner.note_prompt()
            if one_pass:
                break

    def _prefill(self, sequence: ActiveSequence) -> Iterator[None]:
        """Prefill a free slot with a prompt's tokens but the last, which becomes the root. The slot then takes part in
        steps. Yields between two passes, where the caller may take steps without this slot."""
        begin, stats, prompt = time.perf_counter(), sequence.result.stats, sequence.request.prompt
        slot, end, length = self._start_slot(sequence), stats.cached_tokens, len(prompt) - 1
        sequence.began = begin
        needs = self._needs()  # read once, because steps between two passes change it
        while end < length:
            n_rows = self._rows_of_pass(length - end)
            start, end = end, min(end + n_rows, length)
            with on_device(self.device), torch.no_grad():
                self._prefill_pass(slot, prompt, start, end, n_rows, needs)
            if self._kept is not None and length > self.prefill_chunk:
                self._kept.extend(slot, prompt[:end])
            if end < length:
                stats.prefill_seconds += time.perf_counter() - begin
                yield
                begin = time.perf_counter()
        stats.prefill_seconds += time.perf_counter() - begin
        self._prefilling = None
        self._assign()

    def _start_slot(self, sequence: ActiveSequence) -> int:
        """Start a sequence in a free slot, with the rows that it reuses of an earlier prompt. Returns the slot."""
        cache, state, request = self.runner.cache, self.runner.state, sequence.request
        assert cache is not None
        free = [slot for slot, other in enumerate(self.sequences) if other is None]
        slot = free[0] if self._kept is None else self._kept.choose_slot(request.prompt, free)
        self.sequences[slot], self._prefilling = sequence, slot
        with on_device(self.device), torch.no_grad():
            cache.reset([slot], prompt_lengths=[len(request.prompt)])
            state.history.start(slot, request.prompt)
            state.roots[slot].fill_(request.prompt[-1])
            state.positions[slot].fill_(len(request.prompt) - 1)
            self.runner.policy.start_request()
            self.drafter.on_start(slot, request, cache)
            if self._kept is not None and (count := self._kept.begin(slot, request.prompt)):
                sequence.result.stats.cached_tokens = count
                self.drafter.on_prefill(slot, request.prompt, 0, count, TargetOutput())
        return slot

    def _rows_of_pass(self, left: int) -> int:
        """Rows of the next prefill pass of a prompt with `left` tokens to go; more than these only if recorded."""
        if not self._row_counts:
            return min(self.prefill_chunk, left)
        fitting = next((count for count in self._row_counts if count >= left), None)
        if fitting is not None and fitting - left < SPARE_ROWS:
            return fitting
        return max(count for count in self._row_counts if count <= left)

    def _prefill_pass(
        self, slot: int, prompt: Sequence[int], start: int, end: int, n_rows: int, needs: frozenset[str]
    ) -> None:
        """One pass of `n_rows` rows over the tokens prompt[start:end] of this slot."""
        in_c = prompt_in_c(end - start, self.model.embed_tokens.weight.dtype)
        threads = library.decoding if in_c else library.free_processors
        with threads(self.runner.on_cpu):
            output = self._forward(slot, prompt[start:end], n_rows, needs)
            self.drafter.on_prefill(slot, prompt, start, end, output.first(end - start))

    def _needs(self) -> frozenset[str]:
        """The output fields that the drafter needs of a prefill. If it needs none, the pass stops after the last
        layer's keys and values."""
        return self.drafter.needs or frozenset({"last_kv"})

    def _forward(self, slot: int, tokens: Sequence[int], n_rows: int, needs: frozenset[str]) -> TargetOutput:
        """Run a target pass of `n_rows` rows over the next tokens of this slot's prompt, and commit them."""
        runner, count = self.runner, len(tokens)
        assert runner.cache is not None
        tokens_1T = integers([*tokens, *[0] * (n_rows - count)], self.device)[None]
        cache = runner.cache.slot(slot)

        def read(tokens_1T: Tensor, count_1: Tensor) -> TargetOutput:
            output = self.model(Pass(tokens_1T, cache, commits_B=count_1, needs=needs, queries_at_B=count_1 - 1))
            cache.commit(None, count_1)
            # Recorded work keeps its outputs in memory, so unused ones are omitted.
            return output if self.drafter.needs or not self._row_counts else TargetOutput()

        inputs = tokens_1T, integers([count], self.device)
        if not self._row_counts:
            return read(*inputs)
        return runner.graphs.run(("read", slot, needs), (self.model, runner.cache), read, *inputs)

    def _assign(self) -> None:
        """Update the state to the sequences that now take part in steps."""
        state, recording, decoding = self.runner.state, self.runner.graphs.recording, self.decoding
        given = [sequence and sequence.request.sampling for sequence in decoding]
        with on_device(self.device):
            # Where steps are recorded, a free slot has the parameters of another one, which saves a kind of sampling.
            idle = next(one for one in given if one) if recording else GREEDY
            sampling = SlotSampling([one or idle for one in given], self.device)
            state.sampling = self._recorded_sampling(sampling) if recording else sampling
            fill_from_host(state.active, torch.tensor([one is not None for one in given]))
        self._note_requests()

    def _note_requests(self) -> None:
        """Update what the state has of each slot's request on the host."""
        state, decoding = self.runner.state, self.decoding
        state.committed = [one.committed if one else [] for one in decoding]
        state.matchers = [one and one.matcher for one in decoding]
        if not any(state.matchers):
            state.matchers = ()
        state.logprobs = any(one is not None and one.result.logprobs is not None for one in decoding)

    def _recorded_sampling(self, sampling: SlotSampling) -> SlotSampling:
        """The sampling that recorded steps of this kind read, updated to these parameters, else `sampling` itself."""
        found = next((kept for kept in self._samplings if kept.follow(sampling)), sampling)
        if found is sampling and len(self._samplings) == KINDS_OF_SAMPLING:
            oldest = next(iter(self._samplings))
            del self._samplings[oldest]
            self.runner.graphs.forget(oldest)
        self._samplings[found] = self._samplings.pop(found, set())
        return found

    def free(self, slot: int) -> None:
        """Free this slot."""
        state = self.runner.state
        self.sequences[slot] = None
        self._prefilling = None if self._prefilling == slot else self._prefilling
        with on_device(self.device):
            state.active[slot].fill_(False)
            self._empty(slot)
        self._note_requests()

    def _empty(self, slot: int) -> None:
        """Discard the slot's rows, except those that are kept of its prompt."""
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
    prompt_rows: Sequence[int] = (),
    n_kinds: int = 1,
) -> dict[str, int]:
    """The memory of decoding in bytes, by name: the target's (`estimate_memory`), the choice rule's and the drafter's.

    prompt_rows: row counts of the recorded prefill passes; empty if nothing is recorded.
    """
    recorded = drafter.needs | drafter.learns_from if prompt_rows else None
    parts = estimate_memory(model, batch, capacity, widths, chunk, recorded, prompt_rows, n_kinds)
    parts["passes"] += choice_bytes(batch, max(widths), model.config.vocab_size, model.embed_tokens.weight.device)
    drafted = sizes(drafter.allocations(batch, capacity))
    return parts | {name if name.startswith("draft") else f"draft {name}": count for name, count in drafted.items()}
