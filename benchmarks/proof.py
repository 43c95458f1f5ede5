"""That a drafter's tokens are plain decoding's, shown before a benchmark times anything; in fp32 wherever that fits.

In fp32 passes of different widths agree to the last bits, so that one token that differs is a bug. The forms, from the
best on: "fp32", the whole target loaded in it; "layerwise", all layers in fp32 as well, but one at a time, which takes
little more memory than serving does; "serving", the dtype of the speeds, where tokens may differ at near-ties alone and
those that do are counted; "off" shows nothing, and says so. Not here: the measurements (benchmarks/measure.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from longdraft.benchmarks.measure import choice_logits, decode
from longdraft.benchmarks.progress import Watch
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.memory import layer_weights, size
from longdraft.infer.sampling import SamplingParams, SlotSampling
from longdraft.models.decoder import Decoder, Layer
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.passes import feed_forward_numbers
from longdraft.models.target import Target

FORMS = ("fp32", "layerwise", "serving", "off")
PROMPTS, TOKENS = 2, 24
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# A drafter for a target whose dtype is settled.
Builder = Callable[[Target], Drafter]
# What the estimate leaves room for: rows of a prefill pass, rows behind a text for a tree and steps not read yet, and
# this much on top, for what PyTorch keeps between allocations.
PREFILL_ROWS, SLACK_ROWS, MARGIN = 2048, 256, 1.1
# Two passes that are each off by an error make a flip of at most twice the error. It is taken from as many positions as
# the proof has, and so may be larger at another: twice again.
NEAR_TIE = 4


class NotExact(RuntimeError):
    """A drafter's tokens are not plain decoding's."""


@dataclass(frozen=True)
class Room:
    """Bytes that a benchmark has and needs.

    Attributes:
        free: of the device; None where nobody tells.
        prompt_tokens: of the longest prompt. longest: positions of the longest text that is timed.
        beside: what lies on the device besides target and cache: drafts, other models.
    """

    free: int | None
    prompt_tokens: int
    longest: int
    beside: int = 0


def choose_form(asked: str | None, config: DecoderConfig, dtype: torch.dtype, room: Room) -> str:
    """The form that was asked for, or the first that fits; dtype: that of the speeds.

    Raises: ValueError where it does not fit, with what would; also where not even the speeds' dtype does.
    """
    possible = ("fp32", "off") if dtype == torch.float32 else FORMS
    if asked is not None and asked not in possible:
        raise ValueError(f"--exactness: {asked}, but --dtype fp32 holds the whole target in fp32; leave it out")
    needed = {form: needed_bytes(form, config, dtype, room) for form in possible}
    fitting = [form for form in possible if room.free is None or needed[form] <= room.free]
    shown = [form for form in fitting if form != "off"]
    if asked in fitting or (asked is None and shown):
        return asked or shown[0]
    free = size(room.free or 0)
    if not shown:
        least = min(needed, key=needed.__getitem__)
        raise ValueError(
            f"--target: it needs {size(needed[least])} in {NAMES[dtype]} with a cache of {room.longest} positions, and "
            f"{free} is free; take a smaller target, a larger device or fewer --prompt-tokens"
        )
    ways = " or ".join(f"{form} ({size(needed[form])})" for form in shown)
    raise ValueError(
        f"--exactness: {asked} needs {size(needed[str(asked)])}, and {free} is free; give {ways}, or leave it out"
    )


def needed_bytes(form: str, config: DecoderConfig, dtype: torch.dtype, room: Room) -> int:
    """The most that target, caches and passes take, in the proof or while speeds are taken."""
    layer, outside = layer_weights(config)
    whole = config.n_layers * layer + outside
    weights = {"fp32": 4 * whole, "layerwise": dtype.itemsize * config.n_layers * layer + 4 * (layer + outside)}
    row = 2 * config.n_layers * config.n_kv_heads * config.head_dim
    wide = dtype.itemsize if form in ("serving", "off") else 4
    proof = weights.get(form, dtype.itemsize * whole) + _passes(config, PROMPTS, wide)
    proof += PROMPTS * (room.prompt_tokens + TOKENS + SLACK_ROWS) * row * wide
    speeds = dtype.itemsize * whole + _passes(config, 1, dtype.itemsize)
    speeds += (room.longest + SLACK_ROWS) * row * dtype.itemsize
    return int(MARGIN * max(proof, speeds)) + room.beside


def _passes(config: DecoderConfig, n_slots: int, wide: int) -> int:
    """The widest tensors alive at once, of numbers of so many bytes: a prefill's rows, a verification's logits."""
    rows = PREFILL_ROWS * (config.hidden_size + feed_forward_numbers(config))
    return wide * (rows + 2 * n_slots * SLACK_ROWS * config.vocab_size)


def describe_form(form: str, dtype: torch.dtype) -> str:
    """Which form it is, and what of the target it shows."""
    whole = "fp32, all layers"
    forms = {"fp32": whole, "layerwise": f"{whole}, one at a time", "off": "nothing: --exactness off"}
    return forms.get(form, f"{NAMES[dtype]} alone")


def first_dtype(form: str, dtype: torch.dtype) -> torch.dtype:
    """What the target is loaded in for a proof of this form; dtype: that of the speeds."""
    return torch.float32 if form == "fp32" else dtype


@contextmanager
def fp32_layer_by_layer(model: Decoder) -> Iterator[None]:
    """Inside, all of the model is computed in fp32, with the weights it has: embedding, norm and head are converted
    once, each layer around its work. No step is recorded then (infer/graphs.py)."""
    outer, parts = model.around_layer, (model.embed_tokens, model.norm, model.lm_head)
    dtype = model.embed_tokens.weight.dtype
    for part in parts:
        part.to(torch.float32)
    model.around_layer = _in_fp32
    try:
        yield
    finally:
        model.around_layer = outer
        for part in parts:
            part.to(dtype)


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


def ways(form: str, params: SamplingParams) -> dict[str, SamplingParams]:
    """The requests of a proof, out of a greedy one; none where nothing is shown.

    Where a flip's gap is looked at, no filter cuts one side off.
    """
    if form == "off":
        return {}
    params = replace(params, max_new_tokens=TOKENS)
    sampled = replace(params, temperature=1.0, top_p=1.0 if form == "serving" else 0.95)
    return {"greedy": params, "sampled": sampled}


def phase_name(name: str, way: str, form: str, dtype: torch.dtype, count: int) -> str:
    """How a drafter's part of the proof is called; count: prompts."""
    together = "1 prompt" if count == 1 else f"{count} prompts together"
    precision = NAMES[dtype] if form == "serving" else "fp32"
    return f"proof in {precision} that {name} is exact, {way}, {together}"


def prove(
    target: Target,
    builders: Mapping[str, Builder],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    form: str,
    dtype: torch.dtype,
    watch: Watch,
) -> dict:
    """Tokens == tokens, greedy and seeded, every proposed node verified; in the serving dtype but for near-ties.

    Args:
        target: as the form has it. params: greedy, with the seed.

    Returns: what a benchmark says of it: "exact" is True after a proof in fp32, None after one that had to make do and
    after none.

    Raises: NotExact for a drafter whose tokens differ, in the serving dtype at more than a near-tie.
    """
    if not builders:
        return {}
    if form == "off":
        nothing = describe_form(form, dtype)
        return {"exact": None, "exact_checked": nothing, "proof": {"form": form, "words": nothing, "complete": False}}
    some, requests, plain = prompts[:PROMPTS], ways(form, params), Engine(target)
    found: dict[str, list[Differences]] = {}
    compared = 0
    for name, build in builders.items():
        engine, compared = Engine(target, build(target), nodes=None), 0
        for way, request in requests.items():
            watch.begin(phase_name(name, way, form, dtype, len(some)))
            if form == "serving":
                found.setdefault(name, []).append(count_flips(plain, engine, name, some, request, watch))
                compared += found[name][-1].tokens
                continue
            wanted, given = ([g.tokens for g in decode(one, some, request, watch)] for one in (plain, engine))
            if wanted != given:
                raise NotExact(
                    f"exact: NO, {name}'s tokens in fp32 differ from plain decoding's; no speed is worth a number"
                )
            compared += sum(map(len, wanted))
    how = f"{compared} tokens a drafter in {describe_form(form, dtype)}, greedy and T 1"
    how += "" if form == "serving" else " with top-p 0.95"
    result: dict = {"exact": None if form == "serving" else True, "exact_checked": how}
    result["proof"] = {"form": form, "words": describe_form(form, dtype), "complete": form != "serving"}
    if found:
        result["proof"]["flips"] = {name: asdict(_together(parts)) for name, parts in found.items()}
    return result


@dataclass(frozen=True)
class Differences:
    """How many of a drafter's tokens are not plain decoding's, each behind plain decoding's text.

    `largest_gap`: between the logits (with the noise) of two tokens that stand for each other; `near_tie`: the gap that
    the dtype's own rounding may turn, None where there was no flip.
    """

    flips: int
    tokens: int
    largest_gap: float = 0.0
    near_tie: float | None = None


def _together(parts: Sequence[Differences]) -> Differences:
    ties = [part.near_tie for part in parts if part.near_tie is not None]
    return Differences(
        sum(part.flips for part in parts),
        sum(part.tokens for part in parts),
        max(part.largest_gap for part in parts),
        max(ties, default=None),
    )


def count_flips(
    plain: Engine, engine: Engine, name: str, prompts: Sequence[list[int]], params: SamplingParams, watch: Watch
) -> Differences:
    """Plain decoding's tokens against an engine's, in any dtype. Where they differ, the engine goes on behind plain
    decoding's token: the noise is the position's.

    Args:
        name: of the engine's drafter. params: of every prompt, without filters and penalties.

    Raises: NotExact where two tokens that stand for each other are further apart than rounding explains.
    """
    target, wanted = plain.target, [generation.tokens for generation in decode(plain, prompts, params, watch)]
    rest, gaps = list(zip(prompts, wanted, strict=True)), []
    while rest:
        asked = [replace(params, max_new_tokens=len(tokens)) for _, tokens in rest]
        found = [generation.tokens for generation in decode(engine, [prompt for prompt, _ in rest], asked, watch)]
        behind = []
        for (prompt, want), tokens in zip(rest, found, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(want, tokens, strict=True)) if a != b), None)
            if at is not None:
                gaps.append(_gap(target, prompt + want[:at], want[at], tokens[at], params, watch))
                behind += [(prompt + want[: at + 1], want[at + 1 :])] if want[at + 1 :] else []
        rest = behind
    count = sum(map(len, wanted))
    if not gaps:
        return Differences(0, count)
    near_tie = NEAR_TIE * _width_error(target, prompts[0] + wanted[0], len(prompts[0]) - 1, engine, watch)
    if max(gaps) > near_tie:
        raise NotExact(
            f"exact: NO, {name} has a token instead of plain decoding's where the two are {max(gaps):.3f} apart, and "
            f"rounding turns {near_tie:.3f} at most; no speed is worth a number"
        )
    return Differences(len(gaps), count, max(gaps), near_tie)


@torch.no_grad()
def _gap(target: Target, text: list[int], chosen: int, other: int, params: SamplingParams, watch: Watch) -> float:
    """How far apart two tokens behind a text are for plain decoding, in logits."""
    logits_1V = choice_logits(target, text, len(text) - 1, 1, watch)
    device = logits_1V.device
    position_1, history = torch.tensor([len(text) - 1], device=device), History(1, 1, device)  # for penalties: none
    scores_V = SlotSampling([params], device).scores(logits_1V, history, position_1)[0].float()
    return abs(float(scores_V[chosen] - scores_V[other])) * (params.temperature or 1.0)


def _width_error(target: Target, text: list[int], start: int, engine: Engine, watch: Watch) -> float:
    """The largest difference of a logit between passes of one row and of as many as this engine's widest."""
    narrow, wide = (choice_logits(target, text, start, width, watch) for width in (1, 1 + engine.drafter.max_nodes))
    return float((narrow.float() - wide.float()).abs().max())
