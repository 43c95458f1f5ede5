"""Checkpoints of a run: written to a temporary name, synced, renamed; found again after a kill.

    run_dir/config.yaml               the resolved config the run began with
    run_dir/checkpoints/step_000120/  DeepSpeed's files to resume from (frozen weights left out), draft.safetensors, the
                                      whole draft to export, and state.json, written last
DeepSpeed unpickles its files: only ever resume your own runs. Not here: exports (train/export.py).
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from longdraft.train.config import Config, config_from_dict, to_dict, to_yaml
from longdraft.train.engine import DraftEngine, Ranks

STATE, WEIGHTS = "state.json", "draft.safetensors"
# What may differ between a run and its resumption; anything else would change the result.
FREE = ("train.run_dir", "train.save_every", "train.keep_checkpoints", "train.micro_batch", "log", "heldout")


def checkpoint_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def begin_run(config: Config) -> None:
    """Notes the config in the run's folder; called by rank 0, once everything has opened, before the first step."""
    saved = Path(config.train.run_dir) / "config.yaml"
    saved.parent.mkdir(parents=True, exist_ok=True)
    temporary = saved.with_suffix(".tmp")
    temporary.write_text(to_yaml(config), encoding="utf-8")
    temporary.rename(saved)


@contextmanager
def locked(run_dir: str | Path, ranks: Ranks) -> Iterator[None]:
    """Holds the run's folder against another run; all ranks enter together. The system lets go when a process dies.

    Raises:
        ValueError: another process trains in this folder.
    """
    handle, busy = None, 0.0
    if ranks.first:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        handle = (Path(run_dir) / "lock").open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = 1.0
    try:
        if ranks.sum([busy])[0]:
            raise ValueError(
                f"train.run_dir: another process trains in {run_dir}; stop it (an orphaned rank, perhaps) or give "
                "another folder"
            )
        yield
    finally:
        if handle is not None:
            handle.close()


def check_same_run(old: Config, new: Config) -> None:
    """Raises ValueError naming the first field in which `new` would not continue `old`."""
    flat_old, flat_new = _flat(to_dict(old)), _flat(to_dict(new))
    for name, value in flat_new.items():
        if flat_old[name] != value and not any(name == free or name.startswith(free + ".") for free in FREE):
            raise ValueError(
                f"{name}: {value!r}, but the run in {new.train.run_dir} began with {flat_old[name]!r}, which would give"
                f" another result; set it back, or start anew with train.run_dir=another/folder"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def save(engine: DraftEngine, run_dir: str | Path, step: int, extra: dict[str, Any], keep: int) -> Path:
    """Saves what `load` needs to go on after `step` steps; all ranks call it. Returns the checkpoint's folder.

    Args:
        extra: JSON values for `load` to give back, rank 0's.
        keep: older checkpoints beyond this number are removed.
    """
    folder, ranks = checkpoint_folder(run_dir), engine.ranks
    name = f"step_{step:06d}"
    temporary, final = folder / f"tmp-{name}", folder / name
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    engine.deepspeed.save_checkpoint(
        str(folder), tag=temporary.name, client_state={}, save_latest=False, exclude_frozen_parameters=True
    )
    weights = engine.weights()
    if ranks.first:
        save_file(weights, temporary / WEIGHTS)
    ranks.barrier()
    if ranks.local_rank == 0:
        for file in temporary.iterdir():
            _sync(file)
    ranks.barrier()
    if ranks.first:
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        content = {"step": step, "world_size": ranks.world_size, "files": sizes, "config": to_dict(engine.config)}
        (temporary / STATE).write_text(json.dumps(content | {"extra": extra}, indent=1), encoding="utf-8")
        _sync(temporary / STATE)
        _sync(temporary)
        if final.exists():  # saved before a kill that lost the steps behind it
            shutil.rmtree(final)
        temporary.rename(final)
        _sync(folder)
        finished = _finished(folder)
        place = finished.index(final)
        # What lies behind is of a time line that a damaged checkpoint ended; what lies far before is not kept.
        for old in [*finished[place + 1 :], *finished[: max(0, place + 1 - keep)]]:
            shutil.rmtree(old)
    ranks.barrier()
    return final


def newest(run_dir: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint and its state.json, or None. A folder whose files are missing or have another size
    than when they were saved is passed over, with a line that says so.

    Raises:
        ValueError: there are checkpoints, but none is whole.
    """
    finished = _finished(checkpoint_folder(run_dir))
    for folder in reversed(finished):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        broken = [
            file
            for file, size in state["files"].items()
            if not (folder / file).is_file() or (folder / file).stat().st_size != size
        ]
        if not broken:
            return folder, state
        print(f"{folder} is damaged ({', '.join(broken)}) and is passed over", flush=True)
    if finished:
        raise ValueError(
            f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, remove the folder to start anew, "
            "or give another"
        )
    return None


def load(engine: DraftEngine, folder: Path, state: dict[str, Any]) -> None:
    """Puts weights and optimizer back as they were; all ranks call it.

    Raises:
        ValueError: the checkpoint is of another number of ranks.
    """
    if state["world_size"] != engine.ranks.world_size:
        raise ValueError(
            f"train.run_dir: {folder} was saved by {state['world_size']} ranks and cannot be resumed by "
            f"{engine.ranks.world_size}; start {state['world_size']} ranks, or a new run: train.run_dir=another/folder"
        )
    loaded, _ = engine.deepspeed.load_checkpoint(str(folder.parent), tag=folder.name)
    assert loaded is not None, f"DeepSpeed found nothing in {folder}"


def saved_config(run_dir: str | Path, state: dict[str, Any]) -> Config:
    """The config a checkpoint was saved under, at the place where its run lies now."""
    values = state["config"]
    return config_from_dict(values | {"train": values["train"] | {"run_dir": str(run_dir)}})


def _finished(folder: Path) -> list[Path]:
    """Checkpoints from oldest to newest; a kill leaves only names that begin with tmp-."""
    return sorted(
        (path.parent for path in folder.glob(f"step_{'[0-9]' * 6}/{STATE}")), key=lambda path: int(path.name[5:])
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
