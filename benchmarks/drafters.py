"""What `longdraft bench` measures, in order: exactness, then everything else in the dtype asked for.

No speed is given out without the exactness of the same drafter in the same process. Not here: how exactness is shown
(proof.py), the single measurements (measure.py), the prompts (tasks.py), how figures are shown (drafters_report.py), or
kernels' benchmarks (run.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from longdraft.benchmarks import proof
from longdraft.benchmarks.measure import (
    against_transformers,
    decode,
    decode_cost,
    decode_in_turns,
    flips,
    plan_turns,
    prefill_cost,
    reference_logits,
    rounded,
    same_tokens,
    summarise,
    surroundings,
    transformers_cost,
    width_curve,
    width_curve_cost,
)
from longdraft.benchmarks.progress import UNWATCHED, Phase, Watch
from longdraft.benchmarks.proof import Builder, in_form, phase_name, prove
from longdraft.benchmarks.tasks import Task
from longdraft.infer.engine import Engine
from longdraft.infer.results import Generation
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

NOISE_TEMPERATURES, NOISE_PROMPTS, NOISE_TOKENS = (0.7, 1.0), 3, 64
FLIP_TOKENS = 64
# What a token takes beside one of plain decoding in bf16, as measured for SmolLM2, in the proof, where every node is
# verified, and of the reference.
SLOW = {"fp32": (3.0, 2.0), "layerwise": (9.0, 6.0), "serving": (2.0, 1.0)}
REFERENCE, CURVE, FLIPS, PEER = "the target's own text", "cost of a pass by its rows", "flips", "timing transformers"


@dataclass(frozen=True)
class BenchSettings:
    """`dtype` is that of the speeds; `proof`: the form of the proof of exactness (proof.py); `temperatures` are
    measured one after the other (0 is greedy); `nodes` as the Engine's; `contexts`: lengths for the width curve, None
    for the first prompt's; `noise`: also acceptance with and without the noise in the ranking."""

    new_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16
    proof: str = "fp32"
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    nodes: int | str | None = "auto"
    contexts: tuple[int, ...] | None = None
    noise: bool = False

    def curve_contexts(self, prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The lengths of the width curve."""
        return self.contexts or (len(prompts[0]),)

    def params(self, temperature: float = 0.0, new_tokens: int | None = None) -> SamplingParams:
        """The request of every prompt at this temperature."""
        return SamplingParams(
            temperature=temperature, seed=self.seed, max_new_tokens=new_tokens or self.new_tokens, ignore_eos=True
        )


def bench(
    target: Target,
    builders: Mapping[str, Builder],
    tasks: Sequence[Task],
    settings: BenchSettings,
    transformers_model=None,
    watch: Watch = UNWATCHED,
) -> dict:
    """Everything as plain dicts.

    Args:
        target: loaded in fp32 for a proof of the form "fp32", and then cast to `settings.dtype`; else loaded in that.
            Drafters are built anew.
        builders: by the name that the figures stand under; plain decoding is always measured.
        transformers_model: the same checkpoint as a transformers model in `settings.dtype`, or None.
        watch: told what is measured and how it goes on.

    Raises:
        ValueError: a prompt that does not fit the target's positions.
        RuntimeError: a drafter whose tokens are not plain decoding's.
    """
    prompts = [task.tokens for task in tasks]
    _check_lengths(target, prompts, settings)
    watch.plan(plan(list(builders), prompts, settings, transformers_model is not None))
    start = len(prompts[0]) - 1
    with in_form(target, settings.proof):
        result: dict = prove(target, builders, prompts, settings.params(), settings.proof, settings.dtype, watch)
        watch.begin(REFERENCE)
        # Dtypes and widths are compared on the target's own greedy text.
        greedy = settings.params(new_tokens=FLIP_TOKENS)
        text = prompts[0] + decode(Engine(target), prompts[:1], greedy, watch)[0].tokens
        reference = None if settings.proof == "serving" else reference_logits(target, text, start, watch)
    target.model.to(settings.dtype)
    curves = {}
    for context in settings.curve_contexts(prompts):
        watch.begin(f"{CURVE}, behind {context} tokens")
        curves[context] = width_curve(target, context, watch=watch)
    result["width_curves_ms"] = {
        str(context): {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}
        for context, curve in curves.items()
    }
    widest, runs = 2, []
    for temperature in settings.temperatures:
        # New drafters each time: what one has learned from an answer must not meet it again.
        engines = {"plain": Engine(target)}
        engines |= {name: Engine(target, build(target), nodes=settings.nodes) for name, build in builders.items()}
        widest = max(widest, *(1 + engine.drafter.max_nodes for engine in engines.values()))
        runs.append(_run(engines, tasks, settings, temperature, watch))
    result["runs"] = runs
    if settings.noise:
        result["noise"] = _noise(target, builders, prompts[:NOISE_PROMPTS], settings, watch)
    if transformers_model is not None:
        watch.begin(PEER)
        params = settings.params()
        theirs, ours, equal = against_transformers(transformers_model, Engine(target), prompts, params, watch)
        result["transformers_tokens_per_second"] = round(theirs, 3)
        result["plain_over_transformers"] = round(ours["tokens_per_second"] / theirs, 3)
        result["tokens_equal_to_transformers"] = equal
    watch.begin(FLIPS)
    result["flips"] = asdict(flips(target, reference, text, start, widest, watch))
    lengths = [len(prompt) for prompt in prompts]
    used = {"prompts": len(prompts), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
    used |= {"new_tokens": settings.new_tokens, "seed": settings.seed, "nodes": settings.nodes}
    return result | {"settings": used} | surroundings(target)


def plan(
    names: Sequence[str], prompts: Sequence[list[int]], settings: BenchSettings, transformers: bool
) -> list[Phase]:
    """The phases of `bench` in order, and what each costs beside a step of plain decoding, about."""
    some, form, dtype = prompts[: proof.PROMPTS], settings.proof, settings.dtype
    of_proof, of_reference = SLOW[form]
    phases = [
        Phase(phase_name(name, way, form, dtype, len(some)), way, 2 * decode_cost(some, proof.TOKENS), of_proof)
        for name in names
        for way in proof.ways(form, settings.params())
    ]
    start = len(prompts[0])
    reference = decode_cost(prompts[:1], FLIP_TOKENS)
    reference += 0 if form == "serving" else prefill_cost(start) + FLIP_TOKENS
    phases.append(Phase(REFERENCE, REFERENCE, reference, of_reference))
    for context in settings.curve_contexts(prompts):
        phases.append(Phase(f"{CURVE}, behind {context} tokens", CURVE, width_curve_cost(context)))
    for temperature in settings.temperatures:
        params, what = settings.params(temperature), _timing_name(temperature)
        phases += plan_turns(["plain", *names], prompts, params, what)
    if settings.noise:
        noisy = decode_cost(prompts[:NOISE_PROMPTS], NOISE_TOKENS)
        phases += [Phase(phase, "noise", noisy) for name in names for _, _, phase in _noise_ways(name)]
    if transformers:
        phases.append(Phase(PEER, PEER, transformers_cost(prompts, settings.params())))
    return [*phases, Phase(FLIPS, "plain", 2 * prefill_cost(start) + 2 * FLIP_TOKENS)]


def _check_lengths(target: Target, prompts: Sequence[Sequence[int]], settings: BenchSettings) -> None:
    positions = target.model.config.max_positions
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) + settings.new_tokens > positions:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens: with {settings.new_tokens} new ones it does not fit the "
                f"target's {positions} positions; ask for fewer"
            )
    for context in settings.contexts or ():
        if not 1 <= context <= positions:
            raise ValueError(f"contexts: {context} must lie in 1..{positions}, the target's positions")


def _timing_name(temperature: float) -> str:
    return f"timing at T {temperature:g}:" if temperature else "timing, greedy:"


def _run(
    engines: Mapping[str, Engine], tasks: Sequence[Task], settings: BenchSettings, temperature: float, watch: Watch
) -> dict:
    """All drafters at one temperature: totals, by kind of task, and prompt by prompt against plain decoding."""
    prompts, params = [task.tokens for task in tasks], settings.params(temperature)
    done = decode_in_turns(engines, prompts, params, watch, _timing_name(temperature))
    plain, every = done["plain"], range(len(tasks))
    kinds = {kind: [i for i in every if tasks[i].kind == kind] for kind in dict.fromkeys(task.kind for task in tasks)}

    def over_plain(generations: Sequence[Generation], chosen: Sequence[int]) -> dict:
        """Totals over these prompts, and the speed over plain decoding's."""
        found, slow = (summarise([each[i] for i in chosen]) for each in (generations, plain))
        return found | {"speedup": found["tokens_per_second"] / slow["tokens_per_second"]}

    figures: dict = {}
    for name, generations in done.items():
        by_kind = {kind: over_plain(generations, chosen) for kind, chosen in kinds.items()}
        figures[name] = rounded(over_plain(generations, every)) | {
            "prompt_speedups": rounded([over_plain(generations, [i])["speedup"] for i in every]),
            "kinds": rounded({kind: _only(found, "speedup", "tokens_per_step") for kind, found in by_kind.items()}),
            "same_tokens": same_tokens([g.tokens for g in plain], [g.tokens for g in generations]),
        }
    return {"temperature": temperature, "drafters": figures}


def _only(figures: dict, *names: str) -> dict:
    return {name: figures[name] for name in names}


def _noise_ways(name: str) -> list[tuple[float, bool, str]]:
    """Temperature, with the noise or without, and how that is called."""
    return [
        (temperature, noisy, f"{name} at T {temperature}, {'with' if noisy else 'without'} the noise")
        for temperature in NOISE_TEMPERATURES
        for noisy in (True, False)
    ]


def _noise(target: Target, builders: Mapping[str, Builder], prompts, settings: BenchSettings, watch: Watch) -> dict:
    """Tokens a step and acceptance with the noise in the ranking and without, every proposed node verified."""
    found: dict = {}
    for name, build in builders.items():
        for temperature, noisy, phase in _noise_ways(name):
            watch.begin(phase)
            params = settings.params(temperature, NOISE_TOKENS)
            engine = Engine(target, build(target), nodes=None, noise_in_ranking=noisy)
            measured = summarise([decode(engine, [prompt], params, watch)[0] for prompt in prompts])
            entry = found.setdefault(name, {}).setdefault(str(temperature), {})
            entry["with" if noisy else "without"] = rounded(_only(measured, "tokens_per_step", "acceptance"))
    return found
