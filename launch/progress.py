"""A command's progress on standard error: how far it is, how long the rest will take, and what it does."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from itertools import accumulate

from tqdm.contrib import DummyTqdmFile

from longdraft.benchmarks.progress import Phase, Watch
from longdraft.data_prep.bars import bar

FORM = "{desc}: {percentage:3.0f}%|{bar:10}| about {remaining} left{postfix}"


class Progress(Watch):
    """A Watch that shows progress. What others write to standard error meanwhile appears on lines above."""

    def __init__(self, name: str):
        self._name, self._open = name, ExitStack()

    def __enter__(self) -> "Progress":
        # Phases take turns and differ in speed, so the mean speed says most. Nothing is drawn before the first begins.
        shown = bar(desc=self._name, bar_format=FORM, mininterval=0.5, smoothing=0, leave=False, delay=1e-9)
        self._bar = self._open.enter_context(shown)
        if sys.stderr.isatty():
            self._open.enter_context(redirect_stderr(DummyTqdmFile(sys.stderr)))  # pyright: ignore[reportArgumentType]
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def plan(self, phases: Sequence[Phase]) -> None:
        self._phases, self._number = list(phases), -1
        self._ends = list(accumulate((phase.cost * phase.slow for phase in phases), initial=0.0))
        self._bar.total = self._ends[-1]

    def begin(self, name: str) -> None:
        names, is_first = [phase.name for phase in self._phases], self._number < 0
        self._number = names.index(name, self._number + 1)
        self._bar.set_postfix_str(name, refresh=is_first)
        self._bar.update(self._ends[self._number] - self._bar.n)  # what the phases before have left out, too

    def advance(self, cost: float) -> None:
        left = self._ends[self._number + 1] - self._bar.n
        self._bar.update(min(cost * self._phases[self._number].slow, left))
