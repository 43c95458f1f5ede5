"""Proves that a drafter's tokens are plain decoding's before a benchmark times anything, in fp32 wherever that fits.

In fp32, passes of different widths agree to within the last bits, so a single token that differs is a bug. The forms of
the proof, the strongest first:

  fp32       the whole target is loaded in fp32
  layerwise  all layers are computed in fp32, but converted one at a time: little more memory than serving takes
  serving    in the dtype of the speeds; tokens may differ only at near-ties, and those that differ are counted
  off        nothing is proved, and the result says so
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.timing import Log, quiet
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.footprint import cache_rows, layer_weights, pass_bytes, size, size_of
from longdraft.models.layer import Layer
from longdraft.models.passes import Pass, prompt_rows
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
    form = asked or next(iter(fitting), "off")
    if form not in fitting or (form == "off" and asked is None):
        ways = ", ".join(f"{one} takes {size(count)}" for one, count in needed.items() if one != "off")
        raise ValueError(
            f"{'--exactness' if fitting else '--target'}: {form} does not fit with a cache of {room.longest} "
            f"positions: {ways}, and {size(room.free or 0)} is free; give another --exactness, a smaller target or "
            "fewer tokens"
        )
    loaded = f"Loading in {NAMES[first_dtype(form, dtype)]}, to show exactness in {describe_form(form, dtype)}"
    return form, f"{loaded}: takes {size(needed[form])}"


def needed_bytes(form: str, config: DecoderConfig, dtype: torch.dtype, room: Room) -> int:
    """Bytes of target, caches and passes at the peak, in the proof or while speeds are measured."""
    layer, outside = layer_weights(config)
    whole = config.n_layers * layer + outside
    weights = {"fp32": 4 * whole, "layerwise": dtype.itemsize * config.n_layers * layer + 4 * (layer + outside)}
    speeds = dtype.itemsize * whole

    def decoding(slots: int, positions: int, computed: torch.dtype) -> int:
        cache = cache_rows(config, slots * (positions + SLACK_ROWS), computed)
        logits = (2 * slots * SLACK_ROWS, config.vocab_size), computed
        return size_of([*cache, logits]) + pass_bytes(config, PREFILL_ROWS, computed)

    in_proof = torch.float32 if form in weights else dtype
    proof = weights.get(form, speeds) + decoding(PROMPTS, room.prompt_tokens + TOKENS, in_proof)
    return int(MARGIN * max(proof, speeds + decoding(1, room.longest, dtype))) + room.beside


def describe_form(form: str, dtype: torch.dtype) -> str:
    """The form in words: in which precision the target is, and which part of it."""
    return {
        "fp32": "fp32, all layers",
        "layerwise": "fp32, all layers, one at a time",
        "serving": f"{NAMES[dtype]} alone",
        "off": "nothing: --exactness off",
    }[form]


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
        target: loaded as `first_dtype` says; inside `fp32_layer_by_layer` for the form "layerwise".
        params: seed and end tokens of the requests.
        dtype: that of the speeds.

    Returns: `exact` (None if it was not proved in fp32), `exact_checked` (what was compared, in words) and `proof`: the
        form, and for "serving" the `count_flips` of each drafter. Nothing if there is no drafter.

    Raises: NotExact for a drafter whose tokens differ, in the serving dtype at more than a near-tie.
    """
    if not builders:
        return {}
    words = describe_form(form, dtype)
    if form == "off":
        return {"exact": None, "exact_checked": words, "proof": {"form": form}}
    serving, some, plain = form == "serving", prompts[:PROMPTS], Engine(target)
    # Where the gap of a flip is measured, no filter may cut off one of its two tokens.
    greedy = replace(params, max_new_tokens=TOKENS)
    both = greedy, replace(greedy, temperature=1.0, top_p=1.0 if serving else 0.95)
    found = {}
    for name, build in builders.items():
        engine = Engine(target, build(target), nodes=None)
        log(f"proof in {NAMES[dtype] if serving else 'fp32'} that {name} is exact")
        found[name] = count_flips(plain, engine, name, some, both, exactly=not serving)
    tokens = next(iter(found.values()))["tokens"]
    how = f"{tokens} tokens a drafter in {words}, greedy and T 1{'' if serving else ' with top-p 0.95'}"
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
        name: of the engine's drafter.
        several: the parameters, each for every prompt; without filters and penalties unless `exactly`.
        exactly: no token may differ.

    Returns: the counts `flips` and `tokens`, `largest_gap` between the logits (with the noise) of the two tokens of a
        flip, and `near_tie`, the gap that rounding may flip (None if there was no flip).

    Raises: NotExact if a token differs, or else if the two tokens of a flip are further apart than rounding explains.
    """
    flips, tokens, largest, near_tie = 0, 0, 0.0, 0.0
    for params in several:
        right = [one.tokens for one in plain.generate(prompts, params)]
        gaps = [
            _gap(plain.target, *flip, params)
            for flip in _flips(engine, name, zip(prompts, right, strict=True), params, exactly)
        ]
        flips, tokens = flips + len(gaps), tokens + sum(map(len, right))
        if not gaps:
            continue
        rounding = NEAR_TIE * _width_error(plain.target, prompts[0] + right[0], len(prompts[0]) - 1, engine)
        if max(gaps) > rounding:
            raise NotExact(
                f"exact: NO, {name} has a token instead of plain decoding's where the two are {max(gaps):.3f} apart, "
                f"and rounding turns {rounding:.3f} at most; no speed is worth a number"
            )
        largest, near_tie = max(largest, *gaps), max(near_tie, rounding)
    return {"flips": flips, "tokens": tokens, "largest_gap": largest, "near_tie": near_tie if flips else None}


def _flips(
    engine: Engine, name: str, texts: Iterable[tuple[list[int], list[int]]], params: SamplingParams, exactly: bool
) -> Iterator[tuple[list[int], int, int]]:
    """Decode pairs of a prompt and plain decoding's tokens, and yield for each token that differs the text before it,
    plain decoding's token, and the engine's."""
    rest = list(texts)
    while rest:
        requests = [params if exactly else replace(params, max_new_tokens=len(expected)) for _, expected in rest]
        found = [one.tokens for one in engine.generate([prompt for prompt, _ in rest], requests)]
        pairs, rest = list(zip(rest, found, strict=True)), []
        for i, ((prompt, expected), tokens) in enumerate(pairs):
            at = next((t for t, (a, b) in enumerate(zip_longest(expected, tokens)) if a != b), None)
            if at is None:
                continue
            if exactly or len(tokens) != len(expected):
                of_each = " instead of ".join(str(list(some[at : at + 1])) for some in (tokens, expected))
                raise NotExact(
                    f"exact: NO, {name} differs from plain decoding in fp32 at prompt {i}, token {at}: {of_each}; no "
                    "speed is worth a number"
                )
            yield prompt + expected[:at], expected[at], tokens[at]
            if expected[at + 1 :]:
                rest.append((prompt + expected[: at + 1], expected[at + 1 :]))


@torch.no_grad()
def choice_logits(target: Target, tokens: Sequence[int], start: int, width: int) -> Tensor:
    """Logits [T - start, V] behind each of the T tokens from `start` on, from passes of `width` rows on a cache of
    those before."""
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
