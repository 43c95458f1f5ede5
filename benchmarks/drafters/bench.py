"""What `longdraft bench` measures, in order: exactness first, then everything else.

No speed is reported without the exactness of the same drafter in the same record.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from longdraft.benchmarks.drafters.answering import Answerer, EngineAnswers, TransformersAnswers, ask
from longdraft.benchmarks.drafters.exactness import PROMPTS, Builder, in_fp32, prove
from longdraft.benchmarks.drafters.metrics import run_figures
from longdraft.benchmarks.drafters.prompts import Asked
from longdraft.benchmarks.drafters.record import Record
from longdraft.benchmarks.drafters.timing import Log, forget_peak_memory, peak_memory_mib, quiet, width_curve
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.target import Target

PEER = "transformers"


@dataclass(frozen=True)
class BenchSettings:
    """What is measured and how.

    Attributes:
        proof: the form of the proof of exactness (exactness.py).
        temperatures: measured one after the other; 0 is greedy.
        sampling: further keywords for the answers' SamplingParams. ignore_eos: whether answers continue after an end
            token.
        nodes: passed to the Engine.
        passes: also measure the cost of a pass by its width, after a prompt of the first one's length.
    """

    new_tokens: int = 128
    proof: str = "fp32"
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    nodes: int | str | None = "auto"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = True
    passes: bool = True

    def params(self, temperature: float) -> SamplingParams:
        options = {**self.sampling, "temperature": temperature, "ignore_eos": self.ignore_eos}
        return SamplingParams(seed=self.seed, max_new_tokens=self.new_tokens, **options)


def bench(
    target: Target,
    builders: Mapping[str, Builder],
    asked: Sequence[Asked],
    settings: BenchSettings,
    transformers_model=None,
    log: Log = quiet,
    record: Record | None = None,
) -> dict:
    """Measure everything and return it as plain dicts.

    Args:
        target: in the dtype that is measured.
        builders: by the name under which the figures are reported; plain decoding is always measured.
        asked: questions whose prompts fit the target's positions.
        transformers_model: the same checkpoint as a transformers model in the same dtype, or None; it also answers the
            greedy questions.
        log: told what begins.
        record: receives the proof and the answers; what it already holds is not measured again. None: kept in memory.

    Raises:
        ValueError: a prompt that does not fit the target's positions.
        NotExact: a drafter whose tokens are not plain decoding's.
    """
    positions = target.model.config.max_positions
    for number, one in enumerate(asked, start=1):
        if one.tokens + settings.new_tokens > positions:
            raise ValueError(
                f"prompt {number} has {one.tokens} tokens: with {settings.new_tokens} new ones it does not fit the "
                f"target's {positions} positions; ask for fewer"
            )
    run = _Bench(target, builders, asked, settings, transformers_model, log, record or Record({}))
    run.prove()
    forget_peak_memory(run.device)
    return run.measure()


@dataclass
class _Bench:
    """One call of `bench`, with its arguments."""

    target: Target
    builders: Mapping[str, Builder]
    asked: Sequence[Asked]
    settings: BenchSettings
    transformers_model: Any
    log: Log
    record: Record

    @property
    def device(self) -> torch.device:
        return self.target.model.embed_tokens.weight.device

    def _prompts(self, count: int) -> list[list[int]]:
        return [one.question.prompt(self.target) for one in self.asked[:count]]

    def prove(self) -> None:
        """Prove exactness and record it, unless the record has the proof of an earlier call."""
        if self.record.proof is not None:
            return
        form, params = self.settings.proof, SamplingParams(seed=self.settings.seed, ignore_eos=True)
        with in_fp32(self.target.model) if form == "fp32" else nullcontext():
            proof = prove(self.target, self.builders, self._prompts(PROMPTS), params, form, self.log)
        self.record.add("proof", proof)

    def measure(self) -> dict:
        """Measure, and return all figures."""
        settings = self.settings
        curves: dict[str, dict[str, float]] = {}
        if settings.passes:
            context = self.asked[0].tokens
            self.log(f"cost of a pass by its rows, after {context} tokens")
            curve = width_curve(self.target.model, context)
            curves[str(context)] = {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}
        found: dict[str, Any] = {"width_curves_ms": curves, "runs": []}
        for temperature in settings.temperatures:
            figures = self._answers(temperature)
            if (theirs := figures.pop(PEER, None)) is not None:
                speed = theirs["tokens_per_second"]
                found |= {
                    "transformers_tokens_per_second": speed,
                    "plain_over_transformers": round(figures["plain"]["tokens_per_second"] / speed, 3),
                    "tokens_equal_to_transformers": theirs["same_tokens"],
                }
            found["runs"].append({"temperature": temperature, "drafters": figures})
        lengths = [one.tokens for one in self.asked]
        names = ("new_tokens", "seed", "nodes", "sampling", "ignore_eos")
        used = {"prompts": len(self.asked), "batch": 1, "prompt_tokens": [min(lengths), max(lengths)]}
        used |= {name: getattr(settings, name) for name in names}
        found |= {**(self.record.proof or {}), "left_out": self.record.left_out, "settings": used}
        return found | self.record.machine | {"peak_memory_mib": peak_memory_mib(self.device)}

    def _answers(self, temperature: float) -> dict[str, dict]:
        """Ask every question at this temperature, the drafters in turns, and return the figures by name."""
        names = ["plain", *self.builders]
        if self.transformers_model is not None and temperature == 0:
            names.append(PEER)
        # New drafters at each temperature: none may have learned from an earlier answer to the same question.
        answerers = {name: self._answerer(name) for name in names}
        ask(self.target, answerers, self.asked, self.settings.params(temperature), self.record, self.log)
        return run_figures({name: self.record.of(name, temperature) for name in names})

    def _answerer(self, name: str) -> Answerer:
        """Whoever answers under this name. Every prompt is prefilled from its first token, because that is timed."""
        if name == PEER:
            return TransformersAnswers(self.transformers_model, self.target.eos_token_ids)
        if name == "plain":
            return EngineAnswers(Engine(self.target, keep_prompts=False))
        drafter = self.builders[name](self.target)
        return EngineAnswers(Engine(self.target, drafter, nodes=self.settings.nodes, keep_prompts=False))
