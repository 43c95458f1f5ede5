"""Proves that a drafter's tokens are plain decoding's before a benchmark times anything.

In fp32, passes of different widths agree to within the last bits, so a single token that differs is a bug. The forms of
the proof, the strongest first:

  fp32     the target's own weights, computed in fp32 one layer at a time: little more memory than serving takes
  serving  in the dtype of the speeds; tokens may differ only at near-ties, and those that differ are counted
  off      nothing is proved, and the result says so
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.timing import Log
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder import Decoder
from longdraft.models.layer import Layer
from longdraft.models.passes import Pass, prompt_rows
from longdraft.models.target import Target

PROMPTS, TOKENS = 2, 24
# Builds a drafter for a target in its present dtype.
Builder = Callable[[Target], Drafter]
# Two passes with an error each can flip a gap of twice the error. The error is measured at the few positions of the
# proof only and may be larger elsewhere: twice again.
NEAR_TIE = 4


class NotExact(RuntimeError):
    """A drafter's tokens are not plain decoding's."""


@contextmanager
def in_fp32(model: Decoder) -> Iterator[None]:
    """Compute the whole model in fp32 inside this context, with its own weights. Embedding, norm and head are converted
    once, each layer only while it runs; a model of transformers is converted as a whole. Nothing is recorded inside
    (infer/graphs.py)."""
    dtype, outer = model.embed_tokens.weight.dtype, model.around_layer
    if dtype == torch.float32:
        yield
        return
    by_layer = type(model) is Decoder
    modules = (model.embed_tokens, model.norm, model.lm_head) if by_layer else (model,)
    for module in modules:
        module.to(torch.float32)
    if by_layer:
        model.around_layer = _layer_in_fp32
    try:
        yield
    finally:
        model.around_layer = outer
        for module in modules:
            module.to(dtype)


@contextmanager
def _layer_in_fp32(layer: Layer) -> Iterator[None]:
    weights = [(weight, weight.data) for weight in layer.parameters()]
    for weight, data in weights:
        weight.data = data.float()
    try:
        yield
    finally:
        for weight, data in weights:
            weight.data = data


def prove(
    target: Target,
    builders: Mapping[str, Builder],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    form: str,
    log: Log = print,
) -> dict:
    """Show that each drafter's tokens are plain decoding's, greedy and sampled with a seed, every proposed node
    verified. In the serving dtype they may differ at near-ties.

    Args:
        target: in the dtype of the speeds, and inside `in_fp32` for the form "fp32".
        params: seed and end tokens of the requests.

    Returns: `exact` (None if it was not proved in fp32), `exact_checked` (what was compared, in words) and `proof`: the
        form, and for "serving" the `count_flips` of each drafter. Empty if there is no drafter.

    Raises: NotExact if a drafter's tokens differ; in the serving dtype, if they differ at more than a near-tie.
    """
    if not builders:
        return {}
    if form == "off":
        return {"exact": None, "exact_checked": "--exactness off", "proof": {"form": form}}
    serving, some, plain = form == "serving", prompts[:PROMPTS], Engine(target)
    # No filter where the gap of a flip is measured, because it could drop one of the two tokens.
    greedy = replace(params, max_new_tokens=TOKENS)
    both = greedy, replace(greedy, temperature=1.0, top_p=1.0 if serving else 0.95)
    dtype = str(target.model.embed_tokens.weight.dtype).removeprefix("torch.") if serving else "fp32"
    found = {}
    for name, build in builders.items():
        engine = Engine(target, build(target), nodes=None)
        log(f"proving in {dtype} that {name} is exact")
        found[name] = count_flips(plain, engine, name, some, both, exactly=not serving)
    tokens = next(iter(found.values()))["tokens"]
    how = f"{tokens} tokens a drafter in {dtype}, greedy and T 1{'' if serving else ' with top-p 0.95'}"
    proof = {"form": form} | ({"flips": found} if serving else {})
    return {"exact": None if serving else True, "exact_checked": how, "proof": proof}


def count_flips(
    plain: Engine,
    engine: Engine,
    name: str,
    prompts: Sequence[list[int]],
    several: Iterable[SamplingParams],
    exactly: bool = False,
) -> dict[str, Any]:
    """Count the tokens of an engine that differ from plain decoding's, in any dtype. After each difference the engine
    continues from plain decoding's token; that is comparable because the noise depends on the position alone.

    Args:
        name: the name of the engine's drafter.
        several: the parameters, each for every prompt; without filters and penalties unless `exactly`.
        exactly: no token may differ.

    Returns: the counts `flips` and `tokens`.

    Raises: NotExact if a token differs and `exactly`; otherwise if the logits (with the noise) of the two tokens of a
        flip are further apart than rounding explains.
    """
    flips = tokens = 0
    for params in several:
        right, gaps = [one.tokens for one in plain.generate(prompts, params)], []
        for text, expected, token in _flips(engine, zip(prompts, right, strict=True), params):
            if exactly:
                raise NotExact(f"exact: NO, {name} has {token} instead of {expected} in fp32, after {len(text)} tokens")
            gaps.append(_gap(plain.target, text, expected, token, params))
        flips, tokens = flips + len(gaps), tokens + sum(map(len, right))
        if not gaps:
            continue
        largest = NEAR_TIE * _width_error(plain.target, prompts[0] + right[0], len(prompts[0]) - 1, engine)
        if max(gaps) > largest:
            raise NotExact(
                f"exact: NO, {name} chose another token than plain decoding although their logits are {max(gaps):.3f} "
                f"apart; rounding explains at most {largest:.3f}"
            )
    return {"flips": flips, "tokens": tokens}


def _flips(
    engine: Engine, texts: Iterable[tuple[list[int], list[int]]], params: SamplingParams
) -> Iterator[tuple[list[int], int, int]]:
    """Decode pairs of a prompt and plain decoding's tokens, and yield for each token that differs the text before it,
    plain decoding's token, and the engine's."""
    rest = list(texts)
    while rest:
        requests = [replace(params, max_new_tokens=len(expected)) for _, expected in rest]
        found = [one.tokens for one in engine.generate([prompt for prompt, _ in rest], requests)]
        pairs, rest = list(zip(rest, found, strict=True)), []
        for (prompt, expected), tokens in pairs:
            at = next((t for t, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), None)
            if at is not None:
                yield prompt + expected[:at], expected[at], tokens[at]
                if expected[at + 1 :]:
                    rest.append((prompt + expected[: at + 1], expected[at + 1 :]))


@torch.no_grad()
def choice_logits(target: Target, tokens: Sequence[int], start: int, width: int) -> Tensor:
    """Logits [T - start, V] after each of the T tokens from `start` on, from passes of `width` rows over a cache of the
    tokens before."""
    model, rows = target.model, torch.tensor([list(tokens)], device=target.model.embed_tokens.weight.device)
    cache, logits = model.new_cache(1, len(tokens) + width), []
    for chunk in rows[:, :start].split(prompt_rows(rows.device.type), dim=1):
        model(Pass(chunk, cache=cache, needs={"last_kv"}))
        cache.commit(None, torch.tensor([chunk.shape[1]], device=rows.device))
    for chunk in rows[:, start:].split(width, dim=1):
        logits.append(model(Pass(chunk, cache=cache, needs={"logits"})).logits)
        cache.commit(None, torch.tensor([chunk.shape[1]], device=rows.device))
    return torch.cat(logits, 1)[0]


@torch.no_grad()
def _gap(target: Target, text: list[int], chosen: int, other: int, params: SamplingParams) -> float:
    """The difference in logits, with the noise, between two tokens after a text in plain decoding."""
    logits_1V = choice_logits(target, text, len(text) - 1, 1)
    device = logits_1V.device
    position_1, history = torch.tensor([len(text) - 1], device=device), History(1, 1, device)  # no penalties read it
    scores_V = SlotSampling([params], device).scores(logits_1V, history, position_1)[0].float()
    return abs(float(scores_V[chosen] - scores_V[other])) * (params.temperature or 1.0)


def _width_error(target: Target, text: list[int], start: int, engine: Engine) -> float:
    """The largest difference of a logit between passes of one row and passes as wide as this engine's widest."""
    narrow, wide = (choice_logits(target, text, start, width) for width in (1, 1 + engine.drafter.max_nodes))
    return float((narrow.float() - wide.float()).abs().max())
