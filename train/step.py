"""One step of training: its rows, the target's passes, the draft's, the backward passes, and the update.

A step's loss counts all labels of its rows alike, whichever rank and pass they are in; `Method.loss_weights` says how
its parts weigh. The host runs ahead of a GPU: in a step that is neither logged nor saved it waits for what DeepSpeed
waits for where the weights move, and for nothing else. So what the ranks sum at a step's end is read when the next
step begins, and before anything is logged or saved. What training gives is the same as if the host had waited; only the
error of too many passes left out comes later.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.kernels.transfer import HostCopy, Moment, from_host
from longdraft.models.drafts.loss import DraftLoss
from longdraft.train import checkpoint
from longdraft.train.batches import EpochRow, rank_rows, read_batch, step_rows
from longdraft.train.methods.base import MicroBatch
from longdraft.train.ranks import TrainingError, log
from longdraft.train.run import Run, StepInput


@dataclass
class StepResult:
    """One rank's result of a step. `loss`: sums [P] over its labels of each part of the loss, on its device.
    `n_labels` [P]: the labels of all ranks. `rate`: the learning rate. `seconds`: the whole step. `parts`: seconds in
    the target's passes, the draft's and the backward passes, where the step is logged."""

    loss: DraftLoss
    n_labels: list[float]
    rate: float
    seconds: float
    parts: dict[str, float]


class Clock:
    """Adds up the seconds of each named part of a step. On a GPU it measures there, and waits when it is read. One that
    is not `running` costs nothing."""

    def __init__(self, device: torch.device, running: bool):
        self._device, self._running = device, running
        self._laps: list[tuple[str, Moment, Moment]] = []
        self._wait()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self._running:
            yield
            return
        begin = Moment(self._device, time.perf_counter)
        yield
        self._laps.append((name, begin, Moment(self._device, time.perf_counter)))

    def seconds(self) -> dict[str, float]:
        """Seconds by part; empty where it was not running."""
        self._wait()
        total: dict[str, float] = {}
        for name, begin, end in self._laps:
            total[name] = total.get(name, 0.0) + begin.seconds_to(end)
        return total

    def _wait(self) -> None:
        if self._running and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def begin_sums(run: Run, n_left_out: int = 0) -> None:
    """Begin to sum over the ranks what `read_sums` reads: at a step's end, `n_left_out` of this rank's passes left out,
    the wish to stop, and the labels of the next step's rows."""
    n_labels = () if run.next_input is None else run.next_input.n_labels
    run.sums = run.ranks.begin_sum([n_left_out, float(bool(run.stop)), *n_labels])


def read_sums(run: Run) -> tuple[bool, list[float]]:
    """Whether any rank wished to stop, and all ranks' labels of each part of the next step's loss. The passes left out
    are counted the first time. All ranks call it before a step is logged, saved or followed by another.

    Raises TrainingError above train.max_skipped.
    """
    assert run.sums is not None
    n_left_out, *others = run.sums()
    run.sums = lambda: [0, *others]
    count_skipped(run, int(n_left_out), run.step)
    return bool(others[0]), others[1:]


def count_skipped(run: Run, n: int, step: int) -> None:
    """Add n to the passes and steps that were left out; raises TrainingError above train.max_skipped."""
    run.skipped += n
    if run.skipped > run.config.train.max_skipped:
        raise TrainingError(
            f"step {step}: {run.skipped} times a loss or gradient was not a number, more than train.max_skipped "
            f"= {run.config.train.max_skipped}; {checkpoint.what_is_good(run.config.train.run_dir)}: lower "
            "optimizer.peak_lr and start a new run, or look at these rows"
        )


def train_step(run: Run) -> StepResult | None:
    """Take one step on this rank's rows. Returns None, with nothing done, if any rank had something in `run.stop`
    before the step or during a pass before its last one."""
    train, ranks = run.config.train, run.ranks
    if run.sums is None:  # the run's first step
        run.next_input = _read_input(run, run.step)
        begin_sums(run)
    stopping, n_labels = read_sums(run)
    if stopping:
        return None
    is_logged = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    clock = Clock(ranks.device, running=is_logged)
    if is_logged and ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)  # step_metrics.py reads the step's peak
    begin = time.perf_counter()
    inputs, run.next_input = run.next_input, None
    assert inputs is not None
    weights_P = from_host(torch.tensor(run.method.loss_weights(n_labels)), ranks.device)
    rate = run.engine.begin_step(run.step)
    losses: list[DraftLoss] = []
    flags: list[HostCopy] = []  # of passes left out
    vote: Callable[[], list[float]] | None = None
    for number, (micro_batch, places) in enumerate(zip(inputs.micro_batches, inputs.places, strict=True), start=1):
        loss, left_out = _forward(run, micro_batch.to(ranks.device), places, is_logged, clock)
        flags.append(HostCopy(left_out))
        last = number == len(inputs.micro_batches)
        # The ranks vote in one pass and read the result in the next, so that none waits for another.
        previous, vote = vote, None if last else ranks.begin_sum([float(bool(run.stop))])
        if previous is not None and previous()[0]:
            if vote is not None:
                vote()
            return None
        if last and run.step + 1 < train.n_steps:  # now, since DeepSpeed will then wait for the gradient
            run.next_input = _read_input(run, run.step + 1)
        with clock.part("backward"):
            run.engine.backward((loss.sums * weights_P).sum(), left_out)
        losses.append(DraftLoss(*(field.detach() for field in loss)))
    begin_sums(run, _count_left_out(run, inputs.places, flags))
    if not run.engine.stepped():
        names = _row_names(inputs.all_rows)
        ranks.log(f"The gradient of step {run.step + 1} is not a number, the step is left out; rows {names}")
        count_skipped(run, 1, run.step + 1)
    loss = DraftLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    parts = clock.seconds()
    return StepResult(loss, n_labels, rate, time.perf_counter() - begin, parts)


def _count_left_out(run: Run, places: Sequence[list[EpochRow]], flags: Sequence[HostCopy]) -> int:
    """Log and count this rank's passes that were left out as their loss was not a number; those of ranks that share
    rows count once."""
    if run.ranks.rank % run.config.train.sequence_parallel:
        return 0
    left_out = [of_pass for of_pass, flag in zip(places, flags, strict=True) if flag.lists()[0]]
    for of_pass in left_out:
        log(f"The loss of step {run.step + 1} is not a number for rows {_row_names(of_pass)}")
    return len(left_out)


def _row_names(places: Sequence[EpochRow]) -> str:
    return ", ".join(f"{place.row} (epoch {place.epoch})" for place in places)


def _read_input(run: Run, step: int) -> StepInput:
    """This rank's passes of step 0, 1, ..."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    places = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    micro_batches = [_read_micro_batch(run, of_pass, step) for of_pass in places]
    n_labels = [sum(n) for n in zip(*(micro_batch.n_labels for micro_batch in micro_batches), strict=True)]
    return StepInput(rows, places, micro_batches, n_labels)


def _read_micro_batch(run: Run, places: list[EpochRow], step: int) -> MicroBatch:
    batch = read_batch(run.rows, places)
    micro_batch = run.method.micro_batch(batch, run.teacher.own_span(len(batch.tokens)))
    distillation = run.config.train.distillation(step)
    return run.method.with_distillation(micro_batch, *distillation) if distillation else micro_batch


def _forward(
    run: Run, micro_batch: MicroBatch, places: list[EpochRow], count_ranks: bool, clock: Clock
) -> tuple[DraftLoss, torch.Tensor]:
    """Target and draft of one pass.

    Returns the loss, and whether the pass is left out because its loss is not a number: bool, on the device, so that
    the host does not wait to know. Such a pass counts for nothing, and the other ranks' rows still count. A pass
    without rows takes part in the collectives, and its gradient is zero.
    """
    method, teacher = run.method, run.teacher
    batch, plan = micro_batch.batch, micro_batch.distillation
    spans = None if plan is None else plan.spans
    with clock.part("target"):
        output = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, method.needs, spans)
    distillation = None
    if plan is not None:
        assert output.of_spans is not None
        distillation = plan.with_states(output.of_spans)
    arguments = method.arguments(micro_batch, output, teacher)
    if not places:  # whatever the target makes of the placeholder token, numbers or not
        arguments = tuple(_zeros(argument) for argument in arguments)
    with clock.part("draft"):
        loss: DraftLoss = run.engine.deepspeed(*arguments, teacher.lm_head_VD, count_ranks, distillation)
    left_out = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows leave them out together
    return DraftLoss(*(field.masked_fill(left_out, 0) for field in loss)), left_out


def _zeros(argument: Any) -> Any:
    """Zeros in place of a floating-point tensor; anything else as it is."""
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return torch.zeros_like(argument) if is_float else argument
