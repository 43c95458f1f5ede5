"""How far a piece of work with several phases is, and how long the rest will take, from what its phases took so far.

Not here: which phases there are (benchmarks/drafters.py), and how it is shown (launch/progress.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Seconds of work after which a measurement counts half: a machine's neighbours come and go.
HALF_LIFE = 30.0
STALL = 5.0  # seconds without news


@dataclass(frozen=True)
class Phase:
    """A phase of the work.

    Attributes:
        kind: phases of one kind run at one speed.
        cost: how much there is to do, in any unit.
        slow: how much longer a unit takes than one of the other phases, until one of this kind was measured.
    """

    name: str
    kind: str
    cost: float
    slow: float = 1.0


class Watch:
    """What is told how the work goes on; this one keeps it to itself."""

    def plan(self, phases: Sequence[Phase]) -> None:
        """All phases, in order, before the first begins."""

    def begin(self, name: str) -> None:
        """This phase begins; those before it are over."""

    def advance(self, cost: float) -> None:
        """So much of the running phase's cost is done."""


UNWATCHED = Watch()


class _Speed:
    """Seconds a unit of cost, of late."""

    def __init__(self):
        self.seconds = self.cost = 0.0

    def add(self, seconds: float, cost: float) -> None:
        fade = 0.5 ** (seconds / HALF_LIFE)
        self.seconds, self.cost = self.seconds * fade + seconds, self.cost * fade + cost


class TimeLeft:
    """Estimates the time that is left.

    Attributes:
        phases: as planned. number: index of the running one, -1 before the first.
    """

    def __init__(self, phases: Sequence[Phase], clock: Callable[[], float] = time.monotonic):
        self.phases, self.number = list(phases), -1
        self._clock, self._at, self._done = clock, clock(), 0.0
        self._speeds: dict[str, _Speed] = {phase.kind: _Speed() for phase in phases}
        self._all, self._spent = _Speed(), 0.0

    @property
    def phase(self) -> Phase | None:
        return self.phases[self.number] if 0 <= self.number < len(self.phases) else None

    @property
    def fraction(self) -> float:
        """How much of the running phase is done, 0 to 1."""
        return min(1.0, self._done / self.phase.cost) if self.phase and self.phase.cost else 0.0

    def begin(self, name: str | None, measured: bool = True) -> None:
        """The next phase of this name begins; None: all are over. measured: whether the time of the phase that ends
        says anything about speed."""
        if self.phase is not None and measured:
            self._add(max(0.0, self.phase.cost - self._done))
        self._at, self._done = self._clock(), 0.0
        ahead = [phase.name for phase in self.phases[self.number + 1 :]]
        self.number = len(self.phases) if name is None else self.number + 1 + ahead.index(name)

    def advance(self, cost: float) -> None:
        """So much of the running phase is done, in all the time since the last call."""
        self._add(cost)
        self._done += cost

    def _add(self, cost: float) -> None:
        assert self.phase is not None, "no phase has begun"
        now = self._clock()
        self._speeds[self.phase.kind].add(now - self._at, cost)
        self._all.add(now - self._at, cost * self.phase.slow)
        self._spent, self._at = self._spent + now - self._at, now

    def seconds(self) -> float | None:
        """What is left, by the speeds of late; None before anything was measured.

        What was not measured yet is taken to be at the speed of the rest beside what was planned.
        """
        if not self._all.cost or self._all.seconds < 1e-3:
            return None
        # A stretch in which nothing is done counts as it grows: a neighbour may have come.
        waited = self._clock() - self._at
        waited = waited if waited > STALL and self.phase is not None else 0.0
        left = 0.0
        for index in range(max(self.number, 0), len(self.phases)):
            phase = self.phases[index]
            own = self._speeds[phase.kind]
            if own.cost:
                a_unit = (own.seconds + waited) / own.cost
            else:
                a_unit = phase.slow * (self._all.seconds + waited) / self._all.cost
            left += a_unit * (max(0.0, phase.cost - self._done) if index == self.number else phase.cost)
        return left


def duration(seconds: float) -> str:
    seconds = max(1, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
