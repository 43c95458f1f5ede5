"""Training from the first step to the last checkpoint: stages one after the other, and the steps of one run."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import read_info
from longdraft.models.files import locked, write_atomically
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.checkpoint import Found
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.config_file import Stage
from longdraft.train.export import export
from longdraft.train.model_card import draw_curves
from longdraft.train.ranks import Ranks, failures_named
from longdraft.train.setup import Run, describe, open_run, open_target
from longdraft.train.step import (
    StepResult,
    begin_step_sum,
    counted,
    finish_step_sum,
    measure,
    train_step,
    where_time_goes,
)
from longdraft.train.tracking import Tracker, read_metrics
from longdraft.train.validation import validate

DONE = "done"
# The number of logged steps that the line about time at a run's end looks back on.
LATEST = 200


def train_stages(stages: Sequence[Stage], ranks: Ranks, stop: Sequence[int] = ()) -> None:
    """Train the stages that are not done yet, until all are or something is in `stop` (`signals_noted`) on any rank;
    all ranks call it.

    Raises:
        ValueError: a config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    target: Target | None = None
    loaded: Any = None
    for number, stage in enumerate(stages):
        config = stage.config
        if stage.name is not None:
            progress = ranks.from_first(lambda stage=stage: [_progress(one, check=one is stage) for one in stages])
            overview = ", ".join(f"{one.name} {how_far}" for one, how_far in zip(stages, progress, strict=True))
            ranks.log(f"Stage {stage.name}, {number + 1} of {len(stages)}: {overview}")
            if progress[number] == DONE:
                continue
        if loaded != (config.target, config.train.precision):
            target = None  # free its memory before the next one is loaded
            target, loaded = open_target(config, ranks), (config.target, config.train.precision)
        if not train(config, ranks, target, stop, stage.name):
            return
        if stage.name is not None:
            # A sharded target's passes take all ranks, but one rank exports: it then loads a target of its own.
            whole = target if config.target.zero_stage == 0 else None
            with failures_named(ranks):
                ranks.from_first(partial(export, config.train.run_dir, target=whole))


def _progress(stage: Stage, check: bool) -> str:
    """How far a stage is, in a few words: DONE where the draft of its run's last step is exported, since a stopped run
    and best weights can be exported too. A stage that is done no longer needs its rows.

    check: raise ValueError where a stage that is done was trained with other settings or rows than the config's.
    """
    config, folder = stage.config, Path(stage.config.data.path) / "train"
    if stage.is_exported:
        info = read_info(stage.draft)
        n_steps = info.train_config.get("train", {}).get("steps")
        if None in (info.step, n_steps) or info.step == n_steps:  # a converted draft has no steps
            if check and folder.is_dir() and (found := checkpoint.newest(config.train.run_dir)):
                rows = ShardSet(folder)
                checkpoint.check_continues(found, config.resolved(len(rows)), rows.identity())
            return DONE
    found = checkpoint.newest(config.train.run_dir)
    return f"at step {found[1]['step']}" if found else "to come"


def train(
    config: Config, ranks: Ranks, target: Target | None = None, stop: Sequence[int] = (), stage: str | None = None
) -> bool:
    """Train until the run's steps are done or something is in `stop` (`signals_noted`) on any rank; all ranks call it.

    Args:
        target: the run's, where it is already loaded.
        stage: its name, where the run is one of several stages.

    Returns: whether the run is done, its last decoding included.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    config.train.n_passes(ranks.world_size)
    rows = ShardSet(Path(config.data.path) / "train")
    config = config.resolved(len(rows))
    run_dir, n_steps = config.train.run_dir, config.train.n_steps
    busy = f"another process trains in {run_dir}; stop it (an orphaned rank, perhaps) or give another folder"
    with failures_named(ranks), ExitStack() as held:
        ranks.from_first(lambda: held.enter_context(locked(Path(run_dir) / "lock", "train.run_dir", busy)))
        found = ranks.from_first(partial(checkpoint.newest, run_dir, read=None))
        if found is not None:
            checkpoint.check_continues(found, config, rows.identity())
            # The decoding after the last step may have been interrupted.
            decoded = found[1]["extra"].get("decoding") or {"last_step": n_steps}
            if found[1]["step"] >= n_steps and (decoded["last_step"] >= n_steps or not config.decoding.every):
                ranks.log(f"Training is done already: {n_steps} steps, checkpoint in {found[0]}")
                return True
        run = open_run(config, ranks, target, found)
        _restore(run, found, stop, stage)
        saved = found[0] if found and run.step < n_steps else None
        if run.step == n_steps:
            _decode(run, run.heldout)
        while run.step < n_steps and (result := train_step(run)) is not None:
            run.step += 1
            saved = _after_step(run, result)
        saved = saved or _save(run)  # before anything that may wait or fail
        _close(run)
    done = run.step == n_steps and (run.decoding is None or run.decoding.last_step == n_steps)
    if not done:
        ranks.log(f"Stopped after {run.step} of {n_steps} steps; the same command goes on from {saved}")
    else:
        ranks.log(
            f"Trained: {n_steps} steps, checkpoint in {saved}; next: {shlex.join(['longdraft', 'export', run_dir])}"
        )
    return done


def _restore(run: Run, found: Found | None, stop: Sequence[int], stage: str | None) -> None:
    """Bring a run that was just opened to where its checkpoint left it, if it has one, and begin its records."""
    config, ranks = run.config, run.ranks
    run.stop = stop
    extra: dict[str, Any] = {}
    if found is not None:
        checkpoint.load(run.engine, found)
        extra = found[1]["extra"]
        run.step, run.skipped, run.heldout = found[1]["step"], extra["skipped"], extra["heldout"]
    ranks.log(describe(run))
    if run.decoding is not None and found is None:  # what lies there is from a run that ended before its checkpoint
        ranks.from_first(partial(checkpoint.forget_best, config.train.run_dir))
    elif run.decoding is not None and extra.get("decoding"):
        run.decoding.last_step = extra["decoding"]["last_step"]
    if ranks.first:
        text = to_yaml(config)
        write_atomically(Path(config.train.run_dir) / "config.yaml", lambda file: file.write_text(text, "utf-8"))
        run.tracker = Tracker(config, run.method.part_names, run.step, extra.get("wandb_id"), stage)
        run.bar = tqdm(total=config.train.n_steps, initial=run.step, desc="train", unit="step", mininterval=0.5)


def _after_step(run: Run, result: StepResult) -> Path | None:
    """Log, validate, decode and save as far as each is due after a step; returns the checkpoint, if one was saved."""
    config, tracker, step = run.config, run.tracker, run.step
    last = step == config.train.n_steps
    if last or step % config.log.every == 0:
        record = measure(run, result)
        if tracker:
            tracker.write(record)
            shown = {"loss": record["loss"] and f"{record['loss']:.3f}", "tokens_s": f"{record['tokens_per_s']:.0f}"}
            run.bar.set_postfix(shown, refresh=False)
    validates = last or step % config.heldout.every == 0
    takes_long = validates or (run.decoding is not None and step % config.decoding.every == 0)
    if takes_long:
        finish_step_sum(run)  # before anything is written about these weights
    if validates:
        heldout = validate(run, run.heldout_rows)
        if heldout["loss"] is None and run.heldout.get("positions") != 0:  # once a run
            run.ranks.log(
                f"heldout.rows: {config.heldout.rows}, and no row that is read has a label, so no held-out loss, rate "
                "or overlap is measured; raise it, or prepare longer rows"
            )
        run.heldout = heldout
        if tracker:
            tracker.write({"step": step} | {f"heldout_{key}": value for key, value in run.heldout.items()})
    _decode(run, run.heldout if validates else {})
    saved = _save(run) if last or step % config.train.save_every == 0 else None
    if not last and (takes_long or saved):  # a wish to stop may have come meanwhile
        begin_step_sum(run)
    run.bar.update()
    return saved


def _decode(run: Run, heldout: dict[str, Any]) -> None:
    """Decode if it is due, and log the outcome."""
    if run.decoding is None:
        return
    decoded = run.decoding.after_step(run.engine, run.step, heldout, run.stop)
    if run.tracker and decoded is not None:
        run.tracker.write({"step": run.step} | decoded)
        draw_curves(run.config.train.run_dir, read_metrics(run.config.train.run_dir))


def _save(run: Run) -> Path:
    finish_step_sum(run)
    extra = {
        "heldout": run.heldout,
        "wandb_id": run.tracker and run.tracker.wandb_id,
        "skipped": run.skipped,
        "data": run.rows.identity(),
        "target_weights": run.target_weights,
        "decoding": run.decoding and {"last_step": run.decoding.last_step},
    }
    train, state = run.config.train, {"step": run.step, "config": to_dict(run.config), "extra": extra}
    return checkpoint.save(run.engine, train.run_dir, state, keep=train.keep_checkpoints)


def _close(run: Run) -> None:
    run.bar.close()
    if run.tracker:
        run.tracker.close()
        stepped = [record for record in read_metrics(run.config.train.run_dir) if "step_s" in record]
        if stepped:
            found = counted(run)
            run.ranks.log(where_time_goes(stepped[-LATEST:], found and found.r))
    run.engine.close()
