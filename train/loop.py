"""The training loop: runs the stages of a config one after the other, and the steps of each run."""

import gc
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import CONFIG, WEIGHTS, read_info
from longdraft.models.files import file_digest, locked, write_text
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.config_file import Stage
from longdraft.train.export import export
from longdraft.train.model_card import draw_curves
from longdraft.train.ranks import Ranks
from longdraft.train.setup import Run, check_same, check_shared, check_stages, open_run, open_target
from longdraft.train.step import StepResult, begin_step_sum, finish_step_sum, measure, train_step
from longdraft.train.tracking import Tracker, read_metrics
from longdraft.train.validation import validate

# Metrics that `gains` compares between a run's start and its end: key in metrics.jsonl, and name in the log.
MEASURED = {
    "heldout_choice_rates": "target's choice", "heldout_overlaps": "overlap", "decode_tokens_per_step": "tokens/step",
}  # fmt: skip


def train_stages(stages: Sequence[Stage], ranks: Ranks, stop: Sequence[int] = ()) -> None:
    """Train the unfinished stages in order, until all are done or `stop` (`signals_noted`) is non-empty on any rank.
    All ranks call it.

    Raises:
        ValueError: a config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot continue.
    """
    check_same(stages, ranks)
    if any(stage.config.train.deterministic for stage in stages):  # cuBLAS reads it once, at a process's first matmul
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    done = ranks.from_first(lambda: [stage.name is not None and _is_done(stage) for stage in stages])
    left = [stage for stage, is_done in zip(stages, done, strict=True) if not is_done]
    for _, of_same_target in groupby(stages, lambda stage: (stage.config.target, stage.config.train.precision)):
        target: Target | None = None  # frees the one before
        for stage in of_same_target:
            if stage.name is not None:
                of_all = f"{1 + stages.index(stage)} of {len(stages)}"
                ranks.log(f"Stage {stage.name}, {of_all}{'' if stage in left else ': done'}")
            if stage not in left:
                continue
            gc.collect()  # the engine and transformers' models of the stage before contain reference cycles
            target = target or check_stages(left, ranks) or open_target(stage.config, ranks)
            if not train(stage.config, ranks, target, stop, stage.name):
                return
            left.remove(stage)
            if stage.name is not None:
                ranks.from_first(partial(export, stage.config.train.run_dir, target=target))


def _is_done(stage: Stage) -> bool:
    """Whether the draft of the run's last step is exported; a stopped run or best weights may have been exported
    instead. A converted draft has no steps: its stage counts as done. A kill may have left only one of the two files,
    or one of an older draft. Raises ValueError if the draft was trained with other settings than the stage's."""
    weights = stage.draft / WEIGHTS
    if not (stage.draft / CONFIG).is_file() or not weights.is_file():
        return False
    info = read_info(stage.draft)
    if info.weights_sha256 not in (None, file_digest(weights)):
        return False
    if info.step != info.train_config.get("train", {}).get("steps"):
        return False
    if info.step is None:
        return True
    config, saved = stage.config, checkpoint.saved_config(stage.config.train.run_dir, {"config": info.train_config})
    if config.train.steps is None:  # given in epochs, whose rows may have been deleted
        config = config.changed(train={"steps": info.step, "epochs": None})
    for name, (now, before) in checkpoint.changes(saved, config.resolved(0)).items():
        if name != "target.path":  # `export` makes a local path absolute
            raise ValueError(
                f"stages.{stage.name}: {name}: {now!r}, but {stage.draft} was trained with {before!r}; restore it, "
                f"set it for later stages as stages.NAME.{name}, or start a new run with train.run_dir=another/folder"
            )
    return True


def train(config: Config, ranks: Ranks, target: Target, stop: Sequence[int] = (), stage: str | None = None) -> bool:
    """Train until the run's last step, or until `stop` (`signals_noted`) is non-empty on any rank. All ranks call it.

    Args:
        target: the run's target (`open_target`).
        stage: the stage's name, if the run is a stage.

    Returns: whether the run is done.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot continue.
    """
    rows = ShardSet(Path(config.data.path) / "train")
    config = config.resolved(len(rows))
    run_dir, n_steps = config.train.run_dir, config.train.n_steps
    busy = f"another process trains in {run_dir}; stop it (an orphaned rank, perhaps) or give another folder"
    with ExitStack() as held:
        ranks.from_first(lambda: held.enter_context(locked(Path(run_dir) / "lock", "train.run_dir", busy)))
        folders = checkpoint.checkpoint_folder(run_dir), checkpoint.best_folder(run_dir)
        check_shared(folders[0], ranks)
        ranks.from_first(lambda: [*map(checkpoint.remove_unfinished, folders)])
        found = ranks.from_first(partial(checkpoint.newest, run_dir))
        undecoded = ranks.from_first(lambda: found is not None and _lacks_decoding(config, found.state))
        if found is not None:
            checkpoint.check_continues(found.state, config, rows.identity)
            if found.state["step"] >= n_steps and not undecoded:
                ranks.log(f"Training is done already: {n_steps} steps, checkpoint in {found.folder}")
                return True
        run = open_run(config, ranks, target, found)
        run.stop = stop
        ranks.log(_described(run))
        if ranks.first:
            if found is None:  # weights of an earlier run that ended before its first checkpoint
                shutil.rmtree(checkpoint.best_folder(run_dir), ignore_errors=True)
            wandb_id = found and found.state["extra"].get("wandb_id")
            write_text(Path(run_dir) / "config.yaml", to_yaml(config))
            # At step 0, -1 removes the records of step 0 too, since they are measured again.
            run.tracker = Tracker(config, run.method.part_names, run.step or -1, wandb_id, stage)
            run.bar = tqdm(total=n_steps, initial=run.step, desc="train", unit="step", mininterval=0.5)
        if undecoded or (run.step == 0 and config.draft.start_from is not None):
            # At step 0, the baseline for `gains`; later, the decoding that a stop cut off.
            ranks.log(f"Measuring {config.draft.start_from if run.step == 0 else 'the draft'} on held-out rows first")
            _evaluate(run, validates=run.is_due(run.step, config.heldout.every), decodes=True)
        saved = found and found.folder
        while run.step < n_steps and (result := train_step(run)) is not None:
            run.step += 1
            saved = _after_step(run, result)
        saved = saved or _save(run)  # before anything that may block or fail
        run.bar.close()
        if run.tracker:
            run.tracker.close()
        run.engine.close()
    if run.step < n_steps or run.undecoded:
        ranks.log(f"Stopped after {run.step} of {n_steps} steps; the same command resumes from {saved}")
        return False
    if ranks.first and (gained := gains(read_metrics(run_dir))):
        ranks.log(f"Held out, from {config.draft.start_from} to step {n_steps}: {gained}")
    ranks.log(f"Trained: {n_steps} steps, checkpoint in {saved}; next: {shlex.join(['longdraft', 'export', run_dir])}")
    return True


def _lacks_decoding(config: Config, state: dict[str, Any]) -> bool:
    """Whether a stop cut off the decoding of a checkpoint's weights, and it has not been repeated since."""
    records = read_metrics(config.train.run_dir)
    decoded = any(record["step"] == state["step"] and "decode_s" in record for record in records)
    return bool(config.decoding.every and state["extra"].get("undecoded")) and not decoded


def _described(run: Run) -> str:
    """The line that is logged before the first step."""
    train, data = run.config.train, run.config.data
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.draft.parameters())
    return (
        f"Training {run.config.draft.method} ({parameters / 1e6:.1f} M parameters) for {run.config.target.path} on "
        f"{run.ranks.world_size} {'GPU' if run.ranks.device.type == 'cuda' else 'CPU'} rank(s), {train.precision}, "
        f"ZeRO-{train.zero_stage}: step {run.step} to {train.n_steps}, up to {train.global_batch * data.seq_len:,} "
        f"tokens each, from {data.path}; output in {train.run_dir}"
    )


def _after_step(run: Run, result: StepResult) -> Path | None:
    """After a step, log, validate, decode and save if each is due. Returns the checkpoint, if one was saved."""
    config = run.config
    logs, validates, saves = (
        run.is_due(run.step, every) for every in (config.log.every, config.heldout.every, config.train.save_every)
    )
    decodes = run.decoding is not None and run.is_due(run.step, config.decoding.every)
    if logs or validates or decodes or saves:
        finish_step_sum(run)  # before anything is recorded about these weights
    if logs:
        record = measure(run, result)
        _write(run, record)
        shown = {"loss": record["loss"] and f"{record['loss']:.3f}", "tokens_s": f"{record['tokens_per_s']:.0f}"}
        run.bar.set_postfix(shown, refresh=False)
    _evaluate(run, validates, decodes)
    saved = _save(run) if saves else None
    if run.step < config.train.n_steps and (validates or decodes or saves):  # a stop signal may have arrived meanwhile
        begin_step_sum(run)
    run.bar.update()
    return saved


def _evaluate(run: Run, validates: bool, decodes: bool) -> None:
    """Measure the current weights on held-out rows and by decoding, if asked to."""
    config = run.config
    if validates:
        begin = time.perf_counter()
        run.heldout = validate(run, run.heldout_rows)
        taken = {"heldout_s": time.perf_counter() - begin}
        _write(run, {f"heldout_{key}": value for key, value in run.heldout.items()} | taken)
    run.undecoded = False
    if run.decoding is not None and decodes:
        decoded = run.decoding.after_step(run.engine, run.step, run.heldout if validates else {}, run.stop)
        run.undecoded = decoded is None
        if decoded is not None:
            _write(run, decoded)
            if run.tracker:
                draw_curves(config.train.run_dir, read_metrics(config.train.run_dir))


def gains(records: Sequence[dict[str, Any]]) -> str:
    """Text that compares the metrics after the last step with those before the first; "" if the draft began as new.

    Rates and overlaps are means over the heads or levels that have labels. A rate is that of the first candidates.
    """
    found = []
    for key, what in MEASURED.items():
        measured = [record for record in records if record.get(key) is not None]
        if measured and (measured[0]["step"], measured[-1]["step"]) == (0, records[-1]["step"]):
            values = (np.atleast_1d(np.array(one[key], dtype=float)) for one in (measured[0], measured[-1]))
            before, after = (float(np.nanmean(value[:, 0] if value.ndim == 2 else value)) for value in values)
            found.append(f"{what} {before:.3f} -> {after:.3f}")
    return "; ".join(found)


def _write(run: Run, record: dict[str, Any]) -> None:
    """Write a record of the run's current step, on the first rank only."""
    if run.tracker:
        run.tracker.write({"step": run.step} | record)


def _save(run: Run) -> Path:
    extra = {
        "heldout": run.heldout,
        "wandb_id": run.tracker and run.tracker.wandb_id,
        "skipped": run.skipped,
        "undecoded": run.undecoded,
        "data": run.rows.identity,
        "target_weights": run.target_weights,
    }
    train, state = run.config.train, {"step": run.step, "config": to_dict(run.config), "extra": extra}
    begin = time.perf_counter()
    saved = checkpoint.save(run.engine, train.run_dir, state, keep=train.keep_checkpoints)
    _write(run, {"checkpoint_s": time.perf_counter() - begin})
    return saved
