"""One step of training: its rows, the target's pass, the draft's, backward; and what is measured of it.

A step's loss counts all labels of its rows alike, whichever rank and pass hold them (methods.py says how its parts
weigh). Not here: how many steps, evaluation and saving (loop.py), the network and its loss (models/drafts/).

The host runs ahead of a GPU. In a step that is neither logged nor saved it waits for what DeepSpeed waits for where the
weights move, and for nothing else: whether a pass is left out is decided on the device and heard while the next pass
runs, a wish to stop one pass later, and both before anything is logged or saved. What training gives is the same as if
the host had waited; a message comes a pass later, and the error of too many up to a step.
Shapes: P parts of the loss, K ranks counted.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from longdraft.kernels.transfer import HostCopy, from_host
from longdraft.models.drafts.loss import RANKS, DraftLoss
from longdraft.train import checkpoint
from longdraft.train.batches import Place, rank_rows, read_batch, step_rows
from longdraft.train.methods import Work
from longdraft.train.ranks import TrainingError, log
from longdraft.train.setup import Ahead, Run

# Of a step's time: the target's passes; the draft's, with LM head and loss; the draft's backward passes and the update.
PARTS = ("target", "draft", "backward")


@dataclass
class StepResult:
    """One rank's share of a step, on its device: sums [P] over the labels `n_labels` [P] of all ranks. `parts`: seconds
    of each of PARTS, where the step is logged."""

    loss: DraftLoss
    n_labels: list[float]
    rate: float
    seconds: float
    parts: dict[str, float]


def train_step(run: Run, stop: Sequence[int] = ()) -> StepResult | None:
    """One step on this rank's rows; None, and nothing done, if there was something in `stop` on any rank before the
    step, or in a pass that another one followed."""
    train, ranks, method = run.config.train, run.ranks, run.method
    if run.told is None:  # the first step, or it was heard already
        run.told = ranks.begin_sum([0.0, float(bool(stop))])
    if hear(run):
        return None
    count_ranks = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    clock = Stopwatch(ranks.device, running=count_ranks)
    begin = time.perf_counter()
    own, run.ahead = run.ahead or _read(run, run.step), None
    n_labels = own.n_labels()
    shares_P = from_host(torch.tensor(method.shares(n_labels)), ranks.device)
    rate = run.engine.begin_step(run.step)
    passes = _Passes(run, stop)
    losses = []
    for number, (work, part) in enumerate(zip(own.works, own.places, strict=True), start=1):
        loss, left_out = _forward(run, work.to(ranks.device), part, count_ranks, clock)
        last = number == len(own.works)
        if passes.stopping(part, left_out, last):
            return None
        if last and run.step + 1 < train.n_steps:  # DeepSpeed waits for the gradient: what comes then is ready
            run.ahead = _read(run, run.step + 1)
        with clock.part("backward"):
            run.engine.backward((loss.sums * shares_P).sum(), left_out)
        losses.append(DraftLoss(*(field.detach() for field in loss)))
    passes.end()
    if not run.engine.stepped():
        ranks.log(f"The gradient of step {run.step + 1} is no number, the step is left out; rows {_words(own.rows)}")
        _count_skipped(run, 1, run.step + 1)
    loss = DraftLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    parts = clock.seconds() if count_ranks else {}
    return StepResult(loss, n_labels, rate, time.perf_counter() - begin, parts)


def _read(run: Run, step: int) -> Ahead:
    """This rank's passes of a step, and how many labels all ranks have in it."""
    train, ranks = run.config.train, run.ranks
    rows = step_rows(train.seed, step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    places = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    batches = [read_batch(run.rows, part) for part in places]
    works = [run.method.read(batch, run.teacher.share(len(batch.tokens))) for batch in batches]
    own_labels = [sum(n) for n in zip(*(work.n_labels for work in works), strict=True)]
    return Ahead(rows, places, works, ranks.begin_sum(own_labels))


def _forward(
    run: Run, work: Work, places: list[Place], count_ranks: bool, clock: "Stopwatch"
) -> tuple[DraftLoss, torch.Tensor]:
    """Target and draft of one pass: its loss, and whether it is left out as it is no number (bool, on the device, for
    the host does not wait to know): then it counts for nothing, and the other ranks' rows count. Without rows it takes
    part in what is collective, and its gradient is zero."""
    method, teacher = run.method, run.teacher
    with clock.part("target"):
        seen = teacher.look(work.batch.tokens, work.batch.borders, work.positions, method.needs)
    arguments = method.arguments(work, seen, teacher)
    if not places:  # whatever the target makes of the token that stands in, numbers or none
        arguments = tuple(_zeros(argument) for argument in arguments)
    with clock.part("draft"):
        loss: DraftLoss = run.engine(*arguments, teacher.lm_head_VD, count_ranks)
    left_out = teacher.any(~loss.sums.detach().isfinite().all())  # ranks that share these rows leave them out together
    return DraftLoss(*(field.masked_fill(left_out, 0) for field in loss)), left_out


class _Passes:
    """What the host hears of a step's passes, one pass late: so the device always has the next one to work at, and no
    rank waits for another."""

    def __init__(self, run: Run, stop: Sequence[int]):
        self._run, self._stop = run, stop
        self._speaks = run.ranks.rank % run.config.train.sequence_parallel == 0  # one of the ranks that share rows
        self._unread: deque[tuple[list[Place], HostCopy]] = deque()
        self._asked: Callable[[], list[float]] | None = None  # whether anyone wished to stop in the pass before
        self._n_left_out = 0

    def stopping(self, places: list[Place], left_out: torch.Tensor, last: bool) -> bool:
        """Whether to stop, once a pass is queued up to its loss; `left_out`: whether it is."""
        self._unread.append((places, HostCopy(left_out)))
        if len(self._unread) > 1:
            self._read()
        before, self._asked = self._asked, None if last else self._run.ranks.begin_sum([float(bool(self._stop))])
        if before is None or not before()[0]:
            return False
        if self._asked is not None:
            self._asked()
        return True

    def end(self) -> None:
        """After the last pass: the ranks begin to tell each other how many were left out, and whether to stop."""
        while self._unread:
            self._read()
        self._run.told = self._run.ranks.begin_sum([self._n_left_out, float(bool(self._stop))])

    def _read(self) -> None:
        places, copy = self._unread.popleft()
        if copy.lists()[0] and self._speaks:
            self._n_left_out += 1
            log(f"The loss of step {self._run.step + 1} is no number for rows {_words(places)}")


def hear(run: Run) -> bool:
    """What the ranks say of the last step, where it was not heard yet: counts the passes that they left out, before the
    step is logged, saved or followed by another, and gives whether one wishes to stop; all ranks call it.

    Raises: TrainingError above train.max_skipped.
    """
    if run.told is None:
        return False
    (n_left_out, stopping), run.told = run.told(), None
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
    """Zeros in place of numbers; what counts or points stays."""
    return (
        torch.zeros_like(argument) if isinstance(argument, torch.Tensor) and argument.is_floating_point() else argument
    )


def _words(places: Sequence[Place]) -> str:
    return ", ".join(f"{place.row} (epoch {place.epoch})" for place in places)


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line for metrics.jsonl, over all ranks; all ranks call it.

    loss: as it is minimised; part_loss: mean cross-entropy of each part in nats, None without labels; top1, top3: share
    of its labels that are among the draft's first one or three candidates. {part}_share: of the first rank's time, in
    each of PARTS. over_target: the step's time over its target's passes; `operations` says what it could be.
    """
    hear(run)
    loss, n_parts = result.loss, len(run.method.part_names)
    own = torch.cat([loss.sums[:, None], loss.rank_counts, loss.n_ranked[:, None]], dim=1).double()
    totals = torch.tensor(run.ranks.sum(own.flatten().tolist())).view(n_parts, RANKS + 2)
    shares = run.method.shares(result.n_labels)
    rates = totals[:, 1:-1].cumsum(1) / totals[:, -1:].clamp(min=1)
    tokens = run.config.train.global_batch * run.config.data.seq_len
    return {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": sum(total * share for total, share in zip(totals[:, 0].tolist(), shares, strict=True)),
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


def where_time_goes(records: Collection[dict[str, Any]], r: float) -> str:
    """One line on logged steps, by medians; r: how many times the target's passes they would take at equal speed of all
    operations (operations.py)."""
    seconds, ratio = (median(record[key] for record in records) for key in ("step_s", "over_target"))
    shares = {part: median(record[f"{part}_share"] for record in records) for part in PARTS}
    names = ("the target's passes", "draft and loss", "backward and update")
    parts = [f"{name} {share:.0%}" for name, share in zip(names, shares.values(), strict=True)]
    return (
        f"A step took {seconds:.2f} s, {ratio:.2f} times its target's passes ({r:.2f} by count of operations): "
        f"{', '.join(parts)}, the rest {1 - sum(shares.values()):.0%}"
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
