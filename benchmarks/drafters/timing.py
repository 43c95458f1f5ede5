"""Times calls in turns and the target's passes by width, measures peak memory, and makes prompts to time."""

import resource
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from longdraft.infer.graphs import graphs_for
from longdraft.infer.slot_pool import tune_for
from longdraft.kernels.cpu.library import decoding
from longdraft.models.decoder import Decoder
from longdraft.models.passes import Pass

SPUN_OUT = 0.02  # seconds after which idle threads on a CPU have stopped spinning
WIDTHS, REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 64), 7  # of a width curve
Name = TypeVar("Name")
Log = Callable[[str], object]  # called with what is about to start


def seconds_of(run: Callable[[], Any], device: torch.device | None = None) -> float:
    """Wall-clock seconds of a call, including the work it queued on the device."""
    begin = time.perf_counter()
    run()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def take_turns(
    runs: Mapping[Name, Callable[[], Any]],
    repeats: int,
    clock: Callable[[Callable[[], Any]], float] = seconds_of,
) -> dict[Name, list[float]]:
    """Time the runs in turns and return the seconds of each. clock: times one run."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(clock(run))
    return seconds


@torch.no_grad()
def width_curve(
    model: Decoder, context: int, widths: Sequence[int] = WIDTHS, repeats: int = REPEATS
) -> dict[int, float]:
    """Return the median seconds of a target pass (with the logits of all rows) by its width, after `context` random
    cached rows. The widths take turns."""
    device, generator = model.embed_tokens.weight.device, torch.Generator().manual_seed(0)
    cache = model.new_cache(1, context + max(widths))
    cache.keys.normal_()
    cache.values.normal_()
    cache.commit(None, torch.tensor([context], device=device))
    tune_for(model, cache.capacity, 1, widths, print)
    rows_1N = torch.randint(model.config.vocab_size, (1, max(widths)), generator=generator).to(device)
    graphs = graphs_for(None, model)

    def logits(rows_BN: Tensor) -> Tensor:
        found = model(Pass(rows_BN, cache=cache, needs={"logits"})).logits
        assert found is not None
        return found

    def run(width: int) -> None:
        with decoding(device.type == "cpu"):
            graphs.run(("width",), (model, cache), logits, rows_1N[:, :width], widest=width)

    runs = {width: partial(run, width) for width in widths}
    take_turns(runs, 2 if graphs.recording else 1)  # the first turn warms up, the second one records
    seconds = take_turns(runs, repeats, partial(seconds_of, device=device))
    return {width: statistics.median(of) for width, of in seconds.items()}


def stdlib_prompts(encode: Callable[[str], list[int]], n_tokens: int, count: int) -> list[list[int]]:
    """`count` evenly spaced stretches of `n_tokens` tokens from the source of Python's module textwrap."""
    tokens = encode(Path(textwrap.__file__).read_text(encoding="utf-8"))
    starts = [i * (len(tokens) - n_tokens) // count for i in range(count)]
    return [tokens[start : start + n_tokens] for start in starts]


def peak_memory_mib(device: torch.device) -> int:
    """Peak memory of this process since it began: of the GPU, or of the CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The peak bytes that a call allocates beyond what was allocated before. Uses PyTorch's profiler on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, now)
    return peak
