"""What the ranks agree on in a step: how many passes were left out as their loss was not a number, and whether to stop.

The host runs ahead of a GPU, so nothing here is waited for when it is asked: a flag or a sum that one pass begins is
read while the next one runs, and all of them before anything is logged or saved. What training gives is the same as if
the host had waited. A message comes a pass late, and the error of too many left out up to a step late.
"""

from collections.abc import Callable, Sequence

import torch

from longdraft.kernels.transfer import HostCopy
from longdraft.train import checkpoint
from longdraft.train.batches import Place
from longdraft.train.ranks import TrainingError, log
from longdraft.train.run import Run


class LeftOutPasses:
    """Counts and logs this rank's passes of a step that were left out. A pass's flag is on the device; it is read once
    the next pass is queued, so that the device always has work."""

    def __init__(self, run: Run):
        self._step = run.step + 1
        self._logs = run.ranks.rank % run.config.train.sequence_parallel == 0  # one of the ranks that share rows
        self._unread: tuple[list[Place], HostCopy] | None = None
        self._n_left_out = 0

    def add(self, places: list[Place], left_out: torch.Tensor) -> None:
        previous, self._unread = self._unread, (places, HostCopy(left_out))
        self._read(previous)

    def count(self) -> int:
        """The number of passes left out, once the last one was added."""
        self._read(self._unread)
        return self._n_left_out

    def _read(self, flag: tuple[list[Place], HostCopy] | None) -> None:
        if flag is not None and flag[1].lists()[0] and self._logs:
            self._n_left_out += 1
            log(f"The loss of step {self._step} is not a number for rows {row_names(flag[0])}")


class StopVotes:
    """Whether any rank wishes to stop. The ranks vote in one pass and read the result in the next, so that none waits
    for another."""

    def __init__(self, run: Run):
        self._run = run
        self._vote: Callable[[], list[float]] | None = None

    def stop_in_pass(self, last: bool) -> bool:
        """The result of the previous pass's vote. A new vote begins unless this is the step's last pass."""
        previous, self._vote = self._vote, None if last else self._run.ranks.begin_sum([float(bool(self._run.stop))])
        if previous is None or not previous()[0]:
            return False
        if self._vote is not None:
            self._vote()
        return True


def begin_agreement(run: Run, n_left_out: int = 0) -> None:
    """Begin to sum over the ranks what `await_agreement` reads; `n_left_out` of this rank's passes were left out."""
    run.agreement = run.ranks.begin_sum([n_left_out, float(bool(run.stop))])


def await_agreement(run: Run) -> bool:
    """Whether any rank wishes to stop after a step, once its left-out passes are counted. All ranks call it before the
    step is logged, saved or followed by another; where that was read already, it returns False.

    Raises TrainingError above train.max_skipped.
    """
    if run.agreement is None:
        return False
    (n_left_out, stopping), run.agreement = run.agreement(), None
    count_skipped(run, int(n_left_out), run.step)
    return bool(stopping)


def count_skipped(run: Run, n: int, step: int) -> None:
    """Add n to the passes and steps that were left out; raises TrainingError above train.max_skipped."""
    run.skipped += n
    if run.skipped > run.config.train.max_skipped:
        raise TrainingError(
            f"step {step}: {run.skipped} times a loss or gradient was not a number, more than train.max_skipped "
            f"= {run.config.train.max_skipped}; {checkpoint.what_is_good(run.config.train.run_dir)}: lower "
            "optimizer.peak_lr and start a new run, or look at these rows"
        )


def row_names(places: Sequence[Place]) -> str:
    return ", ".join(f"{place.row} (epoch {place.epoch})" for place in places)
