"""What `longdraft bench` measures, in order: exactness in fp32, then everything else in the dtype asked for.

No speed is given out without the exactness of the same drafter in the same process. Not here: the single measurements
(infer/measure.py), the prompts (infer/tasks.py), how figures are shown (infer/report.py), or kernels' benchmarks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.measure import (
    against_transformers,
    as_json,
    decode_in_turns,
    exact,
    flips,
    reference_logits,
    same_tokens,
    speedups,
    summarise,
    surroundings,
    width_curve,
)  # fmt: skip
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tasks import Task
from longdraft.models.hf import Target

EXACT_PROMPTS, EXACT_TOKENS = 2, 24
NOISE_TEMPERATURES, NOISE_PROMPTS, NOISE_TOKENS = (0.7, 1.0), 3, 64
Step = Callable[[str], object]
# A drafter for a target whose dtype is settled.
Builder = Callable[[Target], Drafter]


@dataclass(frozen=True)
class BenchSettings:
    """`dtype` is that of the speeds; `temperatures` are measured one after the other (0 is greedy); `nodes` as the
    Engine's; `contexts`: lengths for the width curve, None for the first prompt's; `noise`: also acceptance with and
    without the noise in the ranking."""

    new_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    nodes: int | str | None = "auto"
    contexts: tuple[int, ...] | None = None
    noise: bool = False

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
    step: Step = print,
) -> dict:
    """Everything as plain dicts.

    Args:
        target: loaded in fp32; it is cast to `settings.dtype` on the way, and drafters are built anew.
        builders: by the name that the figures stand under; plain decoding is always measured.
        transformers_model: the same checkpoint as a transformers model in `settings.dtype`, or None.
        step: told what is measured next.

    Raises:
        RuntimeError: a drafter whose fp32 tokens are not plain decoding's.
    """
    prompts = [task.tokens for task in tasks]
    result: dict = _exactness(target, builders, prompts, settings, step)
    step("fp32 reference")
    # Dtypes and widths are compared on the target's own greedy text.
    text = prompts[0] + Engine(target).generate([prompts[0]], settings.params(new_tokens=64))[0].tokens
    start = len(prompts[0]) - 1
    reference = reference_logits(target, text, start)
    target.model.to(settings.dtype)
    step("width curve")
    curves = {context: width_curve(target, context) for context in settings.contexts or (len(prompts[0]),)}
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
        runs.append(_run(engines, tasks, settings, temperature, step))
    result["runs"] = runs
    if settings.noise:
        result["noise"] = _noise(target, builders, prompts[:NOISE_PROMPTS], settings, step)
    if transformers_model is not None:
        step("transformers")
        theirs, ours, equal = against_transformers(transformers_model, Engine(target), prompts, settings.params())
        result["transformers_tokens_per_second"] = round(theirs, 3)
        result["plain_over_transformers"] = round(ours.tokens_per_second / theirs, 3)
        result["tokens_equal_to_transformers"] = equal
    step("flips")
    result["flips"] = asdict(flips(target, reference, text, start, widest))
    lengths = [len(prompt) for prompt in prompts]
    said = {"prompts": len(prompts), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
    said |= {"new_tokens": settings.new_tokens, "seed": settings.seed, "nodes": settings.nodes}
    return result | {"settings": said} | surroundings(target)


def _exactness(target: Target, builders: Mapping[str, Builder], prompts, settings: BenchSettings, step: Step) -> dict:
    """tokens == tokens in fp32, greedy and seeded, every proposed node verified."""
    if not builders:
        return {}
    sampled = replace(settings.params(1.0, EXACT_TOKENS), top_p=0.95)
    ways, some = [settings.params(new_tokens=EXACT_TOKENS), sampled], prompts[:EXACT_PROMPTS]
    for name, build in builders.items():
        step(f"exactness of {name} in fp32")
        if not exact(target, Engine(target, build(target), nodes=None), some, ways):
            raise RuntimeError(
                f"exact: NO, {name}'s tokens in fp32 differ from plain decoding's; no speed is worth a number"
            )
    checked = len(ways) * len(some) * EXACT_TOKENS
    return {"exact": True, "exact_checked": f"{checked} tokens a drafter in fp32, greedy and T 1 with top-p 0.95"}


def _run(
    engines: Mapping[str, Engine], tasks: Sequence[Task], settings: BenchSettings, temperature: float, step: Step
) -> dict:
    """All drafters at one temperature: totals, by kind of task, and prompt by prompt against plain decoding."""
    done = decode_in_turns(engines, [task.tokens for task in tasks], settings.params(temperature), step)
    plain = done["plain"]
    figures: dict = {}
    for name, generations in done.items():
        ratios = speedups(plain, generations)
        total = summarise(generations).tokens_per_second / summarise(plain).tokens_per_second
        kinds: dict = {}
        for kind in dict.fromkeys(task.kind for task in tasks):
            chosen = [i for i, task in enumerate(tasks) if task.kind == kind]
            mine, theirs = (summarise([each[i] for i in chosen]) for each in (generations, plain))
            kinds[kind] = {
                "speedup": round(mine.tokens_per_second / theirs.tokens_per_second, 4),
                "tokens_per_step": round(mine.tokens_per_step, 4),
            }
        figures[name] = as_json(summarise(generations)) | {
            "speedup": round(total, 4),
            "prompt_speedups": [round(ratio, 4) for ratio in ratios],
            "kinds": kinds,
            "same_tokens": same_tokens(plain, generations),
        }
    return {"temperature": temperature, "drafters": figures}


def _noise(target: Target, builders: Mapping[str, Builder], prompts, settings: BenchSettings, step: Step) -> dict:
    """Tokens a step and acceptance with the noise in the ranking and without, every proposed node verified."""
    found: dict = {}
    for name, build in builders.items():
        for temperature in NOISE_TEMPERATURES:
            params = settings.params(temperature, NOISE_TOKENS)
            for noisy in (True, False):
                step(f"{name} at T {temperature}, {'with' if noisy else 'without'} the noise")
                engine = Engine(target, build(target), nodes=None, noise_in_ranking=noisy)
                measured = summarise([engine.generate([prompt], params)[0] for prompt in prompts])
                entry = found.setdefault(name, {}).setdefault(str(temperature), {})
                entry["with" if noisy else "without"] = {
                    "tokens_per_step": round(measured.tokens_per_step, 4),
                    "acceptance": round(measured.acceptance, 4),
                }
    return found
