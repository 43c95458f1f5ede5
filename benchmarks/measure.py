"""Single measurements of decoding: speed like with like, exactness, bf16 flips, the cost of a pass by its width.

Every figure comes from this process: same prompts, same loop, warmed up alike, methods taken in turns. Not here: which
of them a benchmark makes (benchmarks/drafters.py).
Shapes: T tokens, N rows of a pass, V vocabulary.
"""

import resource
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from longdraft.benchmarks import record
from longdraft.benchmarks.progress import UNWATCHED, Phase, Watch
from longdraft.benchmarks.timing import seconds_of, take_turns
from longdraft.infer.engine import Engine
from longdraft.infer.graphs import graphs_for
from longdraft.infer.results import Generation
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu_impl.rows import decoding
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, prompt_rows
from longdraft.models.target import Target

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40)


def summarise(generations: Sequence[Generation]) -> dict[str, Any]:
    """Totals of one drafter over generations that ran one at a time, with times in milliseconds a step.

    `commit_ms` is accepting, committing and what drafters do of it; `host_ms` is all beside proposals and the target's
    passes, `host_share` its fraction of a step; [d] of `acceptance_by_depth` is the fraction of steps that accepted at
    least d + 1 nodes.
    """
    stats = [generation.stats for generation in generations]
    tokens, steps = sum(len(g.tokens) for g in generations), sum(s.steps for s in stats)
    seconds, drafted = sum(s.decode_seconds for s in stats), sum(s.drafted for s in stats)
    depths = [sum(level) for level in zip_longest(*(s.accepted_at_depth for s in stats), fillvalue=0)]
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "acceptance": sum(depths) / max(drafted, 1),
        "acceptance_by_depth": [count / steps for count in depths],
        "tokens_per_second": tokens / seconds,
        "first_token_seconds": statistics.mean(s.first_token_seconds for s in stats),
        **{
            f"{name}_ms": 1e3 * sum(getattr(s, f"{name}_seconds") for s in stats) / steps
            for name in ("draft", "target", "commit", "host")
        },
        "host_share": sum(s.host_seconds for s in stats) / seconds,
        "nodes_per_step": drafted / steps,
        "decisions": stats[-1].decisions,
    }


def rounded(figures: Any) -> Any:
    """Figures to what a clock can tell, for JSON."""
    if isinstance(figures, dict):
        return {key: rounded(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [rounded(value) for value in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


def prefill_cost(tokens: int) -> float:
    """What a prompt costs beside a step of plain decoding, about; for estimates of the time left alone."""
    return tokens / 8


def decode_cost(prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """The same of decoding these prompts."""
    return sum(prefill_cost(len(prompt)) + new_tokens for prompt in prompts)


def decode(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams], watch: Watch
) -> list[Generation]:
    """`Engine.generate`, watched."""
    done: list[Generation] = []
    begun: set[int] = set()
    for piece in engine.stream(prompts, params):
        watch.advance(len(piece.tokens) + (0 if piece.index in begun else prefill_cost(len(prompts[piece.index]))))
        begun.add(piece.index)
        done += [piece.generation] if piece.generation else []
    return sorted(done, key=lambda generation: generation.index)


def turn_name(what: str, name: str, number: int, count: int) -> str:
    """How a timed prompt is called."""
    return f"{what} {name}, prompt {number} of {count}"


def decode_in_turns(
    engines: Mapping[str, Engine], prompts: Sequence[list[int]], params: SamplingParams, watch: Watch, what: str
) -> dict[str, list[Generation]]:
    """Decode every prompt with every engine, one prompt at a time and the engines in turns, after a warm-up of each.

    The warm-up is on another text, so that no drafter has seen an answer that is timed. what: how it is called.
    """
    watch.begin(f"{what} warm-up")
    for engine in engines.values():
        decode(engine, [prompts[0][::-1]], _warm_up(params), watch)
    done: dict[str, list[Generation]] = {name: [] for name in engines}
    for number, prompt in enumerate(prompts, start=1):
        for name, engine in engines.items():
            watch.begin(turn_name(what, name, number, len(prompts)))
            done[name] += decode(engine, [prompt], params, watch)
    return done


def _warm_up(params: SamplingParams) -> SamplingParams:
    return replace(params, max_new_tokens=min(16, params.max_new_tokens))


def plan_turns(names: Sequence[str], prompts: Sequence[list[int]], params: SamplingParams, what: str) -> list[Phase]:
    """The parts of `decode_in_turns`."""
    warm_up = len(names) * decode_cost(prompts[:1], _warm_up(params).max_new_tokens)
    return [Phase(f"{what} warm-up", "warm-up", warm_up)] + [
        Phase(turn_name(what, name, number, len(prompts)), name, decode_cost([prompt], params.max_new_tokens))
        for number, prompt in enumerate(prompts, start=1)
        for name in names
    ]


def same_tokens(one: Sequence[list[int]], other: Sequence[list[int]]) -> tuple[int, int]:
    """How many tokens of the same prompts are equal, of how many."""
    pairs = [pair for texts in zip(one, other, strict=True) for pair in zip_longest(*texts)]
    return sum(a == b for a, b in pairs), len(pairs)


def _pass_cost(width: int) -> float:
    """A pass of so many rows beside one of a single row, about."""
    return 1 + width / 8


def width_curve_cost(context: int, widths: Sequence[int] = WIDTHS, repeats: int = 7) -> float:
    """What `width_curve` costs, in steps of plain decoding."""
    return prefill_cost(context) + (repeats + 1) * sum(map(_pass_cost, widths))


@torch.no_grad()
def width_curve(
    target: Target,
    context: int,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 7,
    seed: int = 0,
    watch: Watch = UNWATCHED,
) -> dict[int, float]:
    """Median seconds of a target pass (logits of all rows) of each width behind `context` cached tokens, in turns; the
    passes are recorded and replayed where decoding's are (infer/graphs.py)."""
    model = target.model
    generator = torch.Generator().manual_seed(seed)
    device = model.embed_tokens.weight.device
    cache = model.new_cache(1, context + max(widths))
    head = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(device)
    rows = torch.randint(model.config.vocab_size, (1, max(widths)), generator=generator).to(device)
    _prefill(target, cache, head, watch)
    graphs = graphs_for(None, model)
    # The first turn warms up; what is recorded on a GPU is so in the second.
    warm_up = 2 if graphs.recording else 1

    def logits(rows_BN: Tensor) -> Tensor:
        found = model(Pass(rows_BN, cache=cache, needs={"logits"})).logits
        assert found is not None
        return found

    def run(width: int) -> None:
        with decoding(device.type == "cpu"):
            graphs.run(("width",), (model, cache), logits, rows[:, :width], widest=width)
        watch.advance(_pass_cost(width))

    runs = {width: partial(run, width) for width in widths}
    take_turns(runs, warm_up)
    return {
        width: statistics.median(seconds)
        for width, seconds in take_turns(runs, repeats, partial(seconds_of, device=device)).items()
    }


def _prefill(target: Target, cache: KVCache, tokens_1T: Tensor, watch: Watch) -> None:
    """These tokens into the empty cache, in passes as decoding makes them."""
    for chunk in tokens_1T.split(prompt_rows(tokens_1T.device.type), dim=1):
        target.model(Pass(chunk, cache=cache, needs={"last_kv"}))
        cache.commit(None, torch.tensor([chunk.shape[1]], device=chunk.device))
        watch.advance(prefill_cost(chunk.shape[1]))


@torch.no_grad()
def choice_logits(target: Target, tokens: Sequence[int], start: int, width: int, watch: Watch) -> Tensor:
    """Logits behind tokens[start:], [T - start, V], from passes of `width` rows on a cache of all before."""
    model = target.model
    device = model.embed_tokens.weight.device
    cache = model.new_cache(1, len(tokens) + width)
    rows = torch.tensor([list(tokens)], device=device)
    _prefill(target, cache, rows[:, :start], UNWATCHED)
    logits = []
    for part in rows[:, start:].split(width, dim=1):
        logits.append(model(Pass(part, cache=cache)).logits[0])
        watch.advance(_pass_cost(part.shape[1]) if width > 1 else 1)
        cache.commit(None, torch.tensor([part.shape[1]], device=device))
    return torch.cat(logits)


@dataclass(frozen=True)
class Flips:
    """How far passes of `width` rows are from passes of one row in this dtype, over `positions` greedy choices.

    `largest_gap`: the largest logit gap between the two choices of a flip; `dtype_error`: the largest difference of a
    logit from fp32's, None where there was nothing in fp32 to compare with. A gap above twice that error is a bug, not
    a near-tie.
    """

    width: int
    positions: int
    flips: int
    largest_gap: float
    dtype_error: float | None


def flips(
    target: Target,
    fp32_logits_TV: Tensor | None,
    tokens: Sequence[int],
    start: int,
    width: int,
    watch: Watch = UNWATCHED,
) -> Flips:
    """Compare one-row and `width`-row passes over the same text; fp32_logits_TV from `reference_logits`."""
    single = choice_logits(target, tokens, start, 1, watch).float()
    wide = choice_logits(target, tokens, start, width, watch).float()
    chosen, other = single.argmax(-1, keepdim=True), wide.argmax(-1, keepdim=True)
    gaps = (single.gather(1, chosen) - single.gather(1, other))[chosen != other]
    return Flips(
        width,
        len(single),
        len(gaps),
        float(gaps.max()) if len(gaps) else 0.0,
        None if fp32_logits_TV is None else float((single - fp32_logits_TV).abs().max()),
    )


def reference_logits(target: Target, tokens: Sequence[int], start: int, watch: Watch = UNWATCHED) -> Tensor:
    """What `flips` compares with, from the target as it is now (fp32): [T - start, V]."""
    return choice_logits(target, tokens, start, 1, watch).float()


def transformers_cost(prompts: Sequence[list[int]], params: SamplingParams) -> float:
    """What `against_transformers` costs, in steps of plain decoding."""
    return 3 * decode_cost(prompts, params.max_new_tokens)


@torch.no_grad()
def against_transformers(
    model, plain: Engine, prompts: Sequence[list[int]], params: SamplingParams, watch: Watch = UNWATCHED
) -> tuple[float, dict[str, Any], tuple[int, int]]:
    """transformers' greedy `generate` and our plain decoding on the same prompts, in turns, both warmed up.

    The prefill's time, taken off transformers', is that of a call which generates one token.

    Returns:
        transformers' tokens/s of decoding; ours; how many tokens are equal, of how many.
    """
    model.generation_config.eos_token_id = None  # as `ignore_eos`
    device = next(model.parameters()).device

    def theirs(prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
        ids, out = torch.tensor([prompt], device=device), []
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new_tokens}
        seconds = seconds_of(
            lambda: out.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options)), device
        )
        return seconds, out[0][0, len(prompt) :].tolist()

    theirs(prompts[0], 4)
    plain.generate([prompts[0]], replace(params, max_new_tokens=4))
    seconds, tokens, generations = 0.0, [], []
    for prompt in prompts:
        prefill, _ = theirs(prompt, 1)
        whole, new = theirs(prompt, params.max_new_tokens)
        seconds += whole - prefill
        tokens.append(new)
        generations += plain.generate([prompt], params)
        watch.advance(transformers_cost([prompt], params))
    speed = sum(len(new) - 1 for new in tokens) / seconds
    return speed, summarise(generations), same_tokens([g.tokens for g in generations], tokens)


def surroundings(target: Target) -> dict:
    """Where and with what the numbers were made."""
    weight = target.model.embed_tokens.weight
    peak_bytes = (
        torch.cuda.max_memory_allocated(weight.device)
        if weight.is_cuda
        else 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return record.surroundings(weight.dtype, ("longdraft", "torch", "transformers")) | {
        "target": target.name,
        "device": record.hardware(weight.device),
        "peak_memory_mib": round(peak_bytes / 2**20),
    }
