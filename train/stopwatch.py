"""Where the time of a step goes, without making the host wait for a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Adds up the time spent in each named part. On a GPU it uses events, and waits for them when it is read.

    A `running` one first waits for the device's outstanding work; one that is not running costs nothing.
    """

    def __init__(self, device: torch.device, running: bool):
        self._device, self._running, self._cuda = device, running, device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        if running and self._cuda:
            torch.cuda.synchronize(device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self._running:
            yield
            return
        begin = self._now()
        yield
        self._laps.append((name, begin, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by part; empty where it was not running."""
        if not self._running:
            return {}
        if self._cuda:
            torch.cuda.synchronize(self._device)
        total: dict[str, float] = {}
        for name, begin, end in self._laps:
            total[name] = total.get(name, 0.0) + (begin.elapsed_time(end) / 1000 if self._cuda else end - begin)
        return total

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
