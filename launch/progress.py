"""A command's progress on standard error: how far it is, how long the rest will take, and what it does."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr
from itertools import accumulate

from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from longdraft.benchmarks.drafters.progress import Phase, Watch
from longdraft.data_prep.bars import bar

FORM = "{desc}: {percentage:3.0f}%|{bar:10}| about {remaining} left{postfix}"


class Progress(Watch):
    """A Watch that shows progress. What others write to standard error meanwhile appears on lines above."""

    def __init__(self, name: str):
        self._name, self._open, self._bar = name, ExitStack(), None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def plan(self, phases: Sequence[Phase]) -> None:
        self._phases, self._number = list(phases), -1
        self._ends = list(accumulate((phase.cost * phase.slow for phase in phases), initial=0.0))

    def begin(self, name: str) -> None:
        over, names = self._number + 1, [phase.name for phase in self._phases]
        self._number = names.index(name, over)
        skipped = self._ends[self._number] - self._ends[over]
        if self._bar is None:
            self._bar = self._begin_bar(skipped, name)
            return
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.initial += skipped  # took no time
        self._bar.update(self._ends[self._number] - self._bar.n)  # what the phase before has left out, too

    def _begin_bar(self, skipped: float, name: str) -> tqdm:
        # Phases take turns and differ in speed, so the mean speed says most.
        shown = {"bar_format": FORM, "mininterval": 0.5, "smoothing": 0, "leave": False, "postfix": name}
        begun = self._open.enter_context(bar(desc=self._name, total=self._ends[-1], initial=skipped, **shown))
        if sys.stderr.isatty():
            self._open.enter_context(redirect_stderr(DummyTqdmFile(sys.stderr)))  # pyright: ignore[reportArgumentType]
        return begun

    def advance(self, cost: float) -> None:
        assert self._bar is not None, "no phase has begun"
        left = self._ends[self._number + 1] - self._bar.n
        self._bar.update(min(cost * self._phases[self._number].slow, left))
