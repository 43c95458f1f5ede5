"""A run's checkpoints: all ranks save them together, and any number of ranks reads them again.

    run_dir/config.yaml               the resolved config that the run last went on with
    run_dir/checkpoints/step_000120/  draft.safetensors: the whole draft in its training dtype, which is exported;
                                      optimizer-00000.safetensors, ...: each rank's part of the fp32 weights and of both
                                      moments, by parameter name; state.json
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)

A folder is written under a temporary name, synced and renamed. state.json is written last. It has the size and the
digest of every file beside it, and a digest of itself, so that one changed bit is found.
"""

import hashlib
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, sync, write_tensors
from longdraft.train.config import Config, saved_config_from_dict, to_flat_dict
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import Ranks, TrainingError

STATE, DIGESTS = "state.json", "sha256"
# Format 2 had pickled files of DeepSpeed: its weights can be read, the state of its optimizer cannot.
FORMAT, FORMATS = 3, (2, 3)
WEIGHTS = "draft.safetensors"
OPTIMIZER = "optimizer-{:05d}.safetensors"
STEP_FOLDER = re.compile("step_([0-9]{6,})")
# Fields and sections that may change when a run is resumed. Any other would change the result, or is compared by
# content (the rows, and the draft that it began with).
FREE = (
    "target.max_positions", "train.run_dir", "train.save_every", "train.keep_checkpoints", "train.micro_batch",
    "train.max_skipped", "train.device", "log", "heldout", "decoding", "data.max_dropped_share", "data.path",
    "draft.start_from",
)  # fmt: skip
# A checkpoint's folder and its state.json.
Found = tuple[Path, dict[str, Any]]


def checkpoint_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def best_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "best"


def finished_folders(folder: Path) -> list[Path]:
    """Checkpoints from oldest to newest, by their steps of six or more digits; a kill leaves only names in tmp-."""
    steps = {path: STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step_*") if (path / STATE).exists()}
    named = {path: int(match[1]) for path, match in steps.items() if match is not None}
    return sorted(named, key=named.__getitem__)


def seal(content: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """The text of a state file.

    Args:
        content: JSON values, among them the sizes of the folder's other files as `files`.
        digests: those of the other files, by name.
    """
    state = {"format": FORMAT, **content, DIGESTS: dict(digests)}
    return json.dumps(state | {DIGESTS: {**digests, STATE: _digest(state)}}, indent=1)


def unseal(text: bytes) -> dict[str, Any]:
    """The values of a state file that `seal` wrote, without its own digest. Raises ValueError where the text was
    changed."""
    try:
        state = json.loads(text)
        sound = state[DIGESTS].pop(STATE) == _digest(state)
    except (ValueError, LookupError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ValueError(f"{STATE} is not as it was saved")
    if state["format"] not in FORMATS:
        raise ValueError(f"{STATE} has the format {state['format']} of another version")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    # To text and back, because JSON changes keys and numbers: what is hashed is what will be read.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def whole(folder: Path, read: Collection[str] | None = ()) -> Iterator[Found]:
    """The finished folders in `folder` from newest to oldest, with their state files. One whose state file is damaged,
    or where a file is missing or has another size than when it was saved, is left out, with a line that says so.

    Args:
        read: names of files whose content is compared too. None: all files.
    """
    for path in reversed(finished_folders(folder)):
        try:
            state = unseal((path / STATE).read_bytes())
            for name, size in state["files"].items():
                file = path / name
                if file.stat().st_size != size:
                    raise ValueError(f"{name} has another size than when it was saved")
                if (read is None or name in read) and file_digest(file) != state[DIGESTS][name]:
                    raise ValueError(f"{name} is not as it was saved")
        except (ValueError, OSError) as error:
            print(f"{path} is damaged ({error}) and is passed over", flush=True)
        else:
            yield path, state


def newest(run_dir: str | Path, read: Collection[str] | None = ()) -> Found | None:
    """The newest of the run's checkpoints that is `whole`, or None. Raises ValueError where there are checkpoints, but
    none is whole."""
    found = next(whole(checkpoint_folder(run_dir), read), None)
    if found is None and finished_folders(checkpoint_folder(run_dir)):
        raise ValueError(
            f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, remove the folder to start anew, "
            "or give another"
        )
    return found


def best(run_dir: str | Path) -> Found | None:
    """The folder of the weights that decoded best, and its state.json; None where there is none that is whole."""
    # After a kill just before the worse one was removed, there are two.
    return max(whole(best_folder(run_dir), [WEIGHTS]), key=lambda found: found[1]["score"], default=None)


def saved_config(run_dir: str | Path, state: dict[str, Any]) -> Config:
    """The config that a checkpoint was saved with, with the place where its run lies now.

    Raises ValueError where this version cannot read it.
    """
    values = state["config"]
    target = dict(values["target"])
    if file := target.pop("gguf_file", None):  # of a former version: now a part of the path
        target["path"] += f"/{file}"
    try:
        return saved_config_from_dict(
            values | {"target": target, "train": {**values.get("train", {}), "run_dir": str(run_dir)}}
        )
    except ValueError as error:
        raise ValueError(
            f"train.run_dir: the config in {STATE} of {run_dir}'s step {state['step']} cannot be read ({error}); "
            "remove that checkpoint, or give another folder"
        ) from error


def check_continues(found: Found, config: Config, rows: Mapping[str, Any]) -> None:
    """Raises ValueError where a run with this config would not go on as the saved one: whatever decides its result must
    be as it was. A run may move, together with its rows and with the draft that it began with.

    Args:
        rows: what identifies the training rows (`ShardSet.identity`).
    """
    state, run_dir = found[1], config.train.run_dir
    saved = saved_config(run_dir, state)
    flat_saved, changed = to_flat_dict(saved), {}
    for name, value in to_flat_dict(config).items():
        if flat_saved.get(name) != value and not any(name == free or name.startswith(free + ".") for free in FREE):
            changed[name] = value, flat_saved.get(name)
    starts = saved.draft.start_from, config.draft.start_from
    if not is_same_start(*starts, state["config"]["train"]["run_dir"], run_dir):
        changed["draft.start_from"] = starts[1], starts[0]
    if state["extra"]["data"] != rows:
        changed["data.path"] = f"{config.data.path} with {rows}", state["extra"]["data"]
    for name, (value, before) in changed.items():
        raise ValueError(
            f"{name}: {value!r}, but the run in {run_dir} began with {before!r}, which would give another result; set "
            "it back, or start anew with train.run_dir=another/folder"
        )


def is_same_start(saved: str | None, now: str | None, saved_run: str, run: str) -> bool:
    """Whether two values of draft.start_from name one folder, as seen from beside the folders of their runs."""
    if saved is None or now is None or saved == now:
        return saved == now
    beside = [os.path.relpath(start, Path(of).absolute().parent) for start, of in ((saved, saved_run), (now, run))]
    return beside[0] == beside[1]


class SavedShares:
    """The fp32 weights and moments of a checkpoint, in whichever parts its ranks saved them."""

    def __init__(self, folder: Path, state: Mapping[str, Any]):
        self._parts: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
        for file in (name for name in state["files"] if name.startswith("optimizer-")):
            with safe_open(folder / file, "pt") as saved:
                for key in saved.keys():  # noqa: SIM118 (no mapping)
                    kind, start, name = key.split(":", 2)
                    self._parts[name, kind].append((int(start), saved.get_slice(key)))

    def read(self, name: str, kind: str, start: int, size: int) -> Tensor:
        """These entries [size] of a flattened parameter's MASTER or moment."""
        found, n_read, stop = torch.empty(size), 0, start + size
        for begin, part in self._parts[name, kind]:
            (length,) = part.get_shape()
            first, last = max(start, begin), min(stop, begin + length)
            if first < last:
                found[first - start : last - start] = part[first - begin : last - begin]
                n_read += last - first
        assert n_read == size, f"{name}: {n_read} of {size} entries were saved"
        return found


def save(engine: DraftEngine, run_dir: str | Path, state: dict[str, Any], keep: int) -> Path:
    """Save what `load` needs to go on; all ranks call it, and each writes its part of the optimizer. Returns the
    checkpoint's folder.

    Args:
        state: JSON values for the state file, among them `step` and `config`; those of rank 0 are written.
        keep: how many checkpoints to keep; older ones are removed.

    Raises TrainingError, on all ranks, where a weight is not a number or a rank cannot write (a full disk). What was
    saved before is then untouched.
    """
    ranks, weights, step = engine.ranks, engine.weights(), state["step"]
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise TrainingError(
            f"step {step}: weights of the draft are no longer numbers and are not saved; the checkpoints before it are "
            "good. Lower optimizer.peak_lr and start a new run: train.run_dir=another/folder"
        )
    own = {
        f"{kind}:{share.start}:{share.name}": tensor.cpu()
        for share in engine.shares()
        for kind, tensor in share.states.items()
    }
    content = {
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads() if ranks.device.type == "cpu" else None,
        "optimizer_steps": engine.optimizer_steps(),
    }
    files = {OPTIMIZER.format(ranks.rank): own} | ({WEIGHTS: weights} if ranks.first else {})
    return _write_folder(ranks, checkpoint_folder(run_dir) / f"step_{step:06d}", files, state | content, keep)


def save_best(ranks: Ranks, run_dir: str | Path, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Keep the weights as the run's best, in place of those kept before; all ranks call it.

    Args:
        weights: the draft's, as `DraftEngine.weights` returns them; the first rank's are written.
        state: JSON values for the state file, among them `step`, `config` and `score`, of which more is better.

    Raises TrainingError where they cannot be written; what was kept before is then untouched.
    """
    final = best_folder(run_dir) / f"step_{state['step']:06d}"
    _write_folder(ranks, final, {WEIGHTS: weights} if ranks.first else {}, state, keep=1)


def _write_folder(
    ranks: Ranks, final: Path, files: Mapping[str, dict[str, Tensor]], state: dict[str, Any], keep: int
) -> Path:
    """Write a folder with each rank's own files and, last, the state file."""
    temporary = final.with_name(f"tmp-{final.name}")

    def empty() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> dict[str, tuple[int, str]]:
        """Sizes and digests of this rank's files."""
        for name, tensors in files.items():
            write_tensors(tensors, temporary / name)
            sync(temporary / name)
        return {name: ((temporary / name).stat().st_size, file_digest(temporary / name)) for name in files}

    def finish() -> None:
        sizes = {name: size for name, (size, _) in sorted(written.items())}
        digests = {name: digest for name, (_, digest) in sorted(written.items())}
        (temporary / STATE).write_text(seal(state | {"files": sizes}, digests), encoding="utf-8")
        sync(temporary / STATE)
        sync(temporary)
        _put_in_place(temporary, final, keep)

    try:
        ranks.from_first(empty)
        written = {name: about for of_rank in ranks.on_all(write) for name, about in of_rank.items()}
        ranks.from_first(finish)
    except TrainingError:
        if ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _put_in_place(temporary: Path, final: Path, keep: int) -> None:
    """Rename a finished folder, then remove what it replaces, what is too old, and what kills have left."""
    if final.exists():  # the run went back behind a damaged checkpoint, or only decoded
        _set_aside(final)
    temporary.rename(final)
    sync(final.parent)
    finished = finished_folders(final.parent)
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


def load(engine: DraftEngine, found: Found) -> None:
    """Put weights and optimizer back as they were; all ranks call it, and each reads its part, however many ranks saved
    the checkpoint. With as many, a CPU run also goes on with as many threads as it began with, since how a sum is split
    among them shows in its last bits; another number of ranks changes these bits anyway.

    Raises ValueError where a former version saved the checkpoint.
    """
    (folder, state), ranks = found, engine.ranks
    if state["format"] != FORMAT:
        raise ValueError(
            f"train.run_dir: {folder} was saved by a former version, which alone can go on from it; export it and "
            "begin another run with draft.start_from, or give another folder"
        )
    threads, same_ranks = state["threads"], state["world_size"] == ranks.world_size
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
    folder = best_folder(run_dir)
    if finished_folders(folder):
        print(f"{folder} is removed, no checkpoint of its run is there", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
