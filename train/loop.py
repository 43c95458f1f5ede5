"""Training from the first step to the last checkpoint: stages one after the other, and the steps of one run."""

import gc
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import CONFIG, WEIGHTS, read_info
from longdraft.models.files import file_digest, locked, write_atomically
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.config_file import Stage
from longdraft.train.export import export
from longdraft.train.model_card import draw_curves
from longdraft.train.ranks import Ranks, failures_named
from longdraft.train.setup import Run, check_stages, open_run, open_target
from longdraft.train.step import StepResult, begin_step_sum, finish_step_sum, measure, train_step
from longdraft.train.tracking import Tracker, read_metrics
from longdraft.train.validation import validate

# What is compared at a run's end with what it began with: keys of its records, and what they are.
MEASURED = {
    "heldout_choice_rates": "target's choice", "heldout_overlaps": "overlap", "decode_tokens_per_step": "tokens/step",
}  # fmt: skip


def train_stages(stages: Sequence[Stage], ranks: Ranks, stop: Sequence[int] = ()) -> None:
    """Train the stages that are not done yet, until all are or something is in `stop` (`signals_noted`) on any rank;
    all ranks call it.

    Raises:
        ValueError: a config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    target: Target | None = None
    loaded: Any = None
    if any(stage.config.train.deterministic for stage in stages):  # cuBLAS reads it once, at a process's first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    done = ranks.from_first(lambda: [stage.name is not None and _is_done(stage) for stage in stages])
    for number, (stage, is_done) in enumerate(zip(stages, done, strict=True), start=1):
        config = stage.config
        if stage.name is not None:
            ranks.log(f"Stage {stage.name}, {number} of {len(stages)}{': done' if is_done else ''}")
            if is_done:
                continue
        is_first, wanted = loaded is None, (config.target, config.train.precision)
        target = target if loaded == wanted else None  # its memory is freed before another is loaded
        gc.collect()  # DeepSpeed's engine of the stage before and transformers' models refer to themselves
        if target is None:
            target, loaded = open_target(config, ranks), wanted
        if is_first:
            check_stages([one for one, is_done in zip(stages, done, strict=True) if not is_done], target, ranks)
        if not train(config, ranks, target, stop, stage.name):
            return
        if stage.name is not None:
            with failures_named(ranks):
                ranks.from_first(partial(export, config.train.run_dir, target=target))


def _is_done(stage: Stage) -> bool:
    """Whether the draft of the last step of the stage's run is exported: a stopped run and best weights can be exported
    too. A converted draft has no steps, and its stage is done. A kill may have left one file of the two, or an older
    draft's. Raises ValueError where the draft was trained with other settings than the stage has now."""
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
    if config.train.steps is None:  # epochs, of rows that need not be there any more
        config = config.changed(train={"steps": info.step, "epochs": None})
    for name, (now, before) in checkpoint.changes(saved, config.resolved(0)).items():
        if name != "target.path":  # of which the draft has a part
            raise ValueError(
                f"stages.{stage.name}: {name}: {now!r}, but {stage.draft} was trained with {before!r}; set it back, "
                f"give it to later stages as stages.NAME.{name}, or start anew with train.run_dir=another/folder"
            )
    return True


def train(config: Config, ranks: Ranks, target: Target, stop: Sequence[int] = (), stage: str | None = None) -> bool:
    """Train until the run's steps are done or something is in `stop` (`signals_noted`) on any rank; all ranks call it.

    Args:
        target: the run's (`open_target`).
        stage: its name, where the run is one of several stages.

    Returns: whether the run is done.

    Raises:
        ValueError: the config does not fit the ranks, the data, the target or the run already in its folder.
        TrainingError: training cannot go on.
    """
    rows = ShardSet(Path(config.data.path) / "train")
    config = config.resolved(len(rows))
    run_dir, n_steps = config.train.run_dir, config.train.n_steps
    busy = f"another process trains in {run_dir}; stop it (an orphaned rank, perhaps) or give another folder"
    with failures_named(ranks), ExitStack() as held:
        lock = Path(run_dir) / "lock"
        ranks.from_first(lambda: held.enter_context(locked(lock, "train.run_dir", busy)))
        if not all(ranks.gather(lock.exists())):
            raise ValueError(f"train.run_dir: not all machines see the first one's {run_dir}; give a shared folder")
        found = ranks.from_first(partial(checkpoint.newest, run_dir))
        undecoded = ranks.from_first(lambda: found is not None and _lacks_decoding(config, found[1]))
        if found is not None:
            checkpoint.check_continues(found[1], config, rows.identity)
            if found[1]["step"] >= n_steps and not undecoded:
                ranks.log(f"Training is done already: {n_steps} steps, checkpoint in {found[0]}")
                return True
        run = open_run(config, ranks, target, found)
        run.stop = stop
        ranks.log(_described(run))
        if ranks.first:
            if found is None:  # what lies there is from a run that ended before its first checkpoint
                shutil.rmtree(checkpoint.best_folder(run_dir), ignore_errors=True)
            text, wandb_id = to_yaml(config), found and found[1]["extra"].get("wandb_id")
            write_atomically(Path(run_dir) / "config.yaml", lambda file: file.write_text(text, "utf-8"))
            # What was measured before the first step is measured again.
            run.tracker = Tracker(config, run.method.part_names, run.step or -1, wandb_id, stage)
            run.bar = tqdm(total=n_steps, initial=run.step, desc="train", unit="step", mininterval=0.5)
        if undecoded or (run.step == 0 and config.draft.start_from is not None):
            # At step 0 what the training will be compared with; later what an unbroken run would have measured.
            _evaluate(run, validates=_is_due(run, config.heldout.every), decodes=True)
        saved = found and found[0]
        while run.step < n_steps and (result := train_step(run)) is not None:
            run.step += 1
            saved = _after_step(run, result)
        saved = saved or _save(run)  # before anything that may wait or fail
        run.bar.close()
        if run.tracker:
            run.tracker.close()
        run.engine.close()
    if run.step < n_steps or run.undecoded:
        ranks.log(f"Stopped after {run.step} of {n_steps} steps; the same command goes on from {saved}")
        return False
    if ranks.first and (gained := gains(read_metrics(run_dir))):
        ranks.log(f"From {config.draft.start_from} to step {n_steps}, held out: {gained}")
    ranks.log(f"Trained: {n_steps} steps, checkpoint in {saved}; next: {shlex.join(['longdraft', 'export', run_dir])}")
    return True


def _lacks_decoding(config: Config, state: dict[str, Any]) -> bool:
    """Whether a stop ended the decoding of a checkpoint's weights, and nothing has made up for it."""
    records = read_metrics(config.train.run_dir)
    decoded = any(record["step"] == state["step"] and "decode_s" in record for record in records)
    return bool(config.decoding.every and state["extra"].get("undecoded")) and not decoded


def _described(run: Run) -> str:
    """What is logged before the first step."""
    train, data = run.config.train, run.config.data
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in run.engine.draft.parameters())
    return (
        f"Training {run.config.draft.method} ({parameters / 1e6:.1f} M parameters) for {run.config.target.path} on "
        f"{run.ranks.world_size} {'GPU' if run.ranks.device.type == 'cuda' else 'CPU'} rank(s), {train.precision}, "
        f"ZeRO-{train.zero_stage}: step {run.step} to {train.n_steps}, up to {train.global_batch * data.seq_len:,} "
        f"tokens each, from {data.path}; all goes to {train.run_dir}"
    )


def _after_step(run: Run, result: StepResult) -> Path | None:
    """Log, validate, decode and save as far as each is due after a step; returns the checkpoint, if one was saved."""
    config = run.config
    logs, validates, saves = (
        _is_due(run, every) for every in (config.log.every, config.heldout.every, config.train.save_every)
    )
    decodes = run.decoding is not None and _is_due(run, config.decoding.every)
    if logs or validates or decodes or saves:
        finish_step_sum(run)  # before anything is written about these weights
    if logs:
        record = measure(run, result)
        _write(run, record)
        shown = {"loss": record["loss"] and f"{record['loss']:.3f}", "tokens_s": f"{record['tokens_per_s']:.0f}"}
        run.bar.set_postfix(shown, refresh=False)
    _evaluate(run, validates, decodes)
    saved = _save(run) if saves else None
    if run.step < config.train.n_steps and (validates or decodes or saves):  # a wish to stop may have come meanwhile
        begin_step_sum(run)
    run.bar.update()
    return saved


def _is_due(run: Run, every: int) -> bool:
    """Whether what is done every so many steps, and after the last one, is done after the present one."""
    return run.step == run.config.train.n_steps or run.step % every == 0


def _evaluate(run: Run, validates: bool, decodes: bool) -> None:
    """Measure the present weights on held-out rows, and by decoding."""
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
    """What was measured before the first step and after the last, in words; "" for a run that began with a new draft.

    Rates and overlaps are means over heads or levels that have labels, rates those of the first candidates.
    """
    found = []
    for key, what in MEASURED.items():
        measured = [record for record in records if record.get(key) is not None]
        if measured and (measured[0]["step"], measured[-1]["step"]) == (0, records[-1]["step"]):
            values = (np.atleast_1d(np.array(one[key], dtype=float)) for one in (measured[0], measured[-1]))
            before, after = (float(np.nanmean(value[:, 0] if value.ndim == 2 else value)) for value in values)
            found.append(f"{what} {before:.3f} -> {after:.3f}, {'' if after > before else 'not '}better")
    return "; ".join(found)


def _write(run: Run, record: dict[str, Any]) -> None:
    """Write a record of the run's present step, on the first rank."""
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
