"""What `longdraft bench` measures, in order: exactness in fp32, then everything else in the dtype asked for.

No speed is given out without the exactness of the same draft in the same process. Not here: the single measurements
(infer/measure.py), how they are shown (infer/report.py), or kernels' benchmarks.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from longdraft.infer.engine import Engine
from longdraft.infer.measure import (
    against_transformers,
    as_json,
    decode_in_turns,
    exact,
    flips,
    paying_tree,
    reference_logits,
    surroundings,
    width_curve,
)  # fmt: skip
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.shape import TreeShape
from longdraft.models.drafts.tokenswift import TokenSwift
from longdraft.models.hf import Target

EXACT_PROMPTS, EXACT_TOKENS = 2, 24
Step = Callable[[str], object]


@dataclass(frozen=True)
class BenchSettings:
    """`dtype` is that of the speeds. `shape`: TokenSwift's tree; None takes what pays by the measured width curve, for
    which `rates` [head][rank] say how often a rank is right."""

    new_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16
    temperature: float = 0.0
    seed: int = 0
    shape: TreeShape | None = None
    rates: Sequence[Sequence[float]] | None = None

    def greedy(self, new_tokens: int | None = None) -> SamplingParams:
        return SamplingParams(max_new_tokens=new_tokens or self.new_tokens, ignore_eos=True)

    def asked(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_new_tokens=self.new_tokens, ignore_eos=True
        )


def bench(
    target: Target,
    draft: TokenSwift | None,
    prompts: Sequence[list[int]],
    settings: BenchSettings,
    transformers_model=None,
    step: Step = print,
) -> dict:
    """Everything as plain dicts.

    Args:
        target: loaded in fp32; it is cast to `settings.dtype` on the way, and so is `draft`.
        draft: trained heads, or None for plain decoding alone.
        transformers_model: the same checkpoint as a transformers model in `settings.dtype`, or None.
        step: told what is measured next.
    """
    result: dict = {}
    if draft is not None:
        step("exactness in fp32")
        result |= _exactness(target, draft, prompts, settings)
        if not result["exact"]:
            raise RuntimeError("exact: NO, in fp32 the tokens differ from plain decoding's; no speed is worth a number")
    step("fp32 reference")
    # Dtypes and widths are compared on the target's own greedy text.
    text = prompts[0] + Engine(target).generate([prompts[0]], settings.greedy(64))[0].tokens
    start = len(prompts[0]) - 1
    reference = reference_logits(target, text, start)
    target.model.to(settings.dtype)
    step("width curve")
    curve = width_curve(target, len(prompts[0]))
    result["width_curve_ms"] = {str(width): round(1e3 * seconds, 3) for width, seconds in curve.items()}
    engines = {"plain": Engine(target)}
    if draft is not None:
        shape, expected = _shape(target, draft.to(settings.dtype), settings, curve)
        engines["tokenswift"] = Engine(target, "tokenswift", draft, options={"shape": shape})
        result |= expected
    measured, done = decode_in_turns(engines, prompts, settings.asked(), step)
    result["drafters"] = as_json(measured)
    if draft is not None:
        pairs = [
            pair
            for plain, drafted in zip(done["plain"], done["tokenswift"], strict=True)
            for pair in zip(plain.tokens, drafted.tokens, strict=True)
        ]
        result["same_tokens"] = sum(a == b for a, b in pairs), len(pairs)
        result["speedup"] = round(measured["tokenswift"].tokens_per_second / measured["plain"].tokens_per_second, 4)
    if transformers_model is not None:
        step("transformers")
        theirs, ours, equal = against_transformers(transformers_model, engines["plain"], prompts, settings.greedy())
        result["transformers_tokens_per_second"] = round(theirs, 3)
        result["plain_over_transformers"] = round(ours.tokens_per_second / theirs, 3)
        result["tokens_equal_to_transformers"] = equal
    step("flips")
    width = max(2, *(1 + engine.drafter.max_nodes for engine in engines.values()))
    result["flips"] = asdict(flips(target, reference, text, start, width))
    said = {"prompts": len(prompts), "batch": 1, "prompt_tokens": len(prompts[0]), "new_tokens": settings.new_tokens}
    return result | {"settings": said | asdict(settings.asked())} | surroundings(target)


def _exactness(target: Target, draft: TokenSwift, prompts, settings: BenchSettings) -> dict:
    """tokens == tokens in fp32, greedy and seeded, with the full tree."""
    sampled = SamplingParams(
        temperature=1.0, top_p=0.95, seed=settings.seed, max_new_tokens=EXACT_TOKENS, ignore_eos=True
    )
    ways, some = [settings.greedy(EXACT_TOKENS), sampled], prompts[:EXACT_PROMPTS]
    same = exact(target, Engine(target, "tokenswift", draft), some, ways)
    checked = len(ways) * len(some) * EXACT_TOKENS
    return {"exact": same, "exact_checked": f"{checked} tokens in fp32, greedy and T 1 with top-p 0.95"}


def _shape(target: Target, draft: TokenSwift, settings: BenchSettings, curve) -> tuple[TreeShape, dict]:
    """The tree asked for, or the one with the most expected tokens a second."""
    if settings.shape is not None:
        return settings.shape, {"nodes": len(settings.shape.nodes)}
    if settings.rates is None:
        raise ValueError("rates: without the draft's measured rates a shape must be given")
    shape, expected = paying_tree(target, draft, settings.rates, curve)
    return shape, {"nodes": len(shape.nodes), "expected_speedup": round(expected, 3)}
