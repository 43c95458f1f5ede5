"""Proves that a drafter's tokens are plain decoding's before a benchmark times anything, in fp32 wherever that fits.

In fp32, passes of different widths agree to within the last bits, so a single token that differs is a bug. The forms of
the proof, the strongest first:

  fp32       the whole target is loaded in fp32
  layerwise  all layers are computed in fp32, but converted one at a time: little more memory than serving takes
  serving    in the dtype of the speeds; tokens may differ only at near-ties, and those that differ are counted
  off        nothing is proved, and the result says so
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from longdraft.benchmarks.drafters.measurements import Log, choice_logits, quiet
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import cache_rows, layer_weights, pass_bytes, size, size_of
from longdraft.models.layer import Layer
from longdraft.models.target import Target

FORMS = ("fp32", "layerwise", "serving", "off")
PROMPTS, TOKENS = 2, 24
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Builds a drafter for a target that has its final dtype.
Builder = Callable[[Target], Drafter]
# The memory estimate allows for this many rows of a prefill pass, this many rows after a text for a tree and for steps
# not read yet, and this factor for what PyTorch keeps between allocations.
PREFILL_ROWS, SLACK_ROWS, MARGIN = 2048, 256, 1.1
# Two passes with an error each can flip a gap of twice the error. The error is measured at the few positions of the
# proof only and may be larger elsewhere: twice again.
NEAR_TIE = 4


class NotExact(RuntimeError):
    """A drafter's tokens are not plain decoding's."""


@dataclass(frozen=True)
class Room:
    """The memory of the device, and what determines how much of it a benchmark needs.

    Attributes:
        free: free bytes; None if unknown.
        prompt_tokens: tokens of the longest prompt. longest: positions of the longest text that is timed.
        beside: bytes on the device other than target and cache: drafts, other models.
    """

    free: int | None
    prompt_tokens: int
    longest: int
    beside: int = 0


def choose_form(asked: str | None, config: DecoderConfig, dtype: torch.dtype, room: Room) -> tuple[str, str]:
    """Return the form that was asked for, or else the strongest that fits, and what is loaded in words.

    Args:
        dtype: that of the speeds.

    Raises: ValueError if it does not fit, with the forms that would, or if not even the dtype of the speeds fits.
    """
    possible = ("fp32", "off") if dtype == torch.float32 else FORMS
    if asked is not None and asked not in possible:
        raise ValueError(f"--exactness: {asked}, but --dtype fp32 holds the whole target in fp32; leave it out")
    needed = {form: needed_bytes(form, config, dtype, room) for form in possible}
    fitting = [form for form in possible if room.free is None or needed[form] <= room.free]
    form, free = asked or next(iter(fitting), "off"), size(room.free or 0)
    if form not in fitting or (form == "off" and asked is None):
        ways = ", ".join(f"{one} takes {size(count)}" for one, count in needed.items() if one != "off")
        raise ValueError(
            f"{'--exactness' if fitting else '--target'}: {form} does not fit with a cache of {room.longest} "
            f"positions: {ways}, and {free} is free; give another --exactness, a smaller target or fewer tokens"
        )
    shown = f", and {free} is free" if room.free is not None else ""
    first = NAMES[first_dtype(form, dtype)]
    how = f"to show exactness in {describe_form(form, dtype)}: takes {size(needed[form])}{shown}"
    return form, f"Loading in {first}, {how}"


def needed_bytes(form: str, config: DecoderConfig, dtype: torch.dtype, room: Room) -> int:
    """Bytes of target, caches and passes at the peak, in the proof or while speeds are measured."""
    layer, outside = layer_weights(config)
    whole = config.n_layers * layer + outside
    weights = {"fp32": 4 * whole, "layerwise": dtype.itemsize * config.n_layers * layer + 4 * (layer + outside)}

    def decoding(slots: int, positions: int, computed: torch.dtype) -> int:
        cache = cache_rows(config, slots * (positions + SLACK_ROWS), computed)
        logits = 2 * slots * SLACK_ROWS * config.vocab_size * computed.itemsize
        return size_of(cache) + logits + pass_bytes(config, PREFILL_ROWS, computed)

    in_proof = dtype if form in ("serving", "off") else torch.float32
    proof = weights.get(form, dtype.itemsize * whole) + decoding(PROMPTS, room.prompt_tokens + TOKENS, in_proof)
    speeds = dtype.itemsize * whole + decoding(1, room.longest, dtype)
    return int(MARGIN * max(proof, speeds)) + room.beside


def describe_form(form: str, dtype: torch.dtype) -> str:
    """The form in words: in which precision the target is, and which part of it."""
    whole = "fp32, all layers"
    forms = {"fp32": whole, "layerwise": f"{whole}, one at a time", "off": "nothing: --exactness off"}
    return forms.get(form, f"{NAMES[dtype]} alone")


def first_dtype(form: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the target is loaded for a proof of this form. dtype: that of the speeds."""
    return torch.float32 if form == "fp32" else dtype


@contextmanager
def fp32_layer_by_layer(model: Decoder) -> Iterator[None]:
    """Compute the whole model in fp32 inside this context, with its own weights. Embedding, norm and head are converted
    once, each layer around its work. No step is recorded meanwhile (infer/graphs.py)."""
    outer, outside = model.around_layer, (model.embed_tokens, model.norm, model.lm_head)
    dtype = model.embed_tokens.weight.dtype
    for module in outside:
        module.to(torch.float32)
    model.around_layer = _in_fp32
    try:
        yield
    finally:
        model.around_layer = outer
        for module in outside:
            module.to(dtype)


@contextmanager
def _in_fp32(layer: Layer) -> Iterator[None]:
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
    dtype: torch.dtype,
    log: Log = quiet,
) -> dict:
    """Show that each drafter's tokens are plain decoding's, greedy and sampled with a seed, every proposed node
    verified. In the serving dtype they may differ at near-ties.

    Args:
        target: loaded as the form asks. params: greedy, with the seed.

    Returns: what a benchmark reports of it. "exact" is True after a proof in fp32, None after a weaker one or none.

    Raises: NotExact for a drafter whose tokens differ, in the serving dtype at more than a near-tie.
    """
    if not builders:
        return {}
    words = describe_form(form, dtype)
    if form == "off":
        return {"exact": None, "exact_checked": words, "proof": {"form": form, "words": words, "complete": False}}
    some, plain, greedy = prompts[:PROMPTS], Engine(target), replace(params, max_new_tokens=TOKENS)
    # Where the gap of a flip is measured, no filter may cut off one of its two tokens.
    sampled = replace(greedy, temperature=1.0, top_p=1.0 if form == "serving" else 0.95)
    flips: dict[str, list[Differences]] = {}
    compared = 0
    for name, build in builders.items():
        engine, compared = Engine(target, build(target), nodes=None), 0
        log(f"proof in {NAMES[dtype] if form == 'serving' else 'fp32'} that {name} is exact")
        for request in (greedy, sampled):
            if form == "serving":
                flips.setdefault(name, []).append(count_flips(plain, engine, name, some, request))
                compared += flips[name][-1].tokens
                continue
            right, found = ([one.tokens for one in each.generate(some, request)] for each in (plain, engine))
            if right != found:
                raise NotExact(f"exact: NO, {_difference(name, right, found)}; no speed is worth a number")
            compared += sum(map(len, right))
    how = f"{compared} tokens a drafter in {words}, greedy and T 1{'' if form == 'serving' else ' with top-p 0.95'}"
    proof: dict[str, Any] = {"form": form, "words": words, "complete": form != "serving"}
    if flips:
        proof["flips"] = {name: asdict(_together(counted)) for name, counted in flips.items()}
    return {"exact": None if form == "serving" else True, "exact_checked": how, "proof": proof}


def _difference(name: str, right: list[list[int]], found: list[list[int]]) -> str:
    """The first token that differs, in words."""
    for i, (expected, tokens) in enumerate(zip(right, found, strict=True)):
        for t, (a, b) in enumerate(zip_longest(expected, tokens)):
            if a != b:
                return f"{name} differs from plain decoding in fp32 at prompt {i}, token {t}: {b} instead of {a}"
    raise AssertionError("nothing differs")


@dataclass(frozen=True)
class Differences:
    """How many of a drafter's tokens differ from plain decoding's, each after plain decoding's text.

    Attributes:
        largest_gap: largest difference between the logits (with the noise) of the two tokens of a flip.
        near_tie: the gap that the dtype's own rounding may flip, None if there was no flip.
    """

    flips: int
    tokens: int
    largest_gap: float = 0.0
    near_tie: float | None = None


def _together(found: Sequence[Differences]) -> Differences:
    near_ties = [one.near_tie for one in found if one.near_tie is not None]
    flips, tokens = (sum(getattr(one, name) for one in found) for name in ("flips", "tokens"))
    return Differences(flips, tokens, max(one.largest_gap for one in found), max(near_ties, default=None))


def count_flips(
    plain: Engine, engine: Engine, name: str, prompts: Sequence[list[int]], params: SamplingParams
) -> Differences:
    """Count where an engine's tokens differ from plain decoding's, in any dtype. After each difference the engine
    continues from plain decoding's token; that is comparable because the noise depends on the position alone.

    Args:
        name: of the engine's drafter. params: for every prompt, without filters and penalties.

    Raises: NotExact if the two tokens of a flip are further apart than rounding explains.
    """
    target, right = plain.target, [one.tokens for one in plain.generate(prompts, params)]
    rest, gaps = list(zip(prompts, right, strict=True)), []
    while rest:
        requests = [replace(params, max_new_tokens=len(expected)) for _, expected in rest]
        found = [one.tokens for one in engine.generate([prompt for prompt, _ in rest], requests)]
        after_flips = []
        for (prompt, expected), tokens in zip(rest, found, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=True)) if a != b), None)
            if at is not None:
                gaps.append(_gap(target, prompt + expected[:at], expected[at], tokens[at], params))
                if expected[at + 1 :]:
                    after_flips.append((prompt + expected[: at + 1], expected[at + 1 :]))
        rest = after_flips
    count = sum(map(len, right))
    if not gaps:
        return Differences(0, count)
    near_tie = NEAR_TIE * _width_error(target, prompts[0] + right[0], len(prompts[0]) - 1, engine)
    if max(gaps) > near_tie:
        raise NotExact(
            f"exact: NO, {name} has a token instead of plain decoding's where the two are {max(gaps):.3f} apart, and "
            f"rounding turns {near_tie:.3f} at most; no speed is worth a number"
        )
    return Differences(len(gaps), count, max(gaps), near_tie)


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
