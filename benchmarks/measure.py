"""Single measurements of decoding: bf16 flips, the cost of a pass by its width.

Not here: speeds (benchmarks/turns.py), and which of them a benchmark makes (benchmarks/drafters.py).
Shapes: T tokens, N rows of a pass, V vocabulary.
"""

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longdraft.benchmarks import record
from longdraft.benchmarks.progress import UNWATCHED, Watch
from longdraft.benchmarks.questions import Asked
from longdraft.benchmarks.timing import seconds_of, take_turns
from longdraft.infer.engine import Engine
from longdraft.infer.graphs import graphs_for
from longdraft.infer.results import Generation
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu_impl.rows import decoding
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, prompt_rows
from longdraft.models.target import Target

WIDTHS, REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40), 7  # of a width curve


def prefill_cost(tokens: int) -> float:
    """What a prompt costs beside a step of plain decoding, about; for estimates of the time left alone."""
    return tokens / 8


def decode_cost(asked: Sequence[Asked], new_tokens: int) -> float:
    """What decoding these prompts costs, likewise."""
    return sum(prefill_cost(one.tokens) + new_tokens for one in asked)


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


def _pass_cost(width: int) -> float:
    """A pass of so many rows beside one of a single row, about."""
    return 1 + width / 8


def width_curve_cost(context: int) -> float:
    """What `width_curve` costs, in steps of plain decoding."""
    return prefill_cost(context) + (REPEATS + 1) * sum(map(_pass_cost, WIDTHS))


@torch.no_grad()
def width_curve(
    target: Target,
    context: int,
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
    watch: Watch = UNWATCHED,
) -> dict[int, float]:
    """Median seconds of a target pass (logits of all rows) of each width behind `context` cached tokens, in turns; the
    passes are recorded and replayed where decoding's are (infer/graphs.py)."""
    model = target.model
    generator = torch.Generator().manual_seed(0)
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
def choice_logits(target: Target, tokens: Sequence[int], start: int, width: int, watch: Watch = UNWATCHED) -> Tensor:
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
    """Compare one-row and `width`-row passes over the same text; fp32_logits_TV: `choice_logits` of one row in fp32."""
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


def forget_peak_memory(target: Target) -> None:
    """On a GPU `peak_memory_mib` counts from here on."""
    weight = target.model.embed_tokens.weight
    if weight.is_cuda:
        torch.cuda.reset_peak_memory_stats(weight.device)


def peak_memory_mib(target: Target) -> int:
    """Of the GPU since `forget_peak_memory`, or of this process since it began."""
    weight = target.model.embed_tokens.weight
    if weight.is_cuda:
        return round(torch.cuda.max_memory_allocated(weight.device) / 2**20)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def surroundings(target: Target) -> dict:
    weight = target.model.embed_tokens.weight
    return record.surroundings(weight.dtype, ("longdraft", "torch", "transformers")) | {
        "target": target.name,
        "device": record.hardware(weight.device),
        "on_gpu": weight.is_cuda,
        "peak_memory_mib": peak_memory_mib(target),
    }
