"""One step of training: its rows, the target's passes, the draft's, the backward passes, the update; and its metrics.

A step's loss counts all labels of its rows alike, whichever rank and pass they are in; `Method.loss_weights` says how
its parts weigh. The host runs ahead of a GPU: in a step that is neither logged nor saved it waits for what DeepSpeed
waits for where the weights move, and for nothing else. So what the ranks sum at a step's end is read when the next
step begins, and before anything is logged or saved. The result is the same as if the host had waited; only the error
about too many skipped passes is raised later.
Shapes: P parts of the loss, K ranks counted.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from longdraft.kernels.linear_loss import LinearLoss
from longdraft.kernels.transfer import HostCopy, Moment, from_host
from longdraft.models.drafts.loss import TOP_K
from longdraft.train.batches import EpochRow, rank_rows, read_batch, step_rows
from longdraft.train.deepspeed_engine import learning_rate
from longdraft.train.estimate import Operations, operations
from longdraft.train.methods.base import MicroBatch
from longdraft.train.ranks import TrainingError, log
from longdraft.train.setup import Run, StepInput

# The parts of a step's time (`StepResult.parts`), and what they are called.
PARTS = {"target": "the target's passes", "draft": "draft and loss", "backward": "backward and update"}
# By PyTorch's name of a GPU: the TFLOP/s of its products in bf16 without sparsity, from NVIDIA's data sheets.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0, "NVIDIA H200": 989.4, "NVIDIA L40S": 362.0, "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 4090": 165.2,
}  # fmt: skip


@dataclass
class StepResult:
    """One rank's result of a step. `loss`: sums [P] over its labels of each part of the loss, on its device.
    `n_labels` [P]: the labels of all ranks. `seconds`: the whole step. `parts`: seconds in each of PARTS, where the
    step is logged."""

    loss: LinearLoss
    n_labels: list[float]
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
        total: dict[str, float] = defaultdict(float)
        for name, begin, end in self._laps:
            total[name] += begin.seconds_to(end)
        return total

    def _wait(self) -> None:
        if self._running and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def begin_step_sum(run: Run, n_left_out: int = 0) -> None:
    """Start the one all-reduce at a step's end: `n_left_out` passes that this rank skipped, whether it wants to stop,
    and the label counts of the next step's rows."""
    n_labels = () if run.next_input is None else run.next_input.n_labels
    run.sums = run.ranks.begin_sum([n_left_out, float(bool(run.stop)), *n_labels])


def finish_step_sum(run: Run) -> tuple[bool, list[float]]:
    """Whether any rank wished to stop, and all ranks' labels of each part of the next step's loss. The passes left out
    are counted the first time. All ranks call it before a step is logged, saved or followed by another.

    Raises TrainingError above train.max_skipped.
    """
    n_left_out, stopping, *n_labels = run.sums()
    run.sums = lambda: [0.0, stopping, *n_labels]
    count_skipped(run, int(n_left_out), run.step)
    return bool(stopping), n_labels


def count_skipped(run: Run, n: int, step: int) -> None:
    """Count n more skipped passes or steps; raises TrainingError above train.max_skipped."""
    run.skipped += n
    if run.skipped > run.config.train.max_skipped:
        raise TrainingError(
            f"step {step}: {run.skipped} times a loss or gradient was not a number, more than train.max_skipped "
            f"= {run.config.train.max_skipped}; what was saved before is good: lower optimizer.peak_lr and start a new "
            "run, or look at these rows"
        )


def train_step(run: Run) -> StepResult | None:
    """Take one step on this rank's rows. Returns None, with nothing done, if any rank had something in `run.stop`
    before the step or during a pass before its last one."""
    train, ranks = run.config.train, run.ranks
    if run.next_input is None:  # the run's first step
        run.next_input = _read_input(run, run.step)
        begin_step_sum(run)
    stopping, n_labels = finish_step_sum(run)
    if stopping:
        return None
    is_logged = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    clock = Clock(ranks.device, running=is_logged)
    if is_logged and ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)  # `measure` reads the step's peak
    begin = time.perf_counter()
    inputs, run.next_input = run.next_input, None
    weights_P = from_host(torch.tensor(run.method.loss_weights(n_labels)), ranks.device)
    run.engine.set_rate(learning_rate(run.step, train.n_steps, run.config.optimizer))
    losses: list[LinearLoss] = []
    flags: list[HostCopy] = []  # of passes left out
    vote: Callable[[], list[float]] | None = None
    for number, micro_batch in enumerate(inputs.micro_batches, start=1):
        loss, left_out = _forward(run, micro_batch.to(ranks.device), is_logged, clock)
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
        losses.append(LinearLoss(*(field.detach() for field in loss)))
    begin_step_sum(run, _count_left_out(run, inputs.rows_by_pass, flags))
    # Where the norm of the whole gradient is not finite, DeepSpeed leaves weights and optimizer as they are.
    if not run.engine.deepspeed.was_step_applied():
        names = _row_names(inputs.all_rows)
        ranks.log(f"The gradient of step {run.step + 1} is not a number, the step is left out; rows {names}")
        count_skipped(run, 1, run.step + 1)
    loss = LinearLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    parts = clock.seconds()
    return StepResult(loss, n_labels, time.perf_counter() - begin, parts)


def _read_input(run: Run, step: int) -> StepInput:
    """This rank's passes of step 0, 1, ..."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    rows_by_pass = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    micro_batches, distillation = [], train.distillation(step)
    for of_pass in rows_by_pass:
        batch = read_batch(run.rows, of_pass)
        micro_batch = run.method.micro_batch(batch, run.teacher.own_span(len(batch.tokens)))
        micro_batches.append(run.method.with_distillation(micro_batch, *distillation) if distillation else micro_batch)
    n_labels = [sum(n) for n in zip(*(micro_batch.n_labels for micro_batch in micro_batches), strict=True)]
    return StepInput(rows, rows_by_pass, micro_batches, n_labels)


def _forward(run: Run, micro_batch: MicroBatch, count_top_k: bool, clock: Clock) -> tuple[LinearLoss, torch.Tensor]:
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
    with clock.part("draft"):
        loss: LinearLoss = run.engine.deepspeed(*arguments, teacher.lm_head_VD, count_top_k, distillation)
    left_out = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows leave them out together
    return LinearLoss(*(field.masked_fill(left_out, 0) for field in loss)), left_out


def _count_left_out(run: Run, rows_by_pass: Sequence[list[EpochRow]], flags: Sequence[HostCopy]) -> int:
    """Log and count this rank's passes that were left out as their loss was not a number; those of ranks that share
    rows count once, and one without rows has nothing to leave out."""
    if run.ranks.rank % run.config.train.sequence_parallel:
        return 0
    left_out = [rows for rows, flag in zip(rows_by_pass, flags, strict=True) if flag.lists()[0] and rows]
    for rows in left_out:
        log(f"The loss of step {run.step + 1} is not a number for rows {_row_names(rows)}")
    return len(left_out)


def _row_names(rows: Sequence[EpochRow]) -> str:
    return ", ".join(f"{row} (epoch {epoch})" for epoch, row in rows)


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line in metrics.jsonl, over all ranks; all ranks call it.

    `loss`: as it is minimised, by `objective`; None without labels. `part_loss`: the mean of each part in nats. `top1`,
    `top3`: the share of each part's labels that are the draft's first candidate, or among its first three; of a part
    without labels all are None. `{part}_share`: the share of the first rank's time in each of PARTS. `over_target`: the
    step's time over that of its target's passes; estimate.py says what it could be. Per rank, which is a GPU or a
    process on a CPU: `tokens_per_s_per_rank`; `tflops_per_rank`, counted operations in 10^12 a second; `share_of_peak`,
    that over what the first rank's card can do in bf16, where PEAKS has it; `peak_memory_gib`, of tensors, on the GPU
    that had most.
    """
    finish_step_sum(run)
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
        **{f"{part}_share": seconds / result.seconds for part, seconds in result.parts.items()},
        "over_target": result.seconds / result.parts["target"],
    }
    if (found := counted(run)) is not None:
        operations_s = found.of_step(tokens, sum(result.n_labels)) / result.seconds
        record["tflops_per_rank"] = operations_s / 1e12 / ranks.world_size
    if ranks.device.type == "cuda":
        record["peak_memory_gib"] = max(ranks.gather(torch.cuda.max_memory_allocated(ranks.device))) / 2**30
        peak = PEAKS.get(torch.cuda.get_device_name(ranks.device))
        if peak and "tflops_per_rank" in record and train.precision == "bf16":
            record["share_of_peak"] = record["tflops_per_rank"] / peak
    return record


def counted(run: Run) -> Operations | None:
    """The operations of a token; None for a target whose operations are not counted."""
    config = run.config
    if config.target.loader != "longdraft":
        return None
    return operations(config.draft, config.data, config.train.loss, run.teacher.model.config)


def where_time_goes(records: Collection[dict[str, Any]], r: float | None) -> str:
    """One line about logged steps, by medians. `r`: the time of a step over its target's passes if all operations were
    equally fast (estimate.py); None where it is not known."""
    seconds, ratio = (median(record[key] for record in records) for key in ("step_s", "over_target"))
    shares = {part: median(record[f"{part}_share"] for record in records) for part in PARTS}
    by_count = "" if r is None else f" ({r:.2f} by count of operations)"
    parts = [f"{PARTS[part]} {share:.0%}" for part, share in shares.items()]
    rest = max(0.0, 1 - sum(shares.values()))  # medians of shares need not add up to 1
    return (
        f"A step took {seconds:.2f} s, {ratio:.2f} times its target's passes{by_count}: "
        f"{', '.join(parts)}, the rest {rest:.0%}"
    )
