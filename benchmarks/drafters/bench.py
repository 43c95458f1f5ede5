"""What `longdraft bench` measures, in order: exactness first, then everything else in the dtype that was asked for.

No speed is reported without the exactness of the same drafter in the same record. Not here: how exactness is proved
(proof.py), how questions are asked (turns.py), what is computed from the answers (figures.py), the single measurements
(measure.py), the prompts (suites.py, questions.py), the report (drafters_report.py), or benchmarks of kernels (run.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.answering import Answerer, EngineAnswers, TransformersAnswers, Turns
from longdraft.benchmarks.drafters.exactness import PROMPTS, Builder, fp32_layer_by_layer, proof_steps, prove
from longdraft.benchmarks.drafters.measurements import (
    choice_logits,
    decode,
    decode_cost,
    flips,
    forget_peak_memory,
    peak_memory_mib,
    prefill_cost,
    width_curve,
    width_curve_cost,
)
from longdraft.benchmarks.drafters.metrics import rounded, run_figures, totals
from longdraft.benchmarks.drafters.progress import UNWATCHED, Phase, Watch
from longdraft.benchmarks.drafters.prompts import Asked
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.rejection_sampling import first_places, shares
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

NOISE_TEMPERATURES, NOISE_PROMPTS, NOISE_TOKENS = (0.7, 1.0), 3, 64
FLIP_TOKENS = 64
# Time per token of the reference text, by form of the proof, relative to plain decoding in bf16 (measured on SmolLM2).
SLOW_REFERENCE = {"fp32": 2.0, "layerwise": 6.0, "serving": 1.0, "off": 1.0}
REFERENCE, CURVE, FLIPS, PEER = "the target's own text", "cost of a pass by its rows", "flips", "transformers"


@dataclass(frozen=True)
class BenchSettings:
    """What is measured and how.

    Attributes:
        dtype: for the speeds. proof: the form of the proof of exactness (proof.py).
        temperatures: measured one after the other; 0 is greedy.
        sampling: further keywords for the answers' SamplingParams. ignore_eos: whether answers continue after an end
            token.
        nodes, noise_in_ranking: passed to the Engine.
        passes: also measure the cost of a pass by its width, at `contexts` (None: the first prompt's length), and how
            often passes of different widths choose different tokens.
        noise: also measure acceptance with and without the noise in the ranking, and what classical rejection would
            accept.
    """

    new_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16
    proof: str = "fp32"
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    nodes: int | str | None = "auto"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    passes: bool = True
    contexts: tuple[int, ...] | None = None
    noise: bool = False
    noise_in_ranking: bool = True

    def greedy(self, new_tokens: int | None = None) -> SamplingParams:
        """Greedy decoding without filters or penalties, for the proof and the single measurements."""
        return SamplingParams(seed=self.seed, max_new_tokens=new_tokens or self.new_tokens, ignore_eos=True)

    def params(self, temperature: float, new_tokens: int | None = None) -> SamplingParams:
        options = {**self.sampling, "temperature": temperature, "ignore_eos": self.ignore_eos}
        return SamplingParams(seed=self.seed, max_new_tokens=new_tokens or self.new_tokens, **options)


def bench(
    target: Target,
    builders: Mapping[str, Builder],
    asked: Sequence[Asked],
    settings: BenchSettings,
    transformers_model=None,
    watch: Watch = UNWATCHED,
    record: Record | None = None,
) -> dict:
    """Measure everything and return it as plain dicts.

    Args:
        target: loaded in fp32 for a proof of the form "fp32", and then cast to `settings.dtype`; otherwise loaded in
            that dtype. Drafters are built again after the cast.
        builders: by the name under which the figures are reported; plain decoding is always measured.
        asked: questions whose prompts fit the target's positions.
        transformers_model: the same checkpoint as a transformers model in `settings.dtype`, or None; it also answers
            the greedy questions.
        watch: told which phase is running and how far it is.
        record: receives the proof and the answers; what it already holds is not measured again. None: kept in memory.

    Raises:
        ValueError: a prompt that does not fit the target's positions.
        NotExact: a drafter whose tokens are not plain decoding's.
    """
    _check_lengths(target, asked, settings)
    run = _Bench(target, builders, asked, settings, transformers_model, watch, record or Record({}))
    exactness, speeds = run.exactness(), run.speeds()
    watch.plan([phase for part in (*exactness, *speeds) for phase in next(part)])
    with fp32_layer_by_layer(target.model) if settings.proof == "layerwise" else nullcontext():
        for part in exactness:
            next(part, None)
    target.model.to(settings.dtype)
    forget_peak_memory(target)
    for part in speeds:
        next(part, None)
    return run.result()


def _check_lengths(target: Target, asked: Sequence[Asked], settings: BenchSettings) -> None:
    positions = target.model.config.max_positions
    for number, one in enumerate(asked, start=1):
        if one.tokens + settings.new_tokens > positions:
            raise ValueError(
                f"prompt {number} has {one.tokens} tokens: with {settings.new_tokens} new ones it does not fit the "
                f"target's {positions} positions; ask for fewer"
            )
    for context in settings.contexts or ():
        if not 1 <= context <= positions:
            raise ValueError(f"contexts: {context} must lie in 1..{positions}, the target's positions")


# A part of a bench is a generator: the first `next` gives its phases, in order; the second begins each and does its
# work.
Part = Iterator[list[Phase]]


@dataclass
class _Bench:
    """One call of `bench`, with its arguments: the parts it consists of, and what they have found so far.

    Attributes:
        text: the first prompt and the target's own greedy continuation. reference: fp32 logits of the continuation.
        widest: rows of the widest pass that any drafter asks for.
    """

    target: Target
    builders: Mapping[str, Builder]
    asked: Sequence[Asked]
    settings: BenchSettings
    transformers_model: Any
    watch: Watch
    record: Record
    text: list[int] = field(default_factory=list)
    reference: Tensor | None = None
    widest: int = 2
    curves: dict[str, dict[str, float]] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)
    runs: list[dict] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def exactness(self) -> list[Part]:
        """The parts that run in the precision of the proof, before the target is cast."""
        return [self._proof(), *([self._reference()] if self.settings.passes else [])]

    def speeds(self) -> list[Part]:
        """The parts that run in the dtype that was asked for."""
        settings, parts = self.settings, list[Part]()
        if settings.passes:
            parts += [self._width_curve(context) for context in settings.contexts or (self.asked[0].tokens,)]
        parts += [self._answers(temperature) for temperature in settings.temperatures]
        if settings.noise:
            self.extra["noise"] = {}
            parts += [self._noise(*each) for each in product(self.builders, NOISE_TEMPERATURES, (True, False))]
        return parts + ([self._flips()] if settings.passes else [])

    def result(self) -> dict:
        lengths = [one.tokens for one in self.asked]
        used = {"prompts": len(self.asked), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
        names = ("new_tokens", "seed", "nodes", "sampling", "ignore_eos", "noise_in_ranking")
        used |= {name: getattr(self.settings, name) for name in names}
        found = {**(self.record.proof or {}), "width_curves_ms": self.curves, **self.peer, "runs": self.runs}
        found |= {"left_out": self.record.left_out, **self.extra, "settings": used, **self.record.machine}
        return found | {"peak_memory_mib": peak_memory_mib(self.target)}

    def _prompts(self, count: int) -> list[list[int]]:
        return [one.question.prompt(self.target) for one in self.asked[:count]]

    def _proof(self) -> Part:
        form, dtype, params = self.settings.proof, self.settings.dtype, self.settings.greedy()
        prompts = self._prompts(PROMPTS)
        steps = proof_steps(self.builders, prompts, params, form, dtype)
        yield [phase for of_drafter in steps.values() for phase, _ in of_drafter]
        if self.record.proof is None:
            self.record.set_proof(prove(self.target, self.builders, prompts, params, form, dtype, self.watch))

    def _reference(self) -> Part:
        """Decode the target's own greedy text, on which dtypes and widths are compared."""
        compared = self.settings.proof in ("fp32", "layerwise")
        cost = decode_cost(self.asked[:1], FLIP_TOKENS)
        cost += prefill_cost(self.asked[0].tokens) + FLIP_TOKENS if compared else 0
        yield [Phase(REFERENCE, cost, SLOW_REFERENCE[self.settings.proof])]
        self.watch.begin(REFERENCE)
        (prompt,), params = self._prompts(1), self.settings.greedy(FLIP_TOKENS)
        self.text = prompt + decode(Engine(self.target), [prompt], params, self.watch)[0].tokens
        if compared:
            self.reference = choice_logits(self.target, self.text, len(prompt) - 1, 1, self.watch)

    def _width_curve(self, context: int) -> Part:
        phase = Phase(f"{CURVE}, behind {context} tokens", width_curve_cost(context))
        yield [phase]
        self.watch.begin(phase.name)
        curve = width_curve(self.target, context, watch=self.watch)
        self.curves[str(context)] = {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}

    def _answers(self, temperature: float) -> Part:
        """Ask every question at this temperature, the drafters in turns."""
        names = ["plain", *self.builders]
        if self.transformers_model is not None and temperature == 0:
            names.append(PEER)
        turns = Turns(self.asked, self.settings.params(temperature), names)
        yield turns.phases()
        # New drafters at each temperature: none may have learned from an earlier answer to the same question.
        turns.ask(self.target, {name: self._answerer(name) for name in names}, self.record, self.watch)
        figures = run_figures({name: self.record.of(name, temperature) for name in names})
        if (theirs := figures.pop(PEER, None)) is not None:
            speed = theirs["tokens_per_second"]
            self.peer = {
                "transformers_tokens_per_second": speed,
                "plain_over_transformers": round(figures["plain"]["tokens_per_second"] / speed, 3),
                "tokens_equal_to_transformers": theirs["same_tokens"],
            }
        self.runs.append({"temperature": temperature, "drafters": figures})

    def _answerer(self, name: str) -> Answerer:
        """Whoever answers under this name. Every prompt is prefilled from its first token, because that is timed."""
        if name == PEER:
            return TransformersAnswers(self.transformers_model, self.target.eos_token_ids)
        if name == "plain":
            return EngineAnswers(Engine(self.target, keep_prompts=False))
        settings, drafter = self.settings, self.builders[name](self.target)
        options = {"nodes": settings.nodes, "noise_in_ranking": settings.noise_in_ranking}
        engine = Engine(self.target, drafter, keep_prompts=False, **options)
        self.widest = max(self.widest, 1 + engine.drafter.max_nodes)
        return EngineAnswers(engine)

    def _noise(self, name: str, temperature: float, noisy: bool) -> Part:
        """Tokens a step and acceptance with the noise in the ranking or without it, every proposed node verified; with
        the noise also what classical rejection would accept at the first place (classical.py)."""
        with_or_without, cost = "with" if noisy else "without", decode_cost(self.asked[:NOISE_PROMPTS], NOISE_TOKENS)
        phase = Phase(f"{name} at T {temperature}, {with_or_without} the noise", 2 * cost if noisy else cost)
        yield [phase]
        self.watch.begin(phase.name)
        prompts, params = self._prompts(NOISE_PROMPTS), self.settings.params(temperature, NOISE_TOKENS)
        build = self.builders[name]
        answerer = EngineAnswers(Engine(self.target, build(self.target), nodes=None, noise_in_ranking=noisy))
        found = totals([answerer.answer(prompt, params, self.watch) for prompt in prompts])
        entry = self.extra["noise"].setdefault(name, {}).setdefault(str(temperature), {})
        entry[with_or_without] = rounded({key: found[key] for key in ("tokens_per_step", "acceptance")})
        if noisy:
            watched = Engine(self.target, build(self.target), nodes=None, graphs=False)
            entry["first_place"] = rounded(shares(first_places(watched, prompts, params, self.watch)))

    def _flips(self) -> Part:
        yield [Phase(FLIPS, 2 * prefill_cost(self.asked[0].tokens) + 2 * FLIP_TOKENS)]
        self.watch.begin(FLIPS)
        start = len(self._prompts(1)[0]) - 1
        self.extra["flips"] = asdict(flips(self.target, self.reference, self.text, start, self.widest, self.watch))
