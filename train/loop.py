"""A training run from config to last checkpoint: what continues it, when it is evaluated, saved and stopped.

Not here: what opens (setup.py), what a step computes (step.py), DeepSpeed (deepspeed_engine.py), files (checkpoint.py,
tracking.py), several stages (stages.py).
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import Config, accumulation, resolved
from longdraft.train.operations import operations
from longdraft.train.plots import draw_decoding
from longdraft.train.ranks import Ranks, failures_named
from longdraft.train.setup import Run, describe, open_run
from longdraft.train.step import hear, measure, train_step, where_time_goes
from longdraft.train.tracking import Tracker, read_metrics
from longdraft.train.validation import evaluate


def train(
    config: Config, ranks: Ranks, target: Target | None = None, stop: Sequence[int] = (), stage: str | None = None
) -> bool:
    """Trains until the run's steps are done or something is in `stop` (train/stop.py) on any rank; all ranks call it.

    Args:
        target: saves loading the run's own.
        stage: its name, where the run is one of a curriculum.

    Returns: whether the steps are done.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    accumulation(config, ranks.world_size)
    config = resolved(config, len(ShardSet(Path(config.data.path) / "train")))
    with failures_named(ranks), checkpoint.locked(config.train.run_dir, ranks):
        return _train(config, ranks, target, stop, stage)


def _train(config: Config, ranks: Ranks, target: Target | None, stop: Sequence[int], stage: str | None) -> bool:
    found = checkpoint.find(config.train.run_dir, ranks)
    if found is not None:
        checkpoint.check_same_run(checkpoint.saved_config(config.train.run_dir, found[1]), config)
        checkpoint.check_same_data(found[1], ShardSet(Path(config.data.path) / "train").identity(), config)
    if found is not None and found[1]["step"] >= config.train.n_steps:
        ranks.log(f"Training is done already: {config.train.n_steps} steps, checkpoint in {found[0]}")
        return True
    opened = open_run(config, ranks, target)
    if found is not None:
        checkpoint.check_same_target(found[1], opened.target_weights, config)
    ranks.barrier()  # all have looked before rank 0 writes
    if ranks.first:
        checkpoint.begin_run(config)
    if found is not None:
        checkpoint.load(opened.engine, *found)
        extra = found[1]["extra"]
        opened.step, opened.skipped = found[1]["step"], extra["skipped"]
        opened.heldout, opened.wandb_id = extra["heldout"], extra["wandb_id"]
    ranks.log(describe(opened))
    if opened.decoding is not None:
        opened.decoding.begin(found[1]["extra"].get("decoding") if found else None, found is not None, stop)
    saved = _steps(opened, stop, saved=found[0] if found else None, stage=stage)
    opened.engine.close()
    steps = config.train.n_steps
    if opened.step < steps:
        ranks.log(f"Stopped after {opened.step} of {steps} steps; the same command goes on from {saved}")
    else:
        ranks.log(f"Trained: {steps} steps, checkpoint in {saved}; next: longdraft export {config.train.run_dir}")
    return opened.step == steps


def _steps(run: Run, stop: Sequence[int], saved: Path | None, stage: str | None) -> Path:
    """The steps from run.step on, of which `saved` is the checkpoint; returns the last checkpoint."""
    train, ranks = run.config.train, run.ranks
    tracker = Tracker(run.config, run.method.part_names, run.step, run.wandb_id, stage) if ranks.first else None
    run.wandb_id = tracker.wandb_id if tracker else None
    bar = tqdm(
        total=train.n_steps, initial=run.step, desc="train", unit="step", disable=not ranks.first, mininterval=0.5
    )
    recent: deque[dict[str, Any]] = deque(maxlen=200)
    while run.step < train.n_steps:
        result = train_step(run, stop)
        if result is None:
            break
        saved = None
        run.step += 1
        last = run.step == train.n_steps
        if last or run.step % run.config.log.every == 0:
            record = measure(run, result)
            recent.append(record)
            if tracker:
                tracker.write(record)
                bar.set_postfix(loss=f"{record['loss']:.3f}", tokens_s=f"{record['tokens_per_s']:.0f}", refresh=False)
        probed = last or run.step % run.config.heldout.every == 0
        if probed or (run.decoding is not None and run.step % run.config.decoding.every == 0):
            hear(run)  # before what is written of these weights; who wishes to stop is told again
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
    if recent:
        ranks.log(where_time_goes(recent, operations(run.config, run.teacher.model.config).r))
    saved = saved or _save(run)  # before W&B, which may wait for its network
    if tracker:
        tracker.close()
    return saved


def _save(run: Run) -> Path:
    train = run.config.train
    hear(run)
    extra = {"heldout": run.heldout, "wandb_id": run.wandb_id, "skipped": run.skipped, "data": run.rows.identity()}
    extra["target_weights"] = run.target_weights
    extra["decoding"] = None if run.decoding is None else run.decoding.saved()
    return checkpoint.save(run.engine, train.run_dir, run.step, extra, keep=train.keep_checkpoints)
