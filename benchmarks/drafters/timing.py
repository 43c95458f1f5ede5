"""Times calls in turns, and measures the peak of allocated memory."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

SPUN_OUT = 0.02  # seconds after which idle threads on a CPU have stopped spinning
Name = TypeVar("Name")


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
    ends: Callable[[int], bool] = lambda turn: False,
) -> dict[Name, list[float]]:
    """Time the runs in turns and return the seconds of each. clock: times one run. ends: whether to stop before this
    turn."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        if ends(turn):
            break
        for name, run in runs.items():
            seconds[name].append(clock(run))
    return seconds


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call allocates at its peak beyond what was there before. Uses PyTorch's profiler on a CPU."""
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
