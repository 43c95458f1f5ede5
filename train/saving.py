"""How the ranks save a run together and find it again: written to a temporary name, synced, renamed.

Not here: what lies in a run's folder (checkpoint.py), other numbers of ranks (elastic.py).
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, sync, write_atomically, write_tensors
from longdraft.train import elastic
from longdraft.train.checkpoint import (
    MASTERS,
    START,
    WEIGHTS,
    Found,
    best_folder,
    checkpoint_folder,
    finished_folders,
    newest,
    what_is_good,
)
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import LAG_S, Ranks, TrainingError
from longdraft.train.state_file import STATE, changed, damage, seal

# Errors of a rank that cannot write.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


def begin_run(config: Config, start: Mapping[str, str] | None) -> None:
    """Record the config in the run's folder and, for a new run, what it begins with (`Run.start`) and the folder's name
    at that time. Called by rank 0 before the first step, once everything is open."""
    folder = Path(config.train.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"config.yaml": to_yaml(config)}
    if start:
        texts[START] = json.dumps({**start, "run_dir": config.train.run_dir}, indent=2) + "\n"
    for name, text in texts.items():
        write_atomically(folder / name, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))


def save(engine: DraftEngine, run_dir: str | Path, step: int, extra: dict[str, Any], keep: int) -> Path:
    """Save what `load` needs to go on after `step` steps; all ranks call it. Returns the checkpoint's folder.

    Args:
        extra: JSON values to be found in the state file; those of rank 0 are written.
        keep: how many checkpoints to keep; older ones are removed.

    Raises TrainingError, on all ranks, where a weight is not a number or a rank cannot write (a full disk). What was
    saved before is then untouched.
    """
    folder, ranks = checkpoint_folder(run_dir), engine.ranks
    final = folder / f"step_{step:06d}"
    temporary = folder / f"tmp-{final.name}"
    weights, masters = engine.weights(), engine.masters()
    _check_finite(weights, run_dir, step, ranks)

    written: list[Path] = []  # by this rank
    described: dict[str, tuple[int, str]] = {}  # size and digest of each of these files

    def write_weights() -> None:
        if ranks.first:
            for name, tensors in ((WEIGHTS, weights), (MASTERS, masters)):
                if tensors:
                    write_tensors(tensors, temporary / name)
                    written.append(temporary / name)
        if ranks.local_rank == 0:
            for file in temporary.iterdir():
                sync(file)
        described.update({file.name: (file.stat().st_size, file_digest(file)) for file in written})

    def finish() -> None:
        threads = torch.get_num_threads() if ranks.device.type == "cpu" else None
        content = {"step": step, "world_size": ranks.world_size, "config": to_dict(engine.config), "threads": threads}
        _write_state(temporary, content | {"extra": extra}, files)
        _put_in_place(temporary, final, keep)

    failures = (
        ranks.attempt(lambda: _empty(temporary), WRITE_ERRORS, by_all=False)
        or ranks.attempt(lambda: written.extend(engine.write(temporary)), WRITE_ERRORS)
        or ranks.attempt(write_weights, WRITE_ERRORS)
    )
    files = {name: about for of_rank in ranks.gather(described) for name, about in of_rank.items()}
    failures = failures or ranks.attempt(finish, WRITE_ERRORS, by_all=False)
    if failures:
        ranks.from_first(partial(_give_up, temporary, step, failures, weights))
    return final


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_state(folder: Path, content: dict[str, Any], files: Mapping[str, tuple[int, str]]) -> None:
    """Write the state file, with size and digest of each of the folder's other files, and sync file and folder."""
    sizes = {name: size for name, (size, _) in sorted(files.items())}
    digests = {name: digest for name, (_, digest) in sorted(files.items())}
    (folder / STATE).write_text(seal(content | {"files": sizes}, digests), encoding="utf-8")
    sync(folder / STATE)
    sync(folder)


def _put_in_place(temporary: Path, final: Path, keep: int) -> None:
    """Rename a finished checkpoint, then remove what it replaces, what is too old, and what kills have left."""
    if final.exists():  # the run went back behind a damaged checkpoint, or only decoded
        _set_aside(final)
    temporary.rename(final)
    sync(final.parent)
    finished = finished_folders(final.parent)
    place = finished.index(final)
    # Later steps are left from before a damaged checkpoint made the run go back. `keep` counts the new checkpoint too.
    for old in [*finished[place + 1 :], *finished[: max(0, place + 1 - keep)]]:
        _set_aside(old)
    # These were being written or removed when a run was killed.
    for dead in final.parent.glob("tmp-*"):
        if dead.is_dir():
            shutil.rmtree(dead)
        else:
            dead.unlink()


def _set_aside(folder: Path) -> None:
    """Rename a checkpoint that is to be removed, so that a kill while its files go leaves no partial checkpoint."""
    aside = folder.with_name(f"tmp-old-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _check_finite(weights: dict[str, Tensor], run_dir: str | Path, step: int, ranks: Ranks) -> None:
    wrong = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if ranks.sum([float(bool(wrong))])[0]:
        raise TrainingError(
            f"step {step}: weights of the draft are no longer numbers ({', '.join(wrong[:3]) or 'on another rank'}) "
            f"and are not saved; {what_is_good(run_dir)}. Lower optimizer.peak_lr and start a new "
            "run: train.run_dir=another/folder"
        )


def _give_up(temporary: Path, step: int, failures: str, weights: dict[str, Tensor]) -> NoReturn:
    """Remove the half-written checkpoint, and raise TrainingError with the room that it needs."""
    shutil.rmtree(temporary, ignore_errors=True)
    # The weights twice, and masters and both moments in fp32.
    folder, needed = temporary.parent, sum(weight.nbytes * 2 + weight.numel() * 12 for weight in weights.values())
    raise TrainingError(
        f"train.run_dir: the checkpoint of step {step} cannot be written to {folder}: it needs {needed / 1e6:,.1f} MB, "
        f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free ({failures}). What was saved before is untouched: "
        f"make room, then the same command goes on from {_last(folder)}"
    )


def _last(folder: Path) -> str:
    finished = finished_folders(folder)
    return str(finished[-1]) if finished else "the beginning"


def find(run_dir: str | Path, ranks: Ranks, patience_s: float = LAG_S) -> Found | None:
    """`newest`, as the first rank sees it, on all ranks; all call it. The content of all its files is checked: each is
    read once, by one of the ranks.

    Raises ValueError as `newest` does, or where some rank does not see the files within `patience_s` seconds.
    """
    damaged: list[Path] = []
    while (found := ranks.from_first(lambda: newest(run_dir, passed_over=damaged))) is not None:
        folder, state = found
        unseen = ranks.unseen(folder, state["files"], patience_s)
        if unseen:
            raise ValueError(
                f"train.run_dir: not every rank sees {folder} ({unseen}); give a folder on a file system they share"
            )
        by_size = sorted(state["files"], key=state["files"].__getitem__)
        broken_here = changed(folder, state, by_size[ranks.rank :: ranks.world_size])
        broken = [name for of_rank in ranks.gather(broken_here) for name in of_rank]
        if not broken:
            break
        ranks.log(damage(folder, broken))
        damaged.append(folder)
    return found


def load(engine: DraftEngine, folder: Path, state: dict[str, Any]) -> None:
    """Put weights and optimizer back as they were; all ranks call it. There may be more or fewer ranks than saved the
    checkpoint. With as many, a CPU run also goes on with as many threads as it began with, since how a sum is split
    among them shows in its last bits; another number of ranks changes these bits anyway.

    Raises ValueError or TrainingError where a checkpoint of another number of ranks cannot be converted.
    """
    saved_by, ranks, threads = state["world_size"], engine.ranks, state["threads"]
    if saved_by == ranks.world_size:
        if threads is not None and ranks.device.type == "cpu" and threads != torch.get_num_threads():
            ranks.log(f"Threads of a rank: {threads}, as the run began with, not {torch.get_num_threads()}")
            torch.set_num_threads(threads)
        engine.read(folder)
        return
    ranks.log(f"{folder} was saved by {saved_by} ranks; it is converted for {ranks.world_size}")
    if state["step"]:  # before the first step there is nothing but what the seed gives
        elastic.load(engine, folder, saved_by)
    weights = engine.weights()
    ranks.from_first(lambda: _check_equal(weights, folder))


def _check_equal(weights: dict[str, Tensor], folder: Path) -> None:
    saved = load_file(folder / WEIGHTS)
    wrong = [name for name, weight in weights.items() if not torch.equal(weight, saved[name])]
    if wrong:
        raise TrainingError(
            f"train.run_dir: converted for this number of ranks, {folder} gives other weights "
            f"({', '.join(wrong[:3])}); go on with as many ranks as saved it"
        )


def save_best(
    config: Config, ranks: Ranks, step: int, weights: dict[str, Tensor], score: float, extra: dict[str, Any]
) -> None:
    """Keep the weights after `step` steps as the run's best, in place of those kept before; all ranks call it. A kill
    at any moment leaves the old ones or the new ones, whole.

    Args:
        weights: the draft's, as `DraftEngine.weights` returns them; the first rank's are written.
        score: what makes them the best; more is better.

    Raises TrainingError where they cannot be written; what was kept before is then untouched.
    """
    folder = best_folder(config.train.run_dir)
    temporary = folder / f"tmp-step_{step:06d}"
    content = {"step": step, "score": score, "config": to_dict(config), "extra": extra}

    def write() -> None:
        _empty(temporary)
        file = temporary / WEIGHTS
        write_tensors(weights, file)
        sync(file)
        _write_state(temporary, content, {WEIGHTS: (file.stat().st_size, file_digest(file))})
        _put_best_in_place(temporary, folder / f"step_{step:06d}")

    failures = ranks.attempt(write, WRITE_ERRORS, by_all=False)
    if failures:
        raise TrainingError(
            f"train.run_dir: the weights of step {step}, which decode best so far, cannot be written to {folder} "
            f"({failures}). What was saved before is untouched: make room, then the same command goes on from "
            f"{_last(checkpoint_folder(config.train.run_dir))}"
        )


def _put_best_in_place(temporary: Path, final: Path) -> None:
    if final.exists():  # the same step under other settings; a kill in between leaves it damaged, and it is passed over
        for name in (WEIGHTS, STATE):
            (temporary / name).rename(final / name)
    else:
        temporary.rename(final)
    sync(final.parent)
    for old in [*finished_folders(final.parent), *final.parent.glob("tmp-*")]:
        if old != final:
            shutil.rmtree(old)


def forget_best(run_dir: str | Path) -> None:
    """Remove the best weights that an earlier run left in the folder, with a line that says so; called by rank 0."""
    folder = best_folder(run_dir)
    if finished_folders(folder):
        print(f"{folder} is removed, no checkpoint of its run is there", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
