"""What `longdraft bench` measures, in order: exactness first, then everything else.

A record that reports a drafter's speed also says whether that drafter is exact.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from longdraft.benchmarks.drafters.answering import ask, of_transformers
from longdraft.benchmarks.drafters.exactness import Builder, in_fp32, prove
from longdraft.benchmarks.drafters.forced import LABEL, replaying
from longdraft.benchmarks.drafters.metrics import run_figures
from longdraft.benchmarks.drafters.questions import Question
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.timing import Log, peak_memory_mib, width_curve
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target


@dataclass(frozen=True)
class BenchSettings:
    """What is measured and how.

    Attributes:
        proof: the form of the proof of exactness (exactness.py).
        temperatures: measured one after the other; 0 is greedy.
        sampling: further SamplingParams of the answers. ignore_eos: whether answers continue after an end token.
        nodes: passed to the Engine.
        contexts: context lengths after which to measure the cost of a pass by its width; None: the first prompt's.
    """

    new_tokens: int = 128
    proof: str = "fp32"
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    nodes: int | Literal["auto"] | None = "auto"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    contexts: tuple[int, ...] | None = None

    def params(self, temperature: float) -> SamplingParams:
        options = {**self.sampling, "temperature": temperature, "ignore_eos": self.ignore_eos}
        return SamplingParams(seed=self.seed, max_new_tokens=self.new_tokens, **options)


def bench(
    target: Target,
    builders: Mapping[str, Builder],
    asked: Sequence[Question],
    settings: BenchSettings,
    transformers_model=None,
    log: Log = print,
    record: Record | None = None,
) -> dict:
    """Measure everything and return it as plain dicts.

    Args:
        target: in the dtype that is measured.
        builders: by name in the report; plain decoding is always measured, too.
        asked: questions whose prompts fit the target's positions.
        transformers_model: the same checkpoint as a transformers model in the same dtype, or None; it also answers the
            greedy questions, as the drafter "transformers".
        log: called with what is about to start.
        record: receives the proof and the answers; what it already holds is not measured again. None: kept in memory.

    Raises:
        ValueError: a prompt that does not fit the target's positions.
        NotExact: a drafter whose tokens are not plain decoding's.
    """
    positions, record = target.model.config.max_positions, record or Record({})
    prompts = [one.prompt(target) for one in asked]
    lengths = [len(prompt) for prompt in prompts]
    if max(lengths) + settings.new_tokens > positions:
        raise ValueError(
            f"prompt {1 + lengths.index(max(lengths))} has {max(lengths)} tokens: with {settings.new_tokens} new ones "
            f"it does not fit the target's {positions} positions; ask for fewer"
        )
    if (longest := max(settings.contexts or (0,))) > positions:
        raise ValueError(f"contexts: {longest}, but the target has {positions} positions; stay within them")
    if record.proof is None:
        params = SamplingParams(seed=settings.seed, ignore_eos=True)
        with in_fp32(target.model) if settings.proof == "fp32" else nullcontext():
            record.add("proof", prove(target, builders, prompts, params, settings.proof, log))
    curves = {}
    for context in lengths[:1] if settings.contexts is None else settings.contexts:
        log(f"cost of a pass by its rows, after {context} tokens")
        curve = width_curve(target.model, context)
        curves[str(context)] = {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}
    runs, rates = [], dict[str, list[float]]()
    for temperature in settings.temperatures:
        # New drafters at each temperature, so that none has learned from an earlier answer to the same question. No
        # prompt is kept, because prefill is timed.
        engines = {"plain": Engine(target, keep_prompts=False)}
        for name, build in builders.items():
            engines[name] = Engine(target, build(target), nodes=settings.nodes, keep_prompts=False)
        answerers, rates = replaying(engines)
        if transformers_model is not None and temperature == 0:
            answerers["transformers"] = of_transformers(transformers_model, target.eos_token_ids)
        ask(target, answerers, asked, settings.params(temperature), record, log)
        figures = run_figures({name: record.of(name, temperature) for name in answerers})
        runs.append({"temperature": temperature, "drafters": figures})
    used = {"prompts": len(asked), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
    used |= {name: getattr(settings, name) for name in ("new_tokens", "seed", "nodes", "sampling", "ignore_eos")}
    used |= {LABEL: rates} if rates else {}
    peak = peak_memory_mib(target.model.embed_tokens.weight.device)
    found = {"width_curves_ms": curves, "runs": runs, "settings": used}
    return found | (record.proof or {}) | record.machine | {"peak_memory_mib": peak}
