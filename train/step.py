"""One step of training: its rows, the target's pass, the draft's, backward; and what is measured of it.

A step's loss counts all labels of its rows alike, whichever rank and pass hold them (methods.py says how its parts
weigh). Not here: how many steps, evaluation and saving (loop.py), the network and its loss (models/drafts/).

The host runs ahead of a GPU. In a step that is neither logged nor saved it waits for what DeepSpeed waits for where the
weights move, and for nothing else: whether a pass is left out is decided on the device and read while the next pass
runs, a wish to stop one pass later, and both before anything is logged or saved. What training gives is the same as if
the host had waited; a message comes a pass later, and the error of too many up to a step.
Shapes: P parts of the loss, K ranks counted.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from longdraft.kernels.transfer import HostCopy, from_host
from longdraft.models.drafts.loss import RANKS, DraftLoss
from longdraft.train import checkpoint
from longdraft.train.batches import Place, rank_rows, read_batch, step_rows
from longdraft.train.methods import MicroBatch, taught_by
from longdraft.train.ranks import TrainingError, log
from longdraft.train.setup import Run, StepRows

# Of a step's time: the target's passes; the draft's, with LM head and loss; the draft's backward passes and the update.
PARTS = ("target", "draft", "backward")


@dataclass
class StepResult:
    """What one rank has of a step, on its device: sums [P] over the labels; `n_labels` [P] counts those of all ranks.
    `parts`: seconds of each of PARTS, where the step is logged."""

    loss: DraftLoss
    n_labels: list[float]
    rate: float
    seconds: float
    parts: dict[str, float]


def train_step(run: Run) -> StepResult | None:
    """One step on this rank's rows; None, and nothing done, if there was something in `run.stop` on any rank before the
    step, or in a pass that another one followed."""
    train, ranks = run.config.train, run.ranks
    if run.agreement is None:  # before the first step, or where the last one's was read to log or save it
        run.agreement = ranks.begin_sum([0.0, float(bool(run.stop))])
    if await_agreement(run):
        return None
    is_logged = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    clock = Stopwatch(ranks.device, running=is_logged)
    begin = time.perf_counter()
    rows, run.next_rows = run.next_rows or _read_rows(run, run.step), None
    n_labels = rows.n_labels()
    weights_P = from_host(torch.tensor(run.method.loss_weights(n_labels)), ranks.device)
    rate = run.engine.begin_step(run.step)
    flags, wish_to_stop, losses = _LateFlags(run), None, []
    for number, (micro_batch, places) in enumerate(zip(rows.micro_batches, rows.places, strict=True), start=1):
        loss, left_out = forward(run, micro_batch.to(ranks.device), places, is_logged, clock)
        flags.add(places, left_out)
        last = number == len(rows.micro_batches)
        # Each rank's wish is asked for in one pass and read in the next, so that no rank waits for another.
        asked, wish_to_stop = wish_to_stop, None if last else ranks.begin_sum([float(bool(run.stop))])
        if asked is not None and asked()[0]:
            if wish_to_stop is not None:
                wish_to_stop()
            return None
        if last and run.step + 1 < train.n_steps:  # DeepSpeed waits for the gradient: what comes then is ready
            run.next_rows = _read_rows(run, run.step + 1)
        with clock.part("backward"):
            run.engine.backward((loss.sums * weights_P).sum(), left_out)
        losses.append(DraftLoss(*(field.detach() for field in loss)))
    run.agreement = ranks.begin_sum([flags.count(), float(bool(run.stop))])
    if not run.engine.stepped():
        ranks.log(f"The gradient of step {run.step + 1} is no number, the step is left out; rows {_name(rows.of_all)}")
        _count_skipped(run, 1, run.step + 1)
    loss = DraftLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    parts = clock.seconds() if is_logged else {}
    return StepResult(loss, n_labels, rate, time.perf_counter() - begin, parts)


def _read_rows(run: Run, step: int) -> StepRows:
    """This rank's passes of a step, and how many labels all ranks have in it."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    places = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    batches = [read_batch(run.rows, of_pass) for of_pass in places]
    micro_batches = [run.method.micro_batch(batch, run.teacher.own_span(len(batch.tokens))) for batch in batches]
    if train.distillation(step):
        micro_batches = [run.method.asking(micro_batch) for micro_batch in micro_batches]
    own_labels = [sum(n) for n in zip(*(micro_batch.n_labels for micro_batch in micro_batches), strict=True)]
    return StepRows(rows, places, micro_batches, ranks.begin_sum(own_labels))


def forward(
    run: Run, micro_batch: MicroBatch, places: list[Place], count_ranks: bool, clock: "Stopwatch"
) -> tuple[DraftLoss, torch.Tensor]:
    """Target and draft of one pass: its loss, and whether it is left out as it is no number (bool, on the device, for
    the host does not wait to know): then it counts for nothing, and the other ranks' rows count. Without rows it takes
    part in what is collective, and its gradient is zero."""
    method, teacher = run.method, run.teacher
    batch, spans = micro_batch.batch, micro_batch.asked and micro_batch.asked.spans
    with clock.part("target"):
        output = teacher.forward(batch.tokens, batch.borders, micro_batch.positions, method.needs, spans)
    teaching = taught_by(micro_batch, output, run.config.train.distillation(run.step))
    arguments = method.arguments(micro_batch, output, teacher)
    if not places:  # whatever the target makes of the token that stands in, numbers or none
        arguments = tuple(_zeros(argument) for argument in arguments)
    with clock.part("draft"):
        loss: DraftLoss = run.engine.deepspeed(*arguments, teacher.lm_head_VD, count_ranks, teaching)
    left_out = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows leave them out together
    return DraftLoss(*(field.masked_fill(left_out, 0) for field in loss)), left_out


class _LateFlags:
    """Which of this rank's passes of a step were left out. A pass's flag is on the device, and it is read once the next
    pass is queued, so that the device always has something to work at."""

    def __init__(self, run: Run):
        self._step = run.step + 1
        self._logs = run.ranks.rank % run.config.train.sequence_parallel == 0  # one of the ranks that share rows
        self._unread: tuple[list[Place], HostCopy] | None = None
        self._n_left_out = 0

    def add(self, places: list[Place], left_out: torch.Tensor) -> None:
        before, self._unread = self._unread, (places, HostCopy(left_out))
        self._read(before)

    def count(self) -> int:
        """How many passes were left out, after the last one."""
        self._read(self._unread)
        return self._n_left_out

    def _read(self, flag: tuple[list[Place], HostCopy] | None) -> None:
        if flag is not None and flag[1].lists()[0] and self._logs:
            self._n_left_out += 1
            log(f"The loss of step {self._step} is no number for rows {_name(flag[0])}")


def await_agreement(run: Run) -> bool:
    """Reads what the ranks agree on after a step, where that is still under way: counts the passes that were left out,
    before the step is logged, saved or followed by another, and gives whether a rank wishes to stop; all ranks call it.

    Raises: TrainingError above train.max_skipped.
    """
    if run.agreement is None:
        return False
    (n_left_out, stopping), run.agreement = run.agreement(), None
    _count_skipped(run, int(n_left_out), run.step)
    return bool(stopping)


def _count_skipped(run: Run, n: int, step: int) -> None:
    """Raises TrainingError above train.max_skipped."""
    run.skipped += n
    if run.skipped > run.config.train.max_skipped:
        raise TrainingError(
            f"step {step}: {run.skipped} times a loss or gradient was no number, more than train.max_skipped "
            f"= {run.config.train.max_skipped}; {checkpoint.what_is_good(run.config.train.run_dir)}: lower "
            "optimizer.peak_lr and start a new run, or look at these rows"
        )


def _zeros(argument: Any) -> Any:
    """Zeros in place of floating-point numbers; indices and lists stay."""
    is_float = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return torch.zeros_like(argument) if is_float else argument


def _name(places: Sequence[Place]) -> str:
    return ", ".join(f"{place.row} (epoch {place.epoch})" for place in places)


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line for metrics.jsonl, over all ranks; all ranks call it.

    loss: as it is minimised; part_loss: each part's mean of it in nats, None without labels; top1, top3: share of its
    labels that are among the draft's first one or three candidates. {part}_share: of the first rank's time, in each of
    PARTS. over_target: the step's time over its target's passes; `operations` says what it could be.
    """
    await_agreement(run)
    loss, n_parts = result.loss, len(run.method.part_names)
    own = torch.cat([loss.sums[:, None], loss.rank_counts, loss.n_labels[:, None]], dim=1).double()
    totals = torch.tensor(run.ranks.sum(own.flatten().tolist())).view(n_parts, RANKS + 2)
    weights = run.method.loss_weights(result.n_labels)
    rates = totals[:, 1:-1].cumsum(1) / totals[:, -1:].clamp(min=1)
    tokens = run.config.train.global_batch * run.config.data.seq_len
    return {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": sum(total * weight for total, weight in zip(totals[:, 0].tolist(), weights, strict=True)),
        "part_loss": [
            total / n if n else None for total, n in zip(totals[:, 0].tolist(), result.n_labels, strict=True)
        ],
        "top1": rates[:, 0].tolist(),
        "top3": rates[:, RANKS - 1].tolist(),
        "lr": result.rate,
        "grad_norm": run.engine.grad_norm(),
        "skipped": run.skipped,
        "step_s": result.seconds,
        "tokens_per_s": tokens / result.seconds,
        **{f"{part}_share": seconds / result.seconds for part, seconds in result.parts.items()},
        "over_target": result.seconds / result.parts["target"],
    }


def where_time_goes(records: Collection[dict[str, Any]], r: float | None) -> str:
    """One line on logged steps, by medians; r: how many times the target's passes they would take at equal speed of all
    operations (estimate_operations.py), None where nobody counts them."""
    seconds, ratio = (median(record[key] for record in records) for key in ("step_s", "over_target"))
    shares = {part: median(record[f"{part}_share"] for record in records) for part in PARTS}
    by_count = "" if r is None else f" ({r:.2f} by count of operations)"
    names = ("the target's passes", "draft and loss", "backward and update")
    parts = [f"{name} {share:.0%}" for name, share in zip(names, shares.values(), strict=True)]
    rest = max(0.0, 1 - sum(shares.values()))  # medians of shares add up to 1 or so
    return (
        f"A step took {seconds:.2f} s, {ratio:.2f} times its target's passes{by_count}: "
        f"{', '.join(parts)}, the rest {rest:.0%}"
    )


class Stopwatch:
    """Adds up the time spent in each named part; on a GPU by events, which are waited for when it is read. Where it is
    `running`: to begin, it waits for what the device has still to do. Where it is not it costs nothing."""

    def __init__(self, device: torch.device, running: bool):
        self._device, self._running, self._cuda = device, running, device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        if running and self._cuda:
            torch.cuda.synchronize(device)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        if not self._running:
            yield
            return
        begin = self._now()
        yield
        self._laps.append((name, begin, self._now()))

    def seconds(self) -> dict[str, float]:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        total: dict[str, float] = {}
        for name, begin, end in self._laps:
            total[name] = total.get(name, 0.0) + (begin.elapsed_time(end) / 1000 if self._cuda else end - begin)
        return total

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
