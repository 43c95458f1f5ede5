"""A training run from config to last checkpoint: what opens, what a step computes, when it is saved and stopped.

A step's loss is the sum of the heads' mean cross-entropies over all labels of its rows, whichever rank and pass hold
them. Not here: the network and its loss (models/drafts/), DeepSpeed (engine.py), files (state.py, tracking.py).
Shapes: B rows of a pass, T positions, D hidden, I heads, K ranks counted.
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
from longdraft.models.drafts.tokenswift import RANKS, HeadsLoss, TokenSwift, chain_labels
from longdraft.models.hf import Target, load_target
from longdraft.train import state
from longdraft.train.batches import Batch, Rows, rank_rows, read_batch, step_rows
from longdraft.train.config import Config, accumulation, heads_config
from longdraft.train.engine import DraftEngine, Ranks, join_ranks, leave_ranks, make_deterministic
from longdraft.train.heldout import evaluate
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Run:
    """Everything open during training; `step` counts the steps done, `heldout` is the latest evaluation."""

    config: Config
    ranks: Ranks
    engine: DraftEngine
    teacher: Teacher
    rows: Rows
    heldout_rows: Rows
    step: int = 0
    heldout: dict[str, Any] = field(default_factory=dict)
    wandb_id: str | None = None


@dataclass
class StepResult:
    """One rank's share of a step, on its device: sums [I] over the labels `n_labels` [I] of all ranks."""

    heads: HeadsLoss
    n_labels: list[float]
    rate: float
    seconds: float
    target_seconds: float


def run(config: Config, stop: Sequence[int] = ()) -> None:
    """Trains until config.train.steps are done or something is in `stop` (train/stop.py) on any rank; every rank of
    the launcher calls it.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
    """
    ranks = join_ranks()
    train(config, ranks, stop=stop)
    leave_ranks(ranks)


def train(config: Config, ranks: Ranks, target: Target | None = None, stop: Sequence[int] = ()) -> None:
    """`run` between joining and leaving the ranks; `target` saves loading it."""
    accumulation(config, ranks.world_size)
    with state.locked(config.train.run_dir, ranks):
        _train(config, ranks, target, stop)


def _train(config: Config, ranks: Ranks, target: Target | None, stop: Sequence[int]) -> None:
    found = state.newest(config.train.run_dir)
    if found is not None:
        state.check_same_run(state.saved_config(config.train.run_dir, found[1]), config)
    if found is not None and found[1]["step"] >= config.train.steps:
        _say(ranks, f"Training is done already: {config.train.steps} steps, checkpoint in {found[0]}")
        return
    opened = open_run(config, ranks, target)
    ranks.barrier()  # all have looked before rank 0 writes
    if ranks.first:
        state.begin_run(config)
    if found is not None:
        state.load(opened.engine, *found)
        extra = found[1]["extra"]
        opened.step, opened.heldout, opened.wandb_id = found[1]["step"], extra["heldout"], extra["wandb_id"]
    _say(ranks, describe(opened))
    saved = _steps(opened, stop, saved=found[0] if found else None)
    if opened.step < config.train.steps:
        _say(ranks, f"Stopped after {opened.step} of {config.train.steps} steps; the same command goes on from {saved}")
    else:
        _say(
            ranks, f"Trained: {opened.step} steps, checkpoint in {saved}; next: longdraft export {config.train.run_dir}"
        )


def open_run(config: Config, ranks: Ranks, target: Target | None = None) -> Run:
    """Opens data, target, draft and engine as they are before the first step."""
    train = config.train
    if train.deterministic:
        make_deterministic()
    target = target or load_target(
        config.target.path, DTYPES[train.precision], ranks.device, gguf_file=config.target.gguf_file
    )
    rows, heldout_rows = (open_rows(config, split, target) for split in ("train", "heldout"))
    model = target.model
    shape = heads_config(config, model.config.hidden_size, model.config.rms_norm_eps)
    draft = TokenSwift(shape, torch.Generator().manual_seed(train.seed), model.norm.weight)
    teacher = Teacher(model, draft.needs)
    return Run(config, ranks, DraftEngine(config, draft, ranks), teacher, rows, heldout_rows)


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
    return rows


def describe(run: Run) -> str:
    train, draft = run.config.train, run.config.draft
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.draft.parameters())
    tokens = train.global_batch * run.config.data.seq_len
    kind = "GPU" if run.ranks.device.type == "cuda" else "CPU"
    return (
        f"Training {draft.n_heads} {draft.method} heads ({draft.kind}, {parameters / 1e6:.1f} M parameters) for "
        f"{run.config.target.path} on {run.ranks.world_size} {kind} rank(s), {train.precision}, ZeRO-"
        f"{train.zero_stage}: step {run.step} to {train.steps}, {tokens:,} tokens each, from "
        f"{run.config.data.path}; everything goes to {train.run_dir}"
    )


def _steps(run: Run, stop: Sequence[int], saved: Path | None) -> Path:
    """The steps from run.step on, of which `saved` is the checkpoint; returns the last checkpoint."""
    train, ranks = run.config.train, run.ranks
    tracker = Tracker(run.config, run.step, run.wandb_id) if ranks.first else None
    run.wandb_id = tracker.wandb_id if tracker else None
    bar = tqdm(total=train.steps, initial=run.step, desc="train", unit="step", disable=not ranks.first, mininterval=0.5)
    while run.step < train.steps:
        result = train_step(run, bool(stop))
        if result is None:
            break
        saved = None
        run.step += 1
        last = run.step == train.steps
        if last or run.step % run.config.log.every == 0:
            record = measure(run, result)
            if tracker:
                tracker.write(record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", tokens_s=f"{record['tokens_per_s']:.0f}", refresh=False)
        if last or run.step % run.config.heldout.every == 0:
            run.heldout = evaluate(run.config, run.engine, run.teacher, run.heldout_rows)
            if tracker:
                tracker.write({"step": run.step} | {f"heldout_{key}": value for key, value in run.heldout.items()})
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
    extra = {"heldout": run.heldout, "wandb_id": run.wandb_id}
    return state.save(run.engine, train.run_dir, run.step, extra, keep=train.keep_checkpoints)


def train_step(run: Run, stop: bool) -> StepResult | None:
    """One step on this rank's rows; None, and nothing done, if any rank wants to stop."""
    train, ranks, n_heads = run.config.train, run.ranks, run.config.draft.n_heads
    count_ranks = (run.step + 1) % run.config.log.every == 0 or run.step + 1 == train.steps
    if count_ranks and ranks.device.type == "cuda":
        torch.cuda.synchronize()  # else this step's time would hold what the unlogged ones left to do
    begin = time.perf_counter()
    rows = step_rows(train.seed, run.step, len(run.rows), train.global_batch)
    batches = [read_batch(run.rows, part) for part in rank_rows(rows, ranks.rank, ranks.world_size, train.micro_batch)]
    labels = [chain_labels(*batch, n_heads) for batch in batches]
    own_labels = [sum(int((part[..., i] >= 0).sum()) for part in labels) for i in range(n_heads)]
    stopping, *n_labels = ranks.sum([float(stop), *own_labels])
    if stopping:
        return None
    weights_I = torch.tensor([1 / max(n, 1) for n in n_labels], device=ranks.device)
    rate = run.engine.begin_step(run.step)
    clock = Stopwatch(ranks.device)
    parts = []
    for batch, labels_BTI in zip(batches, labels, strict=True):
        parts.append(_pass(run, batch.to(ranks.device), labels_BTI.to(ranks.device), weights_I, count_ranks, clock))
    heads = HeadsLoss(*(torch.stack(field).sum(0) for field in zip(*parts, strict=True)))
    target_seconds = clock.seconds() if count_ranks else math.nan
    return StepResult(heads, n_labels, rate, time.perf_counter() - begin, target_seconds)


def _pass(run: Run, batch: Batch, labels_BTI: torch.Tensor, weights_I, count_ranks: bool, clock: "Stopwatch") -> Any:
    """Target, heads, backward of one pass; the weights move after the last."""
    with clock:
        hidden_BTD = run.teacher.hidden(batch.tokens)
    heads: HeadsLoss = run.engine(hidden_BTD, labels_BTI, run.teacher.lm_head_VD, count_ranks)
    run.engine.backward((heads.sums * weights_I).sum())
    return HeadsLoss(*(field.detach() for field in heads))


def measure(run: Run, result: StepResult) -> dict[str, Any]:
    """The step's line for metrics.jsonl, over all ranks; all ranks call it.

    top1, top3: share of labels that are among a head's first one or three candidates. target_share: of the step's time,
    in the target's pass.
    """
    n_heads = run.config.draft.n_heads
    heads = result.heads
    own = torch.cat([heads.sums[:, None], heads.rank_counts, heads.n_ranked[:, None]], dim=1).double()
    totals = torch.tensor(run.ranks.sum(own.flatten().tolist())).view(n_heads, RANKS + 2)
    head_loss = [total / max(n, 1) for total, n in zip(totals[:, 0].tolist(), result.n_labels, strict=True)]
    if not all(map(math.isfinite, head_loss)):
        raise RuntimeError(f"the loss of step {run.step} is {head_loss}; lower optimizer.peak_lr and start a new run")
    rates = totals[:, 1:-1].cumsum(1) / totals[:, -1:].clamp(min=1)
    tokens = run.config.train.global_batch * run.config.data.seq_len
    return {
        "step": run.step,
        "tokens": run.step * tokens,
        "loss": sum(head_loss),
        "head_loss": head_loss,
        "top1": rates[:, 0].tolist(),
        "top3": rates[:, RANKS - 1].tolist(),
        "lr": result.rate,
        "grad_norm": run.engine.grad_norm(),
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
