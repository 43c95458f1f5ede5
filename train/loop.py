"""A training run from config to last checkpoint: what opens, what a step computes, when it is saved and stopped.

A step's loss counts all labels of its rows alike, whichever rank and pass hold them (train/methods.py says how its
parts weigh). Not here: the network and its loss (models/drafts/), DeepSpeed (engine.py), files (state.py, tracking.py),
several stages (curriculum.py).
Shapes: P parts of the loss, K ranks counted.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import Draft, load_draft
from longdraft.models.drafts.longspec import LongSpec
from longdraft.models.drafts.loss import RANKS, DraftLoss
from longdraft.models.hf import Target, load_target
from longdraft.train import state
from longdraft.train.batches import Place, rank_rows, read_batch, step_rows
from longdraft.train.config import Config, LongSpecSection, accumulation, resolved
from longdraft.train.engine import DraftEngine, Ranks, TrainingError, failures_named, make_deterministic
from longdraft.train.evaluate import Evaluator
from longdraft.train.heldout import evaluate
from longdraft.train.methods import Method, Work, open_method
from longdraft.train.plots import draw_decoding
from longdraft.train.sequence_parallel import SequenceParallel, check_heads, sequence_group
from longdraft.train.sharding import load_sharded_target, whole_layers
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker, read_metrics
from longdraft.train.vocabulary import frequent_tokens

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Reading more bytes than these takes long enough to say so.
TOLD_ABOVE = 10**9


@dataclass
class Run:
    """Everything open during training; `step` counts the steps done, `skipped` what was left out for a loss (a pass) or
    a gradient (a step) that was no number, `heldout` is the latest evaluation; `decoding` is there where the config
    asks for it."""

    config: Config
    ranks: Ranks
    method: Method
    engine: DraftEngine
    teacher: Teacher
    rows: ShardSet
    heldout_rows: ShardSet
    decoding: Evaluator | None = None
    step: int = 0
    skipped: int = 0
    heldout: dict[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None


@dataclass
class StepResult:
    """One rank's share of a step, on its device: sums [P] over the labels `n_labels` [P] of all ranks."""

    loss: DraftLoss
    n_labels: list[float]
    rate: float
    seconds: float
    target_seconds: float


def train(config: Config, ranks: Ranks, target: Target | None = None, stop: Sequence[int] = ()) -> bool:
    """Trains until the run's steps are done or something is in `stop` (train/stop.py) on any rank; all ranks call it.

    Args:
        target: saves loading the run's own.

    Returns: whether the steps are done.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    accumulation(config, ranks.world_size)
    config = resolved(config, len(ShardSet(Path(config.data.path) / "train")))
    with failures_named(ranks), state.locked(config.train.run_dir, ranks):
        return _train(config, ranks, target, stop)


def _train(config: Config, ranks: Ranks, target: Target | None, stop: Sequence[int]) -> bool:
    found = state.find(config.train.run_dir, ranks)
    if found is not None:
        state.check_same_run(state.saved_config(config.train.run_dir, found[1]), config)
        state.check_same_data(found[1], ShardSet(Path(config.data.path) / "train").identity(), config)
    if found is not None and found[1]["step"] >= config.train.n_steps:
        _say(ranks, f"Training is done already: {config.train.n_steps} steps, checkpoint in {found[0]}")
        return True
    opened = open_run(config, ranks, target)
    ranks.barrier()  # all have looked before rank 0 writes
    if ranks.first:
        state.begin_run(config)
    if found is not None:
        state.load(opened.engine, *found)
        extra = found[1]["extra"]
        opened.step, opened.skipped = found[1]["step"], extra["skipped"]
        opened.heldout, opened.wandb_id = extra["heldout"], extra["wandb_id"]
    _say(ranks, describe(opened))
    if opened.decoding is not None:
        opened.decoding.begin(found[1]["extra"].get("decoding") if found else None, found is not None, stop)
    saved = _steps(opened, stop, saved=found[0] if found else None)
    opened.engine.close()
    steps = config.train.n_steps
    if opened.step < steps:
        _say(ranks, f"Stopped after {opened.step} of {steps} steps; the same command goes on from {saved}")
    else:
        _say(ranks, f"Trained: {steps} steps, checkpoint in {saved}; next: longdraft export {config.train.run_dir}")
    return opened.step == steps


def open_target(config: Config, ranks: Ranks) -> Target:
    """The run's frozen target: a copy on this rank's device, or this rank's share of it."""
    path, dtype, gguf_file = config.target.path, DTYPES[config.train.precision], config.target.gguf_file
    if config.target.zero_stage == 3:
        return load_sharded_target(path, dtype, ranks, gguf_file=gguf_file)
    return load_target(path, dtype, ranks.device, gguf_file=gguf_file)


def open_run(config: Config, ranks: Ranks, target: Target | None = None) -> Run:
    """Opens data, target, draft and engine as they are before the first step."""
    train = config.train
    if train.deterministic:
        make_deterministic()
    target = target or open_target(config, ranks)
    rows, heldout_rows = (open_rows(config, split, target) for split in ("train", "heldout"))
    verify_shards([rows, heldout_rows], ranks)
    decoding = Evaluator(config, target, heldout_rows, ranks) if config.decoding.every else None
    start = None if config.draft.start_from is None else load_draft(config.draft.start_from, target)
    with whole_layers(target.model, 0, -1):  # a warm start reads them
        method = open_method(config, target.model, _draft_vocabulary(config, start, rows, target))
    if start is not None:
        begin_with(method, start, config.draft.start_from)
    parallel = None
    if train.sequence_parallel > 1:
        check_heads(target.model.config, train.sequence_parallel)
        parallel = SequenceParallel(target.model.config, sequence_group(train.sequence_parallel))
    engine = DraftEngine(config, method.draft, ranks)
    return Run(config, ranks, method, engine, Teacher(target.model, parallel), rows, heldout_rows, decoding)


def begin_with(method: Method, start: Draft, folder: str | None) -> None:
    """Puts the weights of another draft into the network.

    Raises:
        ValueError: it is of another method or another shape than the config's.
    """
    ours = getattr(method.draft, "config", None)
    if type(start) is not type(method.draft) or start.config != ours:
        raise ValueError(
            f"draft.start_from: {folder} holds {start.config}, but this run trains {ours}; set the draft section alike"
        )
    method.draft.load_state_dict(start.state_dict())


def _draft_vocabulary(config: Config, start: Draft | None, rows: ShardSet, target: Target) -> torch.Tensor | None:
    """Token ids of a restricted vocabulary: the draft's that training begins with, else the data's most frequent."""
    if not isinstance(config.draft, LongSpecSection) or config.draft.draft_vocab_size is None:
        return None
    if isinstance(start, LongSpec) and start.config.draft_vocab_size == config.draft.draft_vocab_size:
        return start.token_ids
    vocab_size = target.model.config.vocab_size
    return frequent_tokens(rows, vocab_size, config.draft.draft_vocab_size, target.eos_token_ids)


def open_rows(config: Config, split: str, target: Target) -> ShardSet:
    """A split of the prepared folder; raises ValueError where it was made for other rows or another tokenizer."""
    rows = ShardSet(Path(config.data.path) / split)
    if rows.manifest["seq_len"] != config.data.seq_len:
        raise ValueError(
            f"data.seq_len: {config.data.seq_len}, but {rows.folder} has rows of {rows.manifest['seq_len']} tokens; "
            f"set data.seq_len={rows.manifest['seq_len']} or prepare with --seq-len {config.data.seq_len}"
        )
    own, given = rows.manifest["tokenizer_sha256"], target.fingerprint["tokenizer"]
    if own != given:
        raise ValueError(
            f"data.path: {rows.folder} was prepared with the tokenizer {own}, but {target.name}'s is {given}; "
            f"prepare it with --target {config.target.path}"
        )
    if not len(rows):
        raise ValueError(f"data.path: {rows.folder} has no rows; prepare more text")
    limit = target.model.config.max_positions
    for name, value in (("data.seq_len", config.data.seq_len), ("data.max_position", config.data.max_position or 0)):
        if value > limit:
            raise ValueError(f"{name}: {value}, but {target.name} has {limit} positions; stay within them")
    return rows


def verify_shards(splits: Sequence[ShardSet], ranks: Ranks) -> None:
    """Reads all shards once, before any is trained on; the ranks of a machine share them out, for its copy of the files
    may be its own. Raises ValueError naming those that are damaged, on all ranks."""
    n_bytes = sum(shard["bytes"] for rows in splits for shard in rows.manifest["shards"])
    if n_bytes > TOLD_ABOVE:
        _say(ranks, f"Checking {n_bytes / 1e9:.1f} GB of prepared rows")
    place, n_places = ranks.share_of_machine()
    damage = None
    for rows in splits:
        try:
            rows.verify(place, n_places)
        except ValueError as error:
            damage = damage or str(error)
    found = [text for text in ranks.gather(damage) if text is not None]
    if found:
        raise ValueError(f"data.path: {'; '.join(found)}")


def describe(run: Run) -> str:
    train = run.config.train
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.draft.parameters())
    tokens = train.global_batch * run.config.data.seq_len
    kind = "GPU" if run.ranks.device.type == "cuda" else "CPU"
    return (
        f"Training {run.config.draft.method} ({parameters / 1e6:.1f} M parameters) for {run.config.target.path} on "
        f"{run.ranks.world_size} {kind} rank(s), {train.precision}, ZeRO-{train.zero_stage}: step {run.step} to "
        f"{train.n_steps}, up to {tokens:,} tokens each, from {run.config.data.path}; all goes to {train.run_dir}"
    )


def _steps(run: Run, stop: Sequence[int], saved: Path | None) -> Path:
    """The steps from run.step on, of which `saved` is the checkpoint; returns the last checkpoint."""
    train, ranks = run.config.train, run.ranks
    tracker = Tracker(run.config, run.method.part_names, run.step, run.wandb_id) if ranks.first else None
    run.wandb_id = tracker.wandb_id if tracker else None
    bar = tqdm(
        total=train.n_steps, initial=run.step, desc="train", unit="step", disable=not ranks.first, mininterval=0.5
    )
    while run.step < train.n_steps:
        result = train_step(run, stop)
        if result is None:
            break
        saved = None
        run.step += 1
        last = run.step == train.n_steps
        if last or run.step % run.config.log.every == 0:
            record = measure(run, result)
            if tracker:
                tracker.write(record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", tokens_s=f"{record['tokens_per_s']:.0f}", refresh=False)
        probed = last or run.step % run.config.heldout.every == 0
        if probed:
            run.heldout = evaluate(run.config, run.method, run.engine, run.teacher, run.heldout_rows)
            if tracker:
                tracker.write({"step": run.step} | {f"heldout_{key}": value for key, value in run.heldout.items()})
        if run.decoding is not None:
            decoded = run.decoding.after_step(run.engine, run.step, run.heldout if probed else {}, stop)
            if tracker and decoded is not None:
                tracker.write({"step": run.step} | decoded.record, decoded.tables)
                if decoded.tables:
                    draw_decoding(train.run_dir, read_metrics(train.run_dir))
        if last or run.step % train.save_every == 0:
            saved = _save(run)
        bar.update()
    bar.close()
    saved = saved or _save(run)  # before W&B, which may wait for its network
    if tracker:
        tracker.close()
    return saved


def _save(run: Run) -> Path:
    train = run.config.train
    extra = {"heldout": run.heldout, "wandb_id": run.wandb_id, "skipped": run.skipped, "data": run.rows.identity()}
    extra["decoding"] = None if run.decoding is None else run.decoding.saved()
    return state.save(run.engine, train.run_dir, run.step, extra, keep=train.keep_checkpoints)


def train_step(run: Run, stop: Sequence[int] = ()) -> StepResult | None:
    """One step on this rank's rows; None, and nothing done, if there is something in `stop` on any rank, before the
    step or before any of its passes is through."""
    train, ranks, method = run.config.train, run.ranks, run.method
    count_ranks = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.n_steps
    if count_ranks and ranks.device.type == "cuda":
        torch.cuda.synchronize()  # else this step's time would hold what the unlogged ones left to do
    begin = time.perf_counter()
    rows = step_rows(train.seed, run.step, len(run.rows), train.global_batch)
    degree = train.sequence_parallel
    places = rank_rows(rows, ranks.rank // degree, ranks.world_size // degree, train.micro_batch)
    batches = [read_batch(run.rows, part) for part in places]
    works = [method.read(batch, run.teacher.share(len(batch.tokens))) for batch in batches]
    own_labels = [sum(n) for n in zip(*(work.n_labels for work in works), strict=True)]
    stopping, *n_labels = ranks.sum([float(bool(stop)), *own_labels])
    if stopping:
        return None
    shares_P = torch.tensor(method.shares(n_labels), device=ranks.device)
    rate = run.engine.begin_step(run.step)
    clock = Stopwatch(ranks.device)
    losses = []
    for work, part in zip(works, places, strict=True):
        own = _pass(run, work.to(ranks.device), part, shares_P, count_ranks, clock, stop)
        if own is None:
            return None
        losses.append(own)
    if not run.engine.stepped():
        _say(ranks, f"The gradient of step {run.step + 1} is no number, the step is left out; rows {_words(rows)}")
        _count_skipped(run)
    loss = DraftLoss(*(torch.stack(field).sum(0) for field in zip(*losses, strict=True)))
    target_seconds = clock.seconds() if count_ranks else math.nan
    return StepResult(loss, n_labels, rate, time.perf_counter() - begin, target_seconds)


def _pass(
    run: Run,
    work: Work,
    places: list[Place],
    shares_P: torch.Tensor,
    count_ranks: bool,
    clock: "Stopwatch",
    stop: Sequence[int],
) -> DraftLoss | None:
    """Target, draft, backward of one pass; the weights move after the last. Rows whose loss is no number are left out:
    a pass over zeros takes their place, so that DeepSpeed's count of passes stays right; the other ranks' rows count.
    None if any rank wants to stop: what the step's passes have gathered is dropped."""
    method, teacher = run.method, run.teacher
    with clock:
        seen = teacher.look(work.batch.tokens, work.batch.borders, work.positions, method.needs)
    arguments = method.arguments(work, seen, teacher)
    loss: DraftLoss = run.engine(*arguments, teacher.lm_head_VD, count_ranks)
    wrong = not bool(loss.sums.detach().isfinite().all())
    if wrong:
        print(f"The loss of step {run.step + 1} is no number for rows {_words(places)}", flush=True)
    degree = run.config.train.sequence_parallel  # ranks that share these rows leave them out together
    reader, n_readers = run.ranks.rank // degree, run.ranks.world_size // degree
    *by_reader, stopping = run.ranks.sum([*(float(wrong and i == reader) for i in range(n_readers)), float(bool(stop))])
    if stopping:
        return None
    if any(by_reader):
        _count_skipped(run, sum(n > 0 for n in by_reader))
        if by_reader[reader]:
            arguments = (_zeros(argument) for argument in method.arguments(work.without_labels(), seen, teacher))
        # Every rank again, those with a number too: under ZeRO-3 a pass takes all.
        loss = run.engine(*arguments, teacher.lm_head_VD, count_ranks)
    run.engine.backward((loss.sums * shares_P).sum())
    return DraftLoss(*(field.detach() for field in loss))


def _count_skipped(run: Run, n: int = 1) -> None:
    """Raises TrainingError above train.max_skipped."""
    run.skipped += n
    if run.skipped > run.config.train.max_skipped:
        raise TrainingError(
            f"step {run.step + 1}: {run.skipped} times a loss or gradient was no number, more than train.max_skipped "
            f"= {run.config.train.max_skipped}; the last checkpoint is good: lower optimizer.peak_lr and start a new "
            "run, or look at these rows"
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
    of its labels that are among the draft's first one or three candidates. target_share: of the step's time, in the
    target's pass.
    """
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
        "target_share": result.target_seconds / result.seconds,
    }


class Stopwatch:
    """Adds up the time between enter and exit; on a GPU by events, which are waited for when it is read."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._laps: list[Any] = []

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *_: object) -> None:
        self._laps.append((self._begin, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> float:
        if not self._cuda:
            return sum(end - begin for begin, end in self._laps)
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._laps) / 1000


def _say(ranks: Ranks, line: str) -> None:
    if ranks.first:
        print(line, flush=True)
