"""One step of training: its rows, the target's passes, the draft's, the backward passes, and the update.

A step's loss counts all labels of its rows alike, whichever rank and pass they are in; `Method.loss_weights` says how
its parts weigh. The host runs ahead of a GPU: in a step that is neither logged nor saved it waits for what DeepSpeed
waits for where the weights move, and for nothing else (agreement.py).
Not here: the number of steps, evaluation and saving (loop.py), networks and their loss (models/drafts/), a step's
metrics (step_metrics.py).
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.kernels.transfer import from_host
from longdraft.models.drafts.loss import DraftLoss
from longdraft.train.agreement import (
    LeftOutPasses,
    StopVotes,
    await_agreement,
    begin_agreement,
    count_skipped,
    row_names,
)
from longdraft.train.batches import Place, rank_rows, read_batch, step_rows
from longdraft.train.methods.base import MicroBatch
from longdraft.train.run import Run, StepInput
from longdraft.train.stopwatch import Stopwatch


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


def train_step(run: Run) -> StepResult | None:
    """Take one step on this rank's rows. Returns None, with nothing done, if any rank had something in `run.stop`
    before the step or during a pass before its last one."""
    train, ranks = run.config.train, run.ranks
    if run.agreement is None:  # before the first step, or where the last one's was read to log or save it
        begin_agreement(run)
    if await_agreement(run):
        return None
    is_logged = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    clock = Stopwatch(ranks.device, running=is_logged)
    if is_logged and ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)  # step_metrics.py reads the step's peak
    begin = time.perf_counter()
    inputs, run.next_input = run.next_input or _read_input(run, run.step), None
    n_labels = inputs.n_labels()
    weights_P = from_host(torch.tensor(run.method.loss_weights(n_labels)), ranks.device)
    rate = run.engine.begin_step(run.step)
    left_out_passes, stop_votes, losses = LeftOutPasses(run), StopVotes(run), []
    for number, (micro_batch, places) in enumerate(zip(inputs.micro_batches, inputs.places, strict=True), start=1):
        loss, left_out = _forward(run, micro_batch.to(ranks.device), places, is_logged, clock)
        left_out_passes.add(places, left_out)
        last = number == len(inputs.micro_batches)
        if stop_votes.stop_in_pass(last):
            return None
        if last and run.step + 1 < train.n_steps:  # now, since DeepSpeed will then wait for the gradient
            run.next_input = _read_input(run, run.step + 1)
        with clock.part("backward"):
            run.engine.backward((loss.sums * weights_P).sum(), left_out)
        losses.append(DraftLoss(*(field.detach() for field in loss)))
    begin_agreement(run, left_out_passes.count())
    if not run.engine.stepped():
        names = row_names(inputs.all_rows)
        ranks.log(f"The gradient of step {run.step + 1} is not a number, the step is left out; rows {names}")
        count_skipped(run, 1, run.step + 1)
    loss = DraftLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    parts = clock.seconds()
    return StepResult(loss, n_labels, rate, time.perf_counter() - begin, parts)


def _read_input(run: Run, step: int) -> StepInput:
    """This rank's passes of step 0, 1, ..., and the sum of all ranks' labels, under way."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    places = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    micro_batches = [_read_micro_batch(run, of_pass, step) for of_pass in places]
    rank_labels = [sum(n) for n in zip(*(micro_batch.n_labels for micro_batch in micro_batches), strict=True)]
    return StepInput(rows, places, micro_batches, ranks.begin_sum(rank_labels))


def _read_micro_batch(run: Run, places: list[Place], step: int) -> MicroBatch:
    batch = read_batch(run.rows, places)
    micro_batch = run.method.micro_batch(batch, run.teacher.own_span(len(batch.tokens)))
    distillation = run.config.train.distillation(step)
    return run.method.with_distillation(micro_batch, *distillation) if distillation else micro_batch


def _forward(
    run: Run, micro_batch: MicroBatch, places: list[Place], count_ranks: bool, clock: Stopwatch
) -> tuple[DraftLoss, torch.Tensor]:
    """Target and draft of one pass.

    Returns the loss, and whether the pass is left out because its loss is not a number: bool, on the device, so that
    the host does not wait to know. Such a pass counts for nothing, and the other ranks' rows still count. A pass
    without rows takes part in the collectives, and its gradient is zero.
    """
    method, teacher = run.method, run.teacher
    batch, distillation = micro_batch.batch, micro_batch.distillation
    spans = None if distillation is None else distillation.spans
    with clock.part("target"):
        output = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, method.needs, spans)
    teaching = None
    if distillation is not None:
        assert output.of_spans is not None
        teaching = distillation.teaching(output.of_spans)
    arguments = method.arguments(micro_batch, output, teacher)
    if not places:  # whatever the target makes of the placeholder token, numbers or not
        arguments = tuple(_zeros(argument) for argument in arguments)
    with clock.part("draft"):
        loss: DraftLoss = run.engine.deepspeed(*arguments, teacher.lm_head_VD, count_ranks, teaching)
    left_out = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows leave them out together
    return DraftLoss(*(field.masked_fill(left_out, 0) for field in loss)), left_out


def _zeros(argument: Any) -> Any:
    """Zeros in place of a floating-point tensor; anything else as it is."""
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return torch.zeros_like(argument) if is_float else argument
