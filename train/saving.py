"""How the ranks hold a run's folder, save the run together and find it again: written to a temporary name, synced,
renamed. What lies in the folder: checkpoint.py."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, locked, sync, write_atomically, write_tensors
from longdraft.train import checkpoint
from longdraft.train.checkpoint import OPTIMIZER, STATE, WEIGHTS, Found, SavedShares
from longdraft.train.config import Config, to_dict, to_yaml
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import Ranks, TrainingError

# Errors of a rank that cannot write.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


@contextmanager
def locked_run(run_dir: str | Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run's folder against other runs; all ranks enter together.

    Raises ValueError, on all ranks, where another process trains in this folder or it cannot be written.
    """
    busy = f"another process trains in {run_dir}; stop it (an orphaned rank, perhaps) or give another folder"
    with ExitStack() as stack:
        ranks.from_first(lambda: stack.enter_context(locked(Path(run_dir) / "lock", "train.run_dir", busy)))
        yield


def write_config(config: Config) -> None:
    """Record the config in the run's folder; called by rank 0 before the first step, once everything is open."""
    file, text = Path(config.train.run_dir) / "config.yaml", to_yaml(config)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save(engine: DraftEngine, run_dir: str | Path, step: int, extra: dict[str, Any], keep: int) -> Path:
    """Save what `load` needs to go on after `step` steps; all ranks call it, and each writes its part of the optimizer.
    Returns the checkpoint's folder.

    Args:
        extra: JSON values to be found in the state file; those of rank 0 are written.
        keep: how many checkpoints to keep; older ones are removed.

    Raises TrainingError, on all ranks, where a weight is not a number or a rank cannot write (a full disk). What was
    saved before is then untouched.
    """
    ranks, weights = engine.ranks, engine.weights()
    wrong = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if ranks.sum([float(bool(wrong))])[0]:
        raise TrainingError(
            f"step {step}: weights of the draft are no longer numbers ({', '.join(wrong[:3]) or 'on another rank'}) "
            f"and are not saved; {checkpoint.what_is_good(run_dir)}. Lower optimizer.peak_lr and start a new run: "
            "train.run_dir=another/folder"
        )
    own = {
        checkpoint.share_key(share.name, kind, share.start): tensor.cpu()
        for share in engine.shares()
        for kind, tensor in share.states.items()
    }
    content = {
        "step": step,
        "world_size": ranks.world_size,
        "config": to_dict(engine.config),
        "threads": torch.get_num_threads() if ranks.device.type == "cpu" else None,
        "optimizer_steps": engine.optimizer_steps(),
        "extra": extra,
    }
    files = {OPTIMIZER.format(ranks.rank): own} | ({WEIGHTS: weights} if ranks.first else {})
    return _write_folder(ranks, checkpoint.checkpoint_folder(run_dir) / f"step_{step:06d}", files, content, keep)


def save_best(
    config: Config, ranks: Ranks, step: int, weights: dict[str, Tensor], score: float, extra: dict[str, Any]
) -> None:
    """Keep the weights after `step` steps as the run's best, in place of those kept before; all ranks call it.

    Args:
        weights: the draft's, as `DraftEngine.weights` returns them; the first rank's are written.
        score: what makes them the best; more is better.

    Raises TrainingError where they cannot be written; what was kept before is then untouched.
    """
    final = checkpoint.best_folder(config.train.run_dir) / f"step_{step:06d}"
    content = {"step": step, "score": score, "config": to_dict(config), "extra": extra}
    _write_folder(ranks, final, {WEIGHTS: weights} if ranks.first else {}, content, keep=1)


def _write_folder(
    ranks: Ranks, final: Path, files: Mapping[str, dict[str, Tensor]], content: dict[str, Any], keep: int
) -> Path:
    """Write a folder with each rank's own files and, last, the state file of the first rank's `content`."""
    temporary = final.with_name(f"tmp-{final.name}")
    written: dict[str, tuple[int, str]] = {}  # by this rank: sizes and digests

    def empty() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> None:
        for name, tensors in files.items():
            write_tensors(tensors, temporary / name)
            sync(temporary / name)
            written[name] = (temporary / name).stat().st_size, file_digest(temporary / name)

    def finish() -> None:
        sizes, digests = ({name: about[i] for name, about in sorted(all_written.items())} for i in range(2))
        (temporary / STATE).write_text(checkpoint.seal(content | {"files": sizes}, digests), encoding="utf-8")
        sync(temporary / STATE)
        sync(temporary)
        _put_in_place(temporary, final, keep)

    failures = ranks.attempt(empty, WRITE_ERRORS, by_all=False) or ranks.attempt(write, WRITE_ERRORS)
    all_written = {name: about for of_rank in ranks.gather(written) for name, about in of_rank.items()}
    failures = failures or ranks.attempt(finish, WRITE_ERRORS, by_all=False)
    if failures:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise TrainingError(
            f"train.run_dir: {final} cannot be written ({failures}). What was saved before is untouched: make room, "
            f"then the same command goes on; {checkpoint.what_is_good(final.parents[1])}"
        )
    return final


def _put_in_place(temporary: Path, final: Path, keep: int) -> None:
    """Rename a finished folder, then remove what it replaces, what is too old, and what kills have left."""
    if final.exists():  # the run went back behind a damaged checkpoint, or only decoded
        _set_aside(final)
    temporary.rename(final)
    sync(final.parent)
    finished = checkpoint.finished_folders(final.parent)
    place = finished.index(final)
    # Later steps are left from before a damaged checkpoint made the run go back. `keep` counts the new one too.
    for old in [*finished[place + 1 :], *finished[: max(0, place + 1 - keep)]]:
        _set_aside(old)
    # These were being written or removed when a run was killed.
    for dead in final.parent.glob("tmp-*"):
        shutil.rmtree(dead)


def _set_aside(folder: Path) -> None:
    """Rename a folder that is to be removed, so that a kill while its files go leaves no partial checkpoint."""
    aside = folder.with_name(f"tmp-old-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def find(run_dir: str | Path, ranks: Ranks) -> Found | None:
    """The newest whole checkpoint, as the first rank sees it, on all ranks; all call it. The content of all its files
    is checked: each is read once, by one of the ranks.

    Raises ValueError where there are checkpoints, but none is whole, or where some rank does not see the files.
    """
    candidates = checkpoint.whole(checkpoint.checkpoint_folder(run_dir))  # which the first rank alone looks for
    while (found := ranks.from_first(lambda: next(candidates, None))) is not None:
        folder, state = found
        missing = checkpoint.wrong_files(folder, state)
        if unseen := ranks.failures(FileNotFoundError(", ".join(missing)) if missing else None):
            raise ValueError(
                f"train.run_dir: not every rank sees {folder} ({unseen}); give a folder on a file system they share"
            )
        by_size = sorted(state["files"], key=state["files"].__getitem__)
        own = checkpoint.changed(folder, state, by_size[ranks.rank :: ranks.world_size])
        if not (broken := [name for of_rank in ranks.gather(own) for name in of_rank]):
            return found
        ranks.log(checkpoint.damage(folder, broken))
    if ranks.from_first(lambda: bool(checkpoint.finished_folders(checkpoint.checkpoint_folder(run_dir)))):
        raise checkpoint.every_one_damaged(run_dir)
    return None


def load(engine: DraftEngine, folder: Path, state: dict[str, Any]) -> None:
    """Put weights and optimizer back as they were; all ranks call it, and each reads its part, however many ranks saved
    the checkpoint. With as many, a CPU run also goes on with as many threads as it began with, since how a sum is split
    among them shows in its last bits; another number of ranks changes these bits anyway."""
    ranks, threads = engine.ranks, state["threads"]
    same_ranks = state["world_size"] == ranks.world_size
    if same_ranks and threads not in (None, torch.get_num_threads()) and ranks.device.type == "cpu":
        ranks.log(f"Threads of a rank: {threads}, as the run began with, not {torch.get_num_threads()}")
        torch.set_num_threads(threads)
    engine.set_weights(load_file(folder / WEIGHTS))
    saved = SavedShares(folder, state)
    for share in engine.shares():
        for kind, own in share.states.items():
            own.copy_(saved.read(share.name, kind, share.start, len(own)))
    engine.set_optimizer_steps(state["optimizer_steps"])


def forget_best(run_dir: str | Path) -> None:
    """Remove the best weights that an earlier run left in the folder, with a line that says so; called by rank 0."""
    folder = checkpoint.best_folder(run_dir)
    if checkpoint.finished_folders(folder):
        print(f"{folder} is removed, no checkpoint of its run is there", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
