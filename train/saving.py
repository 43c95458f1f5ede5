"""The ranks save and load together: to a temporary name, synced, renamed; found again after a kill.

Not here: what lies in a run's folder (checkpoint.py), other numbers of ranks (elastic.py).
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, sync, write_atomically, write_tensors
from longdraft.train import elastic
from longdraft.train.checkpoint import (
    MASTERS,
    START,
    STATE,
    WEIGHTS,
    Found,
    best_folder,
    changed,
    checkpoint_folder,
    damage,
    finished_folders,
    log_without_digests,
    newest,
    seal,
    unfinished_folders,
    what_is_good,
)
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import LAG_S, Ranks, TrainingError

# What a rank that cannot write raises.
WRITING = (OSError, RuntimeError, SafetensorError)
# What locking a file gives where the file system has no locks: Lustre without its option flock, NFS without lockd.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(run_dir: str | Path, ranks: Ranks) -> Iterator[None]:
    """Holds the run's folder against another run; all ranks enter together. The system lets go when a process dies.

    Raises:
        ValueError: another process trains in this folder, or it cannot be written; on all ranks alike.
    """
    handles: list[TextIO] = []  # the first rank's alone
    ranks.from_first(lambda: handles.append(_lock(Path(run_dir))))
    try:
        yield
    finally:
        for handle in handles:
            handle.close()


def _lock(folder: Path) -> TextIO:
    """A file of the folder that is locked until it is closed; a file system without locks goes with a word."""
    handle = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("a")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if handle is not None and error.errno in WITHOUT_LOCKS:
            print(
                f"train.run_dir: {folder} lies on a file system without locks ({error.strerror}); training goes on, "
                "but nothing keeps another process from training there, too",
                flush=True,
            )
            return handle
        if handle is not None:
            handle.close()
        if isinstance(error, BlockingIOError):
            raise ValueError(
                f"train.run_dir: another process trains in {folder}; stop it (an orphaned rank, perhaps) or give "
                "another folder"
            ) from None
        raise ValueError(f"train.run_dir: {folder} cannot be written: {error.strerror}; give another folder") from error
    return handle


def begin_run(config: Config, start: Mapping[str, str] | None) -> None:
    """Notes the config in the run's folder, and what a new run begins with (`Run.start`), with the name that the folder
    has then; called by rank 0, once everything has opened, before the first step."""
    folder = Path(config.train.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    notes = {"config.yaml": to_yaml(config)}
    if start:
        notes[START] = json.dumps({**start, "run_dir": config.train.run_dir}, indent=2) + "\n"
    for name, text in notes.items():
        write_atomically(folder / name, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))


def save(engine: DraftEngine, run_dir: str | Path, step: int, extra: dict[str, Any], keep: int) -> Path:
    """Saves what `load` needs to go on after `step` steps; all ranks call it. Returns the checkpoint's folder.

    Args:
        extra: JSON values for `load` to give back, rank 0's.
        keep: older checkpoints beyond this number are removed.

    Raises:
        TrainingError: a weight is no number, or a rank cannot write (a full disk); on all ranks alike, and nothing
            that was saved before is touched.
    """
    folder, ranks = checkpoint_folder(run_dir), engine.ranks
    final = folder / f"step_{step:06d}"
    temporary = folder / f"tmp-{final.name}"
    weights, masters = engine.weights(), engine.masters()
    _check_finite(weights, run_dir, step, ranks)

    written: list[Path] = []  # by this rank
    own: dict[str, tuple[int, str]] = {}  # size and digest of each of these

    def write_weights() -> None:
        if ranks.first:
            for name, tensors in ((WEIGHTS, weights), (MASTERS, masters)):
                if tensors:
                    write_tensors(tensors, temporary / name)
                    written.append(temporary / name)
        if ranks.local_rank == 0:
            for file in temporary.iterdir():
                sync(file)
        own.update({file.name: (file.stat().st_size, file_digest(file)) for file in written})

    def finish() -> None:
        threads = torch.get_num_threads() if ranks.device.type == "cpu" else None
        content = {"step": step, "world_size": ranks.world_size, "config": to_dict(engine.config), "threads": threads}
        _write_state(temporary, content | {"extra": extra}, files)
        _put_in_place(temporary, final, keep)

    failures = (
        ranks.attempt(lambda: _empty(temporary), WRITING, by_all=False)
        or ranks.attempt(lambda: written.extend(engine.write(temporary)), WRITING)
        or ranks.attempt(write_weights, WRITING)
    )
    files = {name: about for of_rank in ranks.gather(own) for name, about in of_rank.items()}
    failures = failures or ranks.attempt(finish, WRITING, by_all=False)
    if failures:
        ranks.from_first(partial(_give_up, temporary, step, failures, weights))
    return final


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_state(folder: Path, content: dict[str, Any], files: Mapping[str, tuple[int, str]]) -> None:
    """Writes the state file, with size and digest of each of the folder's other files, and syncs both."""
    sizes = {name: size for name, (size, _) in sorted(files.items())}
    digests = {name: digest for name, (_, digest) in sorted(files.items())}
    (folder / STATE).write_text(seal(content | {"files": sizes}, digests), encoding="utf-8")
    sync(folder / STATE)
    sync(folder)


def _put_in_place(temporary: Path, final: Path, keep: int) -> None:
    if final.exists():  # saved before a kill that lost the steps behind it
        _set_aside(final)
    temporary.rename(final)
    sync(final.parent)
    finished = finished_folders(final.parent)
    place = finished.index(final)
    # What lies behind is of a time line that a damaged checkpoint ended; what lies far before is not kept.
    for old in [*finished[place + 1 :], *finished[: max(0, place + 1 - keep)]]:
        _set_aside(old)
    # What kills left, too: of a checkpoint that was being written or removed.
    for dead in [*final.parent.glob("tmp-*"), *unfinished_folders(final.parent)]:
        if dead.is_dir():
            shutil.rmtree(dead)
        else:
            dead.unlink()


def _set_aside(folder: Path) -> None:
    """Takes a checkpoint its name before its files go: a kill between them leaves no part of one."""
    aside = folder.with_name(f"tmp-old-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _check_finite(weights: dict[str, Tensor], run_dir: str | Path, step: int, ranks: Ranks) -> None:
    wrong = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if ranks.sum([float(bool(wrong))])[0]:
        raise TrainingError(
            f"step {step}: weights of the draft are no numbers any more ({', '.join(wrong[:3]) or 'on another rank'}) "
            f"and are not saved; {what_is_good(run_dir)}. Lower optimizer.peak_lr and start a new "
            "run: train.run_dir=another/folder"
        )


def _give_up(temporary: Path, step: int, failures: str, weights: dict[str, Tensor]) -> NoReturn:
    """Needed are the weights, twice, and master weights and moments in fp32."""
    shutil.rmtree(temporary, ignore_errors=True)
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
    """`newest` as the first rank sees it, on all ranks alike; all call it. Its files are what was saved: each is read
    once, by one of the ranks.

    Raises:
        ValueError: as `newest`; some rank does not see the files within `patience_s` seconds.
    """
    damaged: list[Path] = []
    while (found := ranks.from_first(lambda: newest(run_dir, passed_over=damaged))) is not None:
        folder, state = found
        unseen = ranks.unseen(folder, state["files"], patience_s)
        if unseen:
            raise ValueError(
                f"train.run_dir: not every rank sees {folder} ({unseen}); give a folder on a file system they share"
            )
        if ranks.first:
            log_without_digests(folder, state)
        names = sorted(state["files"], key=state["files"].__getitem__)
        own = changed(folder, state, names[ranks.rank :: ranks.world_size])
        broken = [name for of_rank in ranks.gather(own) for name in of_rank]
        if not broken:
            break
        ranks.log(damage(folder, broken))
        damaged.append(folder)
    return found


def load(engine: DraftEngine, folder: Path, state: dict[str, Any]) -> None:
    """Puts weights and optimizer back as they were; all ranks call it. There may be more or fewer of them than saved
    the checkpoint. On CPUs as many threads go on as began: how a sum is shared out shows in its last bits. Another
    number of ranks does not keep these.

    Raises:
        ValueError, TrainingError: the checkpoint is of another number of ranks and cannot be converted.
    """
    saved_by, ranks, threads = state["world_size"], engine.ranks, state.get("threads")
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
    """Keeps the weights after `step` steps as the run's best, in place of those kept before; all ranks call it. A kill
    at any moment leaves the old ones or the new ones, whole.

    Args:
        weights: the draft's, as `DraftEngine.weights` gives them; the first rank's are written.
        score: what they are the best by, more is better.

    Raises:
        TrainingError: they cannot be written; what was kept before is untouched.
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

    failures = ranks.attempt(write, WRITING, by_all=False)
    if failures:
        raise TrainingError(
            f"train.run_dir: the weights of step {step}, which decode best so far, cannot be written to {folder} "
            f"({failures}). What was saved before is untouched: make room, then the same command goes on from "
            f"{_last(checkpoint_folder(config.train.run_dir))}"
        )


def _put_best_in_place(temporary: Path, final: Path) -> None:
    if final.exists():  # the same step, measured otherwise; after a kill in between it is damaged, and measured again
        for name in (WEIGHTS, STATE):
            (temporary / name).rename(final / name)
    else:
        temporary.rename(final)
    sync(final.parent)
    for old in [*finished_folders(final.parent), *final.parent.glob("tmp-*")]:
        if old != final:
            shutil.rmtree(old)


def forget_best(run_dir: str | Path) -> None:
    """Removes what an earlier run left in the folder, with a line that says so; called by rank 0."""
    folder = best_folder(run_dir)
    if finished_folders(folder):
        print(f"{folder} is removed, no checkpoint of its run is there", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
