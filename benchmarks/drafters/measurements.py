"""Single measurements of decoding: how the dtype's rounding flips choices, and the cost of a pass by its width.

Shapes: T tokens, N rows of a pass, V vocabulary.
"""

import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longdraft.benchmarks.drafters.provenance import hardware, provenance
from longdraft.benchmarks.drafters.timing import seconds_of, take_turns
from longdraft.infer.graphs import graphs_for
from longdraft.kernels.cpu.library import decoding
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass, prompt_rows
from longdraft.models.target import Target

Log = Callable[[str], object]  # is told what begins
WIDTHS, REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40), 7  # of a width curve


def quiet(_: str) -> None:
    """A log that is not kept."""


@torch.no_grad()
def width_curve(
    target: Target,
    context: int,
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
) -> dict[int, float]:
    """Return the median seconds of a target pass (with the logits of all rows) by its width, behind `context` cached
    tokens. The widths take turns; passes are recorded and replayed wherever decoding's are (infer/graphs.py)."""
    model = target.model
    generator = torch.Generator().manual_seed(0)
    device = model.embed_tokens.weight.device
    cache = model.new_cache(1, context + max(widths))
    head = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(device)
    rows = torch.randint(model.config.vocab_size, (1, max(widths)), generator=generator).to(device)
    _prefill(target, cache, head)
    graphs = graphs_for(None, model)
    # The first turn warms up; in the second one, passes are recorded on a GPU.
    warm_up = 2 if graphs.recording else 1

    def logits(rows_BN: Tensor) -> Tensor:
        found = model(Pass(rows_BN, cache=cache, needs={"logits"})).logits
        assert found is not None
        return found

    def run(width: int) -> None:
        with decoding(device.type == "cpu"):
            graphs.run(("width",), (model, cache), logits, rows[:, :width], widest=width)

    runs = {width: partial(run, width) for width in widths}
    take_turns(runs, warm_up)
    return {
        width: statistics.median(seconds)
        for width, seconds in take_turns(runs, repeats, partial(seconds_of, device=device)).items()
    }


def _prefill(target: Target, cache: KVCache, tokens_1T: Tensor) -> None:
    """Fill the empty cache with these tokens, in passes as wide as decoding's."""
    for chunk in tokens_1T.split(prompt_rows(tokens_1T.device.type), dim=1):
        target.model(Pass(chunk, cache=cache, needs={"last_kv"}))
        cache.commit(None, torch.tensor([chunk.shape[1]], device=chunk.device))


@torch.no_grad()
def choice_logits(target: Target, tokens: Sequence[int], start: int, width: int) -> Tensor:
    """Logits [T - start, V] behind each of tokens[start:], from passes of `width` rows on a cache of those before."""
    model = target.model
    device = model.embed_tokens.weight.device
    cache = model.new_cache(1, len(tokens) + width)
    rows = torch.tensor([list(tokens)], device=device)
    _prefill(target, cache, rows[:, :start])
    logits = []
    for chunk in rows[:, start:].split(width, dim=1):
        logits.append(model(Pass(chunk, cache=cache)).logits[0])
        cache.commit(None, torch.tensor([chunk.shape[1]], device=device))
    return torch.cat(logits)


@dataclass(frozen=True)
class Flips:
    """How often passes of `width` rows choose another token than passes of one row, over `positions` greedy choices.

    Attributes:
        largest_gap: largest difference between the logits of the two tokens of a flip.
        dtype_error: largest difference of a logit from fp32's, None if none were computed in fp32. A gap above twice
            this error is a bug, not a near-tie.
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
) -> Flips:
    """Compare one-row and `width`-row passes over the same text. fp32_logits_TV: `choice_logits` of one row in fp32."""
    single = choice_logits(target, tokens, start, 1).float()
    wide = choice_logits(target, tokens, start, width).float()
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
    """Let `peak_memory_mib` count from here on, on a GPU."""
    weight = target.model.embed_tokens.weight
    if weight.is_cuda:
        torch.cuda.reset_peak_memory_stats(weight.device)


def peak_memory_mib(target: Target) -> int:
    """Peak memory of the GPU since `forget_peak_memory`, or of this process since it began."""
    weight = target.model.embed_tokens.weight
    if weight.is_cuda:
        return round(torch.cuda.max_memory_allocated(weight.device) / 2**20)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def surroundings(target: Target) -> dict:
    weight = target.model.embed_tokens.weight
    return provenance(weight.dtype, ("longdraft", "torch", "transformers")) | {
        "target": target.name,
        "device": hardware(weight.device),
        "on_gpu": weight.is_cuda,
        "peak_memory_mib": peak_memory_mib(target),
    }
