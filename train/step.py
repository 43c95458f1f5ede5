"""One training step: its rows, the passes of target and draft, the backward passes, the update; and its metrics.

A step's loss weighs all labels of its rows equally, whichever rank and pass they are in; `Method.loss_weights` weighs
its parts. The host runs ahead of a GPU: in a step that is neither logged nor saved it waits only where DeepSpeed does,
at the weight update (under ZeRO-3 after each pass). So the all-reduce at a step's end is read when the next step
begins, and before anything is logged or saved. The result is the same as if the host had waited; only the error about
too many skipped passes is raised later.
Shapes: P parts of the loss.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.kernels.linear_loss import LinearLoss
from longdraft.kernels.transfer import HostCopy, Moment, from_host
from longdraft.models.drafts.base import TOP_K
from longdraft.train.batches import EpochRow, rank_rows, read_batch, step_rows
from longdraft.train.config import OptimizerSection
from longdraft.train.estimate import operations
from longdraft.train.methods.base import MicroBatch
from longdraft.train.ranks import TrainingError, log
from longdraft.train.setup import Run, StepInput

# Dense bf16 TFLOP/s by PyTorch's name of the GPU, from NVIDIA's data sheets.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0, "NVIDIA H200": 989.4, "NVIDIA GH200 480GB": 989.4, "NVIDIA B200": 2250.0,
    "NVIDIA L40S": 362.0, "NVIDIA RTX A6000": 154.8, "NVIDIA GeForce RTX 4090": 165.2,
}  # fmt: skip


@dataclass
class StepResult:
    """One rank's result of a step. `loss`: each part's sum over this rank's labels [P], on its device. `n_labels` [P]:
    the number of labels on all ranks. `seconds`: the duration of the step. `target_seconds`: that of the target's
    passes; 0 if the step is not logged."""

    loss: LinearLoss
    n_labels: list[float]
    seconds: float
    target_seconds: float


def train_step(run: Run) -> StepResult | None:
    """Take one step on this rank's rows. Returns None and leaves the weights unchanged if `run.stop` was non-empty on
    any rank before the step or during any pass but the last."""
    train, ranks = run.config.train, run.ranks
    if run.next_input is None:  # the run's first step
        run.next_input = _read_input(run, run.step)
        begin_step_sum(run)
    stopping, n_labels = finish_step_sum(run)
    if stopping:
        return None
    is_logged = run.is_due(run.step + 1, run.config.log.every)
    if is_logged:
        _wait_for(ranks.device)
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(ranks.device)  # `measure` reads the step's peak
    begin = time.perf_counter()
    inputs, run.next_input = run.next_input, None
    weights_P = from_host(torch.tensor(run.method.loss_weights(n_labels)), ranks.device)
    run.engine.set_rate(learning_rate(run.step, train.n_steps, run.config.optimizer))
    losses: list[LinearLoss] = []
    laps: list[tuple[Moment, Moment]] = []  # start and end of the target's passes
    flags: list[HostCopy] = []  # whether each pass is skipped
    vote: Callable[[], list[float]] | None = None
    for number, micro_batch in enumerate(inputs.micro_batches, start=1):
        loss, is_skipped, lap = _forward(run, micro_batch.to(ranks.device), is_logged)
        laps.append(lap)
        flags.append(HostCopy(is_skipped))
        last = number == len(inputs.micro_batches)
        # The ranks vote in one pass and read the result in the next, so that none waits for another.
        previous, vote = vote, None if last else ranks.begin_sum([float(bool(run.stop))])
        if previous is not None and previous()[0]:
            if vote is not None:
                vote()
            return None
        if last and run.step + 1 < train.n_steps:  # now, since DeepSpeed then waits for the gradient
            run.next_input = _read_input(run, run.step + 1)
        run.engine.backward((loss.sums * weights_P).sum(), is_skipped)
        losses.append(LinearLoss(*(field.detach() for field in loss)))
    begin_step_sum(run, _count_skipped_passes(run, inputs.rows_by_pass, flags))
    # If the norm of the full gradient is not finite, DeepSpeed leaves weights and optimizer unchanged.
    if not run.engine.deepspeed.was_step_applied():
        ranks.log(f"The gradient of step {run.step + 1} is not finite; the step is skipped")
        run.skipped += 1
    loss = LinearLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    target_seconds = 0.0
    if is_logged:
        _wait_for(ranks.device)
        target_seconds = sum(begun.seconds_to(ended) for begun, ended in laps)
    return StepResult(loss, n_labels, time.perf_counter() - begin, target_seconds)


def begin_step_sum(run: Run, n_skipped: int = 0) -> None:
    """Start the one all-reduce at a step's end: the passes that this rank skipped, whether it wants to stop, and the
    label counts of the next step's rows."""
    n_labels = () if run.next_input is None else run.next_input.n_labels
    run.sums = run.ranks.begin_sum([n_skipped, float(bool(run.stop)), *n_labels])


def finish_step_sum(run: Run) -> tuple[bool, list[float]]:
    """Wait for `begin_step_sum`. Returns whether any rank wants to stop, and the next step's number of labels on all
    ranks for each part of the loss. Skipped passes are added to `run.skipped` once. All ranks call it before a step is
    logged, saved or followed by another.

    Raises TrainingError above train.max_skipped.
    """
    n_skipped, stopping, *n_labels = run.sums()
    run.sums = lambda: [0.0, stopping, *n_labels]
    run.skipped += int(n_skipped)
    most = run.config.train.max_skipped
    if run.skipped > most:
        raise TrainingError(
            f"step {run.step}: losses or gradients that were not finite: {run.skipped}, more than train.max_skipped = "
            f"{most}; earlier checkpoints are good: lower optimizer.peak_lr and start a new run, or inspect these rows"
        )
    return bool(stopping), n_labels


def learning_rate(step: int, steps: int, optimizer: OptimizerSection) -> float:
    """The rate of step 0, 1, ...: a linear warm-up to the peak, then a cosine that would reach 0 at `steps`."""
    warmup = optimizer.warmup_steps or 0
    if step < warmup:
        return optimizer.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return optimizer.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_input(run: Run, step: int) -> StepInput:
    """This rank's input of step 0, 1, ..."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    rows_by_pass = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    batches = [read_batch(run.rows, of_pass) for of_pass in rows_by_pass]
    micro_batches = [run.method.micro_batch(batch, run.teacher.own_span(len(batch.tokens))) for batch in batches]
    n_labels = [sum(n) for n in zip(*(micro_batch.n_labels for micro_batch in micro_batches), strict=True)]
    return StepInput(rows_by_pass, micro_batches, n_labels)


def _forward(
    run: Run, micro_batch: MicroBatch, count_top_k: bool
) -> tuple[LinearLoss, torch.Tensor, tuple[Moment, Moment]]:
    """Run target and draft over one pass.

    Returns the loss; whether the pass is skipped because its loss is not finite, a bool on the device so that the host
    need not wait for it; and the start and end of the target's pass. A skipped pass contributes nothing; the other
    ranks' rows still count. A pass without rows takes part in the collectives with a zero gradient.
    """
    method, teacher, device = run.method, run.teacher, run.ranks.device
    batch, objective = micro_batch.batch, run.config.train.distillation(run.step)
    needs = method.needs if objective is None else method.needs | {"post_norm"}
    begun = Moment(device, time.perf_counter)
    output = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, needs)
    lap = begun, Moment(device, time.perf_counter)
    distillation = None
    if objective is not None:
        assert output.post_norm is not None
        states_ND = teacher.gather(output.post_norm, len(batch.tokens))
        distillation = method.distillation(micro_batch, states_ND, objective)
    given = method.inputs(micro_batch, output, teacher), micro_batch.parts, teacher.lm_head_VD
    loss: LinearLoss = run.engine.deepspeed(*given, count_top_k, distillation)
    is_skipped = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows skip them together
    return LinearLoss(*(field.masked_fill(is_skipped, 0) for field in loss)), is_skipped, lap


def _count_skipped_passes(run: Run, rows_by_pass: Sequence[list[EpochRow]], flags: Sequence[HostCopy]) -> int:
    """Log and count this rank's passes that were skipped because their loss was not finite. A pass that several ranks
    share counts once, a pass without rows not at all."""
    if run.ranks.rank % run.config.train.sequence_parallel:
        return 0
    skipped = [rows for rows, flag in zip(rows_by_pass, flags, strict=True) if flag.lists()[0] and rows]
    for rows in skipped:
        names = ", ".join(f"{row} (epoch {epoch})" for epoch, row in rows)
        log(f"The loss of step {run.step + 1} is not finite for rows {names}")
    return len(skipped)


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's record in metrics.jsonl, over all ranks. All ranks call it, after `finish_step_sum`.

    `loss`: the minimised loss, which `objective` names; None without labels. `part_loss`: each part's mean, in nats.
    `top1`, `top3`: the share of each part's labels that are the draft's first candidate, or among its first three. All
    three are None for a part without labels. `over_target`: the step's time over that of the target's passes, on the
    first rank; r in estimate.py is what it would be at equal speed. `tflops_per_rank`: counted operations of a rank (a
    GPU or a CPU process), in 10^12 a second. `share_of_peak`: that over the GPU's bf16 peak, if PEAKS has it.
    `peak_memory_gib`: the tensors' peak on the GPU that used most.
    """
    loss, n_parts, ranks, train = result.loss, len(run.method.part_names), run.ranks, run.config.train
    sums = torch.cat([loss.sums[:, None], loss.top_k_counts, loss.n_labels[:, None]], dim=1).double()
    totals = torch.tensor(ranks.sum(sums.flatten().tolist())).view(n_parts, TOP_K + 2)
    loss_sums = totals[:, 0].tolist()
    weights = run.method.loss_weights(result.n_labels)
    rates = [(row[1:-1].cumsum(0) / row[-1]).tolist() if row[-1] else [None] * TOP_K for row in totals]
    tokens = train.global_batch * run.config.data.seq_len
    distillation = train.distillation(run.step - 1)
    loss_sum = sum(total * weight for total, weight in zip(loss_sums, weights, strict=True))
    record = {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": loss_sum if any(result.n_labels) else None,
        "objective": distillation[0] if distillation else "cross_entropy",
        "part_loss": [total / n if n else None for total, n in zip(loss_sums, result.n_labels, strict=True)],
        "top1": [part[0] for part in rates],
        "top3": [part[-1] for part in rates],
        "lr": learning_rate(run.step - 1, train.n_steps, run.config.optimizer),
        "grad_norm": float(run.engine.deepspeed.get_global_grad_norm()),  # pyright: ignore[reportArgumentType]
        "skipped": run.skipped,
        "step_s": result.seconds,
        "tokens_per_s": tokens / result.seconds,
        "tokens_per_s_per_rank": tokens / result.seconds / ranks.world_size,
        "over_target": result.seconds / result.target_seconds,
    }
    if run.config.target.loader == "longdraft":
        counted = operations(run.config.draft, run.config.data, train.loss, run.teacher.model.config)
        operations_s = counted.of_step(tokens, sum(result.n_labels)) / result.seconds
        record["tflops_per_rank"] = operations_s / 1e12 / ranks.world_size
    if ranks.device.type == "cuda":
        peak = PEAKS.get(torch.cuda.get_device_name(ranks.device))
        if peak and "tflops_per_rank" in record and train.precision == "bf16":
            record["share_of_peak"] = record["tflops_per_rank"] / peak
        record["peak_memory_gib"] = max(ranks.gather(torch.cuda.max_memory_allocated(ranks.device))) / 2**30
    return record
