"""Real decoding while training: held-out prompts with the current weights, by the runtime's own engine and drafter.

Loss and hit rates mislead about what a draft is worth; what it is for is tokens/step. These numbers are a function of
the weights alone: everything proposed is verified, no drafter decides anything by the clock, and the text, which
depends on target, prompt and seed, is the same each time. TokenSwift's n-grams are left out, since they come from the
text and are not learned. Training is not affected: the weights that decode are a copy.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.drafters.longspec import WIDTHS
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder import Decoder
from longdraft.models.draft_folder import Draft
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.passes import Pass
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.batches import Rows
from longdraft.train.config import Config, to_dict
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.methods.build import frozen_draft
from longdraft.train.ranks import Ranks

# The fields of `decoding` that tokens/step depends on: numbers measured with other values are not comparable.
MEASURED_BY = ("prompts", "contexts", "new_tokens", "temperatures")


# A run of tokens in a row: (row, start, stop).
Span = tuple[int, int, int]


class Task(NamedTuple):
    """One prompt to decode; `context` is its length."""

    context: int
    temperature: float
    seed: int
    prompt: list[int]


class Measured(NamedTuple):
    """The result of all prompts of one length at one temperature. acceptance[d]: the share of steps that accepted at
    least d + 1 nodes of a path."""

    context: int
    temperature: float
    tokens_per_step: float
    acceptance: list[float]

    @property
    def name(self) -> str:
        return f"ctx{self.context}.T{self.temperature:g}"


class Evaluator:
    """Decoding in the course of a run: when it is due, what it may cost, and which weights were the best.

    Every rank has one, and all ranks call its methods together. The prompts are divided among them, and all get the
    same results.

    Args:
        target: the run's. rows: its held-out rows.
        clock: returns seconds, of which only differences count; the first rank's clock decides.

    Raises ValueError where the held-out documents lack the prompts that `decoding` asks for, or the target the
    positions.
    """

    def __init__(
        self, config: Config, target: Target, rows: Rows, ranks: Ranks, clock: Callable[[], float] = time.monotonic
    ):
        self.config, self.target, self.ranks, self.clock = config, target, ranks, clock
        section, limit = config.decoding, target.model.config.max_positions
        if max(section.contexts) + section.new_tokens > limit:
            raise ValueError(
                f"decoding.contexts: {max(section.contexts)}, with decoding.new_tokens = {section.new_tokens} beyond "
                f"the target's {limit} positions; give lengths of at most {limit - section.new_tokens}"
            )
        prompts = held_out_prompts(rows, section.contexts, section.prompts, config.data.path)
        self.tasks = [
            Task(context, temperature, (config.train.seed + i) % 2**63, prompt)
            for context in section.contexts
            for temperature in section.temperatures
            for i, prompt in enumerate(prompts[context])
        ]
        self.best: tuple[float, int] | None = None  # the best tokens/step, and the step it was measured after
        self.last_step = 0  # the step after which it last decoded
        self._last_seconds, self._spent = 0.0, 0.0
        self._begun = clock()

    def begin(self, saved: Mapping[str, Any] | None, resumed: bool) -> None:
        """Called before the first step of a new run, or of one that goes on from what `saved()` returned (None where it
        did not decode then).

        The best weights so far are those in the run's folder, unless they were measured under other settings: then
        later results cannot be compared with theirs, and the next ones take their place.
        """
        if saved is not None:
            self.last_step, self._last_seconds = saved["last_step"], saved["last_seconds"]
            self._spent, self._begun = saved["spent"], self.clock() - saved["elapsed"]
        run_dir, ranks = self.config.train.run_dir, self.ranks
        if not resumed:  # what lies there is from a run that ended before its first checkpoint
            ranks.from_first(lambda: checkpoint.forget_best(run_dir))
        elif found := ranks.from_first(lambda: checkpoint.best(run_dir)):
            then, now = checkpoint.saved_config(run_dir, found[1]).decoding, self.config.decoding
            if all(getattr(then, name) == getattr(now, name) for name in MEASURED_BY):
                self.best = found[1]["score"], found[1]["step"]

    def saved(self) -> dict[str, float]:
        """The state that `begin` takes in a run that goes on from here."""
        times = {"last_seconds": self._last_seconds, "spent": self._spent, "elapsed": self.clock() - self._begun}
        return {"last_step": self.last_step} | times

    def after_step(
        self, engine: DraftEngine, step: int, heldout: Mapping[str, Any], stop: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """Decode if it is due after `step` steps, and keep the weights if they are the best so far.

        Decoding that is due but would take more than its share of the time is put off to the first step that can afford
        it; after the last step it is always done. A rank with something in `stop` ends its part, and then nothing is
        measured.

        Args:
            heldout: this step's validation if there was one, to be kept with the weights (validation.py).

        Returns: what is logged; None if nothing was due, or it was stopped.
        """
        every, last = self.config.decoding.every, step == self.config.train.n_steps
        if not last and step // every == self.last_step // every:
            return None
        if not last and self._is_too_much():
            if step % every:
                return None  # it was logged when it was due
            self.ranks.log(
                f"Decoding after step {step} is put off: {self._spent + self._last_seconds:.0f} s in all would be "
                f"more than decoding.share = {self.config.decoding.share:g} of the time so far"
            )
            return {"decode_put_off": True}
        begin, config = self.clock(), self.config
        weights = engine.weights()
        drafter = open_drafter(config.draft.method, self.target, frozen_draft(config.draft, self.target, weights))
        measured = decode(self.target, drafter, self.tasks, config.decoding.new_tokens, self.ranks, stop)
        if measured is not None:
            score = mean_tokens_per_step(measured)
            if self.best is None or score > self.best[0]:
                extra = {"heldout": heldout, "decoding": as_record(measured)}
                extra["target_weights"] = self.target.fingerprint.get("weights")
                state = {"step": step, "score": score, "config": to_dict(config), "extra": extra}
                checkpoint.save_best(self.ranks, config.train.run_dir, weights, state)
                self.best = score, step
        self._last_seconds = self.clock() - begin
        self._spent += self._last_seconds
        if measured is None or self.best is None:
            return None
        self.last_step = step
        if last and config.draft.method == "longspec":
            shares = ",".join(f"{share:.2f}" for share in levels_reached(measured))
            self.ranks.log(f"Serving reaches the levels this often: train.level_weights=[{shares}] draws them so")
        return as_record(measured) | {"decode_best_step": self.best[1], "decode_s": self._last_seconds}

    def _is_too_much(self) -> bool:
        """Whether another decoding would exceed its share of the time; all ranks get the first one's answer."""
        share = self.config.decoding.share
        too_much = self._spent + self._last_seconds > share * (self.clock() - self._begun)
        return bool(self.ranks.sum([float(too_much and self.ranks.first)])[0])


def open_drafter(method: str, target: Target, draft: Draft) -> Drafter:
    """The method's drafter, with the tree of an exported draft that has no measured rates."""
    options: dict[str, Any] = {}
    if isinstance(draft, LongSpec):
        options = {"widths": WIDTHS[: draft.config.noise], "extended": max(WIDTHS)}  # on a CPU as on a GPU
    elif method == "tokenswift":
        options = {"draft_pass": "never", "ngrams": 0}
    return build_drafter(method, target, draft, options)


def decode(
    target: Target,
    drafter: Drafter,
    tasks: Sequence[Task],
    new_tokens: int,
    ranks: Ranks,
    stop: Sequence[int] = (),
) -> list[Measured] | None:
    """Decode the tasks, divided among the ranks, one sequence at a time and past end tokens, as `longdraft bench` does.
    Where the target's weights are sharded (train/sharding.py), every pass is one of all ranks.

    Args:
        stop: once something is in it, this rank ends.

    Returns: results by context and temperature, in the tasks' order; None if a rank was stopped.
    """
    own_tasks = tasks[ranks.rank :: ranks.world_size]
    params = [
        SamplingParams(temperature=task.temperature, seed=task.seed, max_new_tokens=new_tokens, ignore_eos=True)
        for task in own_tasks
    ]
    settings = list(dict.fromkeys((task.context, task.temperature) for task in tasks))
    sums = torch.zeros(len(settings), 2 + drafter.max_depth, dtype=torch.float64)
    engine = Engine(target, drafter, nodes=None, slots=1)
    with nullcontext() if target.model.weights_stay else _one_pass_of_all(target.model, ranks):
        for piece in engine.stream([task.prompt for task in own_tasks], params):
            if stop:
                break
            if piece.generation is not None:
                task, stats = own_tasks[piece.index], piece.generation.stats
                counts = [len(piece.generation.tokens), stats.steps, *stats.accepted_at_depth]
                sums[settings.index((task.context, task.temperature)), : len(counts)] += torch.tensor(counts)
    stopped, *totals = ranks.sum([float(bool(stop)), *sums.flatten().tolist()])
    if stopped:
        return None
    rows = torch.tensor(totals).view_as(sums).tolist()
    return [
        Measured(*setting, tokens / steps, [count / steps for count in accepted])
        for setting, (tokens, steps, *accepted) in zip(settings, rows, strict=True)
    ]


@contextmanager
def _one_pass_of_all(model: Decoder, ranks: Ranks) -> Iterator[None]:
    """For a sharded target, where a pass of one rank needs a pass of all. Before each, the ranks agree that one is to
    come; a rank that has none left makes placeholder passes until no rank has any."""

    def announce(*_: object) -> None:
        ranks.sum([1.0])

    hook = model.register_forward_pre_hook(announce)
    try:
        yield
    finally:
        hook.remove()
    token_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.embed_tokens.weight.device)
    while ranks.sum([0.0])[0]:
        model(Pass(token_11, needs={"last_kv"}))


def mean_tokens_per_step(measured: Sequence[Measured]) -> float:
    """The score by which the best weights are chosen: every length and temperature counts alike."""
    return sum(one.tokens_per_step for one in measured) / len(measured)


def levels_reached(measured: Sequence[Measured]) -> list[float]:
    """The share of steps that reached each level of the tree, that is, accepted its parent."""
    rates = zip(*(one.acceptance for one in measured), strict=True)
    return [1.0, *(sum(of_depth) / len(measured) for of_depth in rates)][: len(measured[0].acceptance)]


def as_record(measured: Sequence[Measured]) -> dict[str, float]:
    """decode_tokens_per_step: the mean; decode_tokens_per_step/ctx512.T0; decode_acceptance/ctx512.T0.depth1, ..."""
    record = {"decode_tokens_per_step": mean_tokens_per_step(measured)}
    record |= {f"decode_tokens_per_step/{one.name}": one.tokens_per_step for one in measured}
    for one in measured:
        record |= {f"decode_acceptance/{one.name}.depth{d}": rate for d, rate in enumerate(one.acceptance, start=1)}
    return record


def held_out_prompts(rows: Rows, contexts: Sequence[int], n: int, path: str) -> dict[int, list[list[int]]]:
    """For each length, n prompts: the beginnings of held-out documents, evenly spread over those that are long enough.
    Where these are too few, later stretches of the same length are taken too. A document may lie in several rows.

    Args:
        path: of the data, for messages.

    Raises ValueError where no document is that long, or there are fewer than n such stretches.
    """
    documents = [(spans, sum(stop - start for _, start, stop in spans)) for spans in _documents(rows)]
    longest, prompts = max(length for _, length in documents), {}
    for context in contexts:
        if context > longest:
            raise ValueError(
                f"decoding.contexts: {context} tokens, but the longest held-out document in {path} has {longest}; give "
                f"at most {longest}, or prepare longer documents"
            )
        firsts = [(spans, 0) for spans, length in documents if length >= context]
        others = [(spans, i * context) for spans, length in documents for i in range(1, length // context)]
        found = len(firsts) + len(others)
        if found < n:
            raise ValueError(
                f"decoding.prompts: {n}, but the held-out documents in {path} have {found} stretches of {context} "
                f"tokens; set decoding.prompts={found}, or prepare more text"
            )
        chosen = []
        for items in (firsts, others):
            n_taken = min(n - len(chosen), len(items))
            chosen += [items[i * len(items) // n_taken] for i in range(n_taken)]
        prompts[context] = [_tokens(rows, spans, start, context) for spans, start in chosen]
    return prompts


def _documents(rows: Rows) -> list[list[Span]]:
    """Each document's runs of tokens, in order. Where one is missing, each of the others counts as a document."""
    pieces: dict[str, dict[int, Span]] = {}
    for i in range(len(rows)):
        for (name, number), (start, stop) in zip(rows.pieces(i), pairwise(rows[i]["borders"].tolist()), strict=True):
            pieces.setdefault(name, {})[number] = i, start, stop
    documents: list[list[Span]] = []
    for by_number in pieces.values():
        numbers = sorted(by_number)
        spans = [by_number[number] for number in numbers]
        documents += [spans] if numbers == list(range(len(numbers))) else [[span] for span in spans]
    return documents


def _tokens(rows: Rows, spans: Sequence[Span], start: int, n: int) -> list[int]:
    """Tokens start to start + n of a document."""
    return np.concatenate([rows[row]["tokens"][first:last] for row, first, last in spans])[start : start + n].tolist()
