"""How far a work of several parts is and how long the rest will take, from what its parts took so far.

Not here: which parts there are (benchmarks/drafters.py), and how it is shown (launch/progress.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# Seconds of work after which a measurement counts half: a machine's neighbours come and go.
HALF_LIFE = 30.0
STALL = 5.0  # seconds without news


@dataclass(frozen=True)
class Part:
    """A stretch of work. `cost`: how much there is to do, in any unit; `kind`: parts of one kind are at one speed;
    `slow`: what a unit should take beside one of the other parts, as long as none of its kind was measured."""

    words: str
    kind: str
    cost: float
    slow: float = 1.0


class Watch(Protocol):
    """Who is told how a work goes on."""

    def plan(self, parts: Sequence[Part]) -> None:
        """All parts, in order, before the first begins."""

    def begin(self, words: str) -> None:
        """This part begins; those before it are over."""

    def advance(self, cost: float) -> None:
        """So much of the running part's cost is done."""


class Unwatched:
    """Nobody looks."""

    def plan(self, parts: Sequence[Part]) -> None: ...

    def begin(self, words: str) -> None: ...

    def advance(self, cost: float) -> None: ...


class _Speed:
    """Seconds a unit of cost, of late."""

    def __init__(self):
        self.seconds = self.cost = 0.0

    def add(self, seconds: float, cost: float) -> None:
        fade = 0.5 ** (seconds / HALF_LIFE)
        self.seconds, self.cost = self.seconds * fade + seconds, self.cost * fade + cost


class TimeLeft:
    """The account of a work's parts.

    Attributes:
        parts: as planned. number: index of the running one, -1 before the first.
    """

    def __init__(self, parts: Sequence[Part], clock: Callable[[], float] = time.monotonic):
        self.parts, self.number = list(parts), -1
        self._clock, self._at, self._done = clock, clock(), 0.0
        self._speeds: dict[str, _Speed] = {part.kind: _Speed() for part in parts}
        self._all, self._spent = _Speed(), 0.0

    @property
    def part(self) -> Part | None:
        """The running one."""
        return self.parts[self.number] if 0 <= self.number < len(self.parts) else None

    @property
    def share(self) -> float:
        """How much of the running part is done, 0 to 1."""
        return min(1.0, self._done / self.part.cost) if self.part and self.part.cost else 0.0

    def begin(self, words: str | None, measured: bool = True) -> None:
        """The next part of these words begins, or with None all are over. measured: whether the time of the part that
        ends says anything about speed."""
        if self.part is not None and measured:
            self._add(max(0.0, self.part.cost - self._done))
        self._at, self._done = self._clock(), 0.0
        ahead = [part.words for part in self.parts[self.number + 1 :]]
        self.number = len(self.parts) if words is None else self.number + 1 + ahead.index(words)

    def advance(self, cost: float) -> None:
        """So much of the running part is done, in all the time since it was last said."""
        self._add(cost)
        self._done += cost

    def _add(self, cost: float) -> None:
        assert self.part is not None, "no part has begun"
        now = self._clock()
        self._speeds[self.part.kind].add(now - self._at, cost)
        self._all.add(now - self._at, cost * self.part.slow)
        self._spent, self._at = self._spent + now - self._at, now

    def seconds(self) -> float | None:
        """What is left, by the speeds of late; None before anything was measured.

        What was not measured yet is taken to be at the speed of the rest beside what was planned.
        """
        if not self._all.cost or self._all.seconds < 1e-3:
            return None
        # A stretch in which nothing is done counts as it grows: a neighbour may have come.
        waited = self._clock() - self._at
        waited = waited if waited > STALL and self.part is not None else 0.0
        left = 0.0
        for index in range(max(self.number, 0), len(self.parts)):
            part = self.parts[index]
            own = self._speeds[part.kind]
            if own.cost:
                a_unit = (own.seconds + waited) / own.cost
            else:
                a_unit = part.slow * (self._all.seconds + waited) / self._all.cost
            left += a_unit * (max(0.0, part.cost - self._done) if index == self.number else part.cost)
        return left


def in_words(seconds: float) -> str:
    """A duration as people say it."""
    seconds = max(1, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
