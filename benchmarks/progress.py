"""Estimates how long work of several phases will still take, from the time its phases have taken so far.

Not here: which phases a bench has (benchmarks/drafters.py), and how progress is shown (launch/progress.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# After this many seconds of work a measurement counts half: a machine's neighbours come and go.
HALF_LIFE = 30.0
STALL = 5.0  # seconds without progress, from which on the wait itself counts


@dataclass(frozen=True)
class Phase:
    """A phase of the work.

    Attributes:
        kind: phases of the same kind are assumed to run at the same speed.
        cost: how much there is to do, in any unit.
        slow: how many times longer a unit takes than in other phases; used until a phase of this kind was measured.
    """

    name: str
    kind: str
    cost: float
    slow: float = 1.0


class Watch:
    """Is told about the progress of the work; this base class ignores it."""

    def plan(self, phases: Sequence[Phase]) -> None:
        """Receive all phases, in order, before the first begins."""

    def begin(self, name: str) -> None:
        """The phase of this name begins, and all before it are over."""

    def advance(self, cost: float) -> None:
        """Another `cost` of the running phase is done."""


UNWATCHED = Watch()


class _Speed:
    """Seconds and cost of recent work; older work fades."""

    def __init__(self):
        self.seconds = self.cost = 0.0

    def add(self, seconds: float, cost: float) -> None:
        fade = 0.5 ** (seconds / HALF_LIFE)
        self.seconds, self.cost = self.seconds * fade + seconds, self.cost * fade + cost


class TimeLeft:
    """Estimates the remaining time.

    Attributes:
        phases: as planned. number: index of the running phase, -1 before the first.
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
        """Begin the next phase of this name, or end the last one (None). measured: whether the time of the phase that
        ends says anything about speed."""
        if self.phase is not None and measured:
            self._add(max(0.0, self.phase.cost - self._done))
        self._at, self._done = self._clock(), 0.0
        ahead = [phase.name for phase in self.phases[self.number + 1 :]]
        self.number = len(self.phases) if name is None else self.number + 1 + ahead.index(name)

    def advance(self, cost: float) -> None:
        """Another `cost` of the running phase was done in the time since the last call."""
        self._add(cost)
        self._done += cost

    def _add(self, cost: float) -> None:
        assert self.phase is not None, "no phase has begun"
        now = self._clock()
        self._speeds[self.phase.kind].add(now - self._at, cost)
        self._all.add(now - self._at, cost * self.phase.slow)
        self._spent, self._at = self._spent + now - self._at, now

    def seconds(self) -> float | None:
        """Return the seconds that are left at recent speeds, or None if nothing has been measured.

        A kind of phase that has not run yet is assumed to run at the average speed, scaled by its `slow`.
        """
        if not self._all.cost or self._all.seconds < 1e-3:
            return None
        # A stall counts while it lasts: a neighbour may have come.
        waited = self._clock() - self._at
        waited = waited if waited > STALL and self.phase is not None else 0.0
        left = 0.0
        for index in range(max(self.number, 0), len(self.phases)):
            phase = self.phases[index]
            speed = self._speeds[phase.kind]
            if speed.cost:
                per_unit = (speed.seconds + waited) / speed.cost
            else:
                per_unit = phase.slow * (self._all.seconds + waited) / self._all.cost
            left += per_unit * (max(0.0, phase.cost - self._done) if index == self.number else phase.cost)
        return left


def duration(seconds: float) -> str:
    """Words for a time, such as "3 min 05 s"."""
    seconds = max(1, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
