"""What long work tells about its progress. launch/progress.py shows it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A phase of the work.

    Attributes:
        cost: how much there is to do, in any unit.
        slow: how many times longer a unit takes than in other phases.
    """

    name: str
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
