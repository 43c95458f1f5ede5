"""What `longdraft bench` measures, in order: exactness, then everything else in the dtype asked for.

No speed is given out without the exactness of the same drafter in the same record. Not here: how exactness is shown
(proof.py), how answers are asked for (turns.py) and what figures are made of them (figures.py), the single measurements
(measure.py), the prompts (suites.py, questions.py), how figures are shown (drafters_report.py), or kernels' benchmarks
(run.py).
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from longdraft.benchmarks import proof
from longdraft.benchmarks.answers import Record
from longdraft.benchmarks.classical import first_places, shares
from longdraft.benchmarks.figures import rounded, run_figures, totals
from longdraft.benchmarks.measure import (
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
from longdraft.benchmarks.progress import UNWATCHED, Phase, Watch
from longdraft.benchmarks.proof import Builder, fp32_layer_by_layer, phase_name, prove
from longdraft.benchmarks.questions import Asked
from longdraft.benchmarks.turns import Answerer, EngineAnswers, TransformersAnswers, Turns
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

NOISE_TEMPERATURES, NOISE_PROMPTS, NOISE_TOKENS = (0.7, 1.0), 3, 64
FLIP_TOKENS = 64
# What a token takes beside one of plain decoding in bf16, as measured for SmolLM2, in the proof, where every node is
# verified, and of the reference.
SLOW = {"fp32": (3.0, 2.0), "layerwise": (9.0, 6.0), "serving": (2.0, 1.0), "off": (1.0, 1.0)}
REFERENCE, CURVE, FLIPS, PEER = "the target's own text", "cost of a pass by its rows", "flips", "transformers"


@dataclass(frozen=True)
class BenchSettings:
    """What is measured and how.

    Attributes:
        dtype: of the speeds. proof: the form of the proof of exactness (proof.py).
        temperatures: measured one after the other; 0 is greedy.
        sampling: further keywords of the answers' SamplingParams. ignore_eos: whether they go on behind their end.
        nodes, noise_in_ranking: as the Engine's.
        passes: also what a pass costs by its width, at `contexts` (None: the first prompt's length), and how often
            passes of different widths choose differently. noise: also acceptance with and without the noise in the
            ranking, and classical rejection's beside it.
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

    def curve_contexts(self, asked: Sequence[Asked]) -> tuple[int, ...]:
        return (self.contexts or (asked[0].tokens,)) if self.passes else ()

    def greedy(self, new_tokens: int | None = None) -> SamplingParams:
        """A request of the proof and of the single measurements: nothing but the most probable tokens."""
        return SamplingParams(seed=self.seed, max_new_tokens=new_tokens or self.new_tokens, ignore_eos=True)

    def params(self, temperature: float, new_tokens: int | None = None) -> SamplingParams:
        given = {**self.sampling, "temperature": temperature, "ignore_eos": self.ignore_eos}
        return SamplingParams(seed=self.seed, max_new_tokens=new_tokens or self.new_tokens, **given)


def bench(
    target: Target,
    builders: Mapping[str, Builder],
    asked: Sequence[Asked],
    settings: BenchSettings,
    transformers_model=None,
    watch: Watch = UNWATCHED,
    record: Record | None = None,
) -> dict:
    """Everything as plain dicts.

    Args:
        target: loaded in fp32 for a proof of the form "fp32", and then cast to `settings.dtype`; else loaded in that.
            Drafters are built anew.
        builders: by the name that the figures stand under; plain decoding is always measured.
        asked: whose prompts have room among the target's positions.
        transformers_model: the same checkpoint as a transformers model in `settings.dtype`, or None; it answers the
            greedy questions too.
        watch: told what is measured and how it goes on.
        record: takes proof and answers; what it has is not made again. None: in memory.

    Raises:
        ValueError: a prompt that does not fit the target's positions.
        NotExact: a drafter whose tokens are not plain decoding's.
    """
    record = record or Record(None, {})
    _check_lengths(target, asked, settings)
    watch.plan(plan(list(builders), asked, settings, transformers_model is not None))
    prompts = [one.question.prompt(target) for one in asked[: proof.PROMPTS]]
    start, reference, text = len(prompts[0]) - 1, None, list[int]()
    with fp32_layer_by_layer(target.model) if settings.proof == "layerwise" else nullcontext():
        if record.proof is None:
            form, dtype = settings.proof, settings.dtype
            record.set_proof(prove(target, builders, prompts, settings.greedy(), form, dtype, watch))
        if settings.passes:
            watch.begin(REFERENCE)
            # Dtypes and widths are compared on the target's own greedy text.
            text = prompts[0] + decode(Engine(target), prompts[:1], settings.greedy(FLIP_TOKENS), watch)[0].tokens
            if settings.proof in ("fp32", "layerwise"):
                reference = choice_logits(target, text, start, 1, watch)
    result: dict = dict(record.proof or {})
    target.model.to(settings.dtype)
    forget_peak_memory(target)
    curves = result["width_curves_ms"] = {}
    for context in settings.curve_contexts(asked):
        watch.begin(f"{CURVE}, behind {context} tokens")
        curve = width_curve(target, context, watch=watch)
        curves[str(context)] = {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}
    widest, runs = 2, []
    for temperature in settings.temperatures:
        # New drafters each time: what one has learned from an answer must not meet it again.
        # Every prompt is read whole, for how long that takes is measured.
        engines = {"plain": Engine(target, keep_prompts=False)}
        own = {"nodes": settings.nodes, "noise_in_ranking": settings.noise_in_ranking, "keep_prompts": False}
        engines |= {name: Engine(target, build(target), **own) for name, build in builders.items()}
        widest = max(widest, *(1 + engine.drafter.max_nodes for engine in engines.values()))
        answerers: dict[str, Answerer] = {name: EngineAnswers(engine) for name, engine in engines.items()}
        if transformers_model is not None and temperature == 0:
            answerers[PEER] = TransformersAnswers(transformers_model, target.eos_token_ids)
        Turns(asked, settings.params(temperature)).ask(target, answerers, record, watch)
        figures = run_figures({name: record.of(name, temperature) for name in answerers})
        if (theirs := figures.pop(PEER, None)) is not None:
            ours = figures["plain"]["tokens_per_second"]
            result["transformers_tokens_per_second"] = theirs["tokens_per_second"]
            result["plain_over_transformers"] = round(ours / theirs["tokens_per_second"], 3)
            result["tokens_equal_to_transformers"] = theirs["same_tokens"]
        runs.append({"temperature": temperature, "drafters": figures})
    result["runs"], result["left_out"] = runs, record.left_out
    if settings.noise:
        some = [one.question.prompt(target) for one in asked[:NOISE_PROMPTS]]
        result["noise"] = _noise(target, builders, some, settings, watch)
    if settings.passes:
        watch.begin(FLIPS)
        result["flips"] = asdict(flips(target, reference, text, start, widest, watch))
    lengths = [one.tokens for one in asked]
    used = {"prompts": len(asked), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
    given = ("new_tokens", "seed", "nodes", "sampling", "ignore_eos", "noise_in_ranking")
    used |= {name: getattr(settings, name) for name in given}
    return result | {"settings": used} | record.machine | {"peak_memory_mib": peak_memory_mib(target)}


def plan(names: Sequence[str], asked: Sequence[Asked], settings: BenchSettings, transformers: bool) -> list[Phase]:
    """The phases of `bench` in order, and what each costs beside a step of plain decoding, about."""
    some = asked[: proof.PROMPTS]
    form, dtype = settings.proof, settings.dtype
    of_proof, of_reference = SLOW[form]
    phases = [
        Phase(phase_name(name, way, form, dtype, len(some)), way, 2 * decode_cost(some, proof.TOKENS), of_proof)
        for name in names
        for way in proof.ways(form, settings.greedy())
    ]
    if settings.passes:
        reference = decode_cost(some[:1], FLIP_TOKENS)
        reference += 0 if form in ("serving", "off") else prefill_cost(asked[0].tokens) + FLIP_TOKENS
        phases.append(Phase(REFERENCE, REFERENCE, reference, of_reference))
    for context in settings.curve_contexts(asked):
        phases.append(Phase(f"{CURVE}, behind {context} tokens", CURVE, width_curve_cost(context)))
    for temperature in settings.temperatures:
        peer = [PEER] if transformers and temperature == 0 else []
        phases += Turns(asked, settings.params(temperature)).phases(["plain", *names, *peer])
    if settings.noise:
        cost = decode_cost(asked[:NOISE_PROMPTS], NOISE_TOKENS)
        ways = [way for name in names for way in _noise_ways(name)]
        phases += [Phase(phase, "noise", 2 * cost if noisy else cost) for _, noisy, phase in ways]
    if settings.passes:
        phases.append(Phase(FLIPS, "plain", 2 * prefill_cost(asked[0].tokens) + 2 * FLIP_TOKENS))
    return phases


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


def _noise_ways(name: str) -> list[tuple[float, bool, str]]:
    """Temperature, with the noise or without, and how that is called."""
    return [
        (temperature, noisy, f"{name} at T {temperature}, {'with' if noisy else 'without'} the noise")
        for temperature in NOISE_TEMPERATURES
        for noisy in (True, False)
    ]


def _noise(target: Target, builders: Mapping[str, Builder], prompts, settings: BenchSettings, watch: Watch) -> dict:
    """Tokens a step and acceptance with the noise in the ranking and without, every proposed node verified; and at the
    first place what classical rejection would accept (classical.py)."""
    found: dict = {}
    for name, build in builders.items():
        for temperature, noisy, phase in _noise_ways(name):
            watch.begin(phase)
            params = settings.params(temperature, NOISE_TOKENS)
            engine = Engine(target, build(target), nodes=None, noise_in_ranking=noisy)
            measured = totals([EngineAnswers(engine).answer(prompt, params, watch) for prompt in prompts])
            brought = {key: measured[key] for key in ("tokens_per_step", "acceptance")}
            entry = found.setdefault(name, {}).setdefault(str(temperature), {})
            entry["with" if noisy else "without"] = rounded(brought)
            if noisy:
                watched = Engine(target, build(target), nodes=None, graphs=False)
                entry["first_place"] = rounded(shares(first_places(watched, prompts, params, watch)))
    return found
