"""A bench's progress on standard error: how far it is, how long the rest will take, and what it does."""

from collections.abc import Sequence
from itertools import accumulate

from longdraft.benchmarks.drafters.progress import Phase, Watch
from longdraft.data_prep.progress_bar import progress_bar

FORM = "{desc}: {percentage:3.0f}%|{bar:10}| about {remaining} left{postfix}"


class Progress(Watch):
    """A Watch that shows a bar. Use it as a context manager."""

    def __init__(self, name: str):
        self._name, self._bar = name, None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def plan(self, phases: Sequence[Phase]) -> None:
        self._phases, self._number = list(phases), -1
        self._ends = list(accumulate((phase.cost * phase.slow for phase in phases), initial=0.0))

    def begin(self, name: str) -> None:
        over, names = self._number + 1, [phase.name for phase in self._phases]
        self._number = names.index(name, over)
        skipped = self._ends[self._number] - self._ends[over]  # took no time
        if self._bar is None:
            # Phases take turns and differ in speed, so the mean speed says most.
            shown = {"bar_format": FORM, "mininterval": 0.5, "smoothing": 0, "leave": False, "postfix": name}
            self._bar = progress_bar(desc=self._name, total=self._ends[-1], initial=skipped, **shown)
            return
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.initial += skipped
        self._bar.update(self._ends[self._number] - self._bar.n)  # what the phase before has left out, too

    def advance(self, cost: float) -> None:
        assert self._bar is not None, "no phase has begun"
        left = self._ends[self._number + 1] - self._bar.n
        self._bar.update(min(cost * self._phases[self._number].slow, left))
