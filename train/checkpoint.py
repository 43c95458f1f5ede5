"""A run's checkpoints: all ranks save them together, and any number of ranks reads them again.

    run_dir/config.yaml               the resolved config that the run last went on with
    run_dir/checkpoints/step_000120/  draft.safetensors: the whole draft in its training dtype, which is exported;
                                      optimizer-00000.safetensors, ...: each rank's part of the fp32 weights and of both
                                      moments, by parameter name; state.json
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)

A folder is written under a temporary name, synced and renamed. state.json is written last. It has the digest of every
file beside it and of itself, so that one changed bit is found.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, sync, write_tensors
from longdraft.train.config import Config, config_from_dict, to_dict
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import Ranks, TrainingError

STATE, DIGESTS = "state.json", "sha256"
# Format 2 had pickled files of DeepSpeed: its weights can be read, the state of its optimizer cannot.
FORMAT, FORMATS = 3, (2, 3)
WEIGHTS = "draft.safetensors"
OPTIMIZER = "optimizer-{:05d}.safetensors"
# Fields and sections that may change when a run is resumed. Any other would change the result by more than the rounding
# that another number of ranks changes too. Rows, and weights of a target, are compared by content, and the draft that
# the run began with is not read again.
FREE = (
    "target.max_positions", "target.zero_stage", "train.run_dir", "train.save_every", "train.keep_checkpoints",
    "train.micro_batch", "train.zero_stage", "train.offload_optimizer", "train.max_skipped", "train.device", "log",
    "heldout", "decoding", "data.max_dropped_share", "data.path", "draft.start_from",
)  # fmt: skip
# Fields of former versions, which the configs of their runs and drafts still have.
REMOVED = ("decoding.share", "log.wandb_project")
# A checkpoint's folder and its state.json.
Found = tuple[Path, dict[str, Any]]


def checkpoint_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def best_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "best"


def finished_folders(folder: Path) -> list[Path]:
    """Checkpoints from oldest to newest, by their steps; a kill leaves only names in tmp-."""
    named = [path for path in folder.glob("step_*") if path.name[5:].isdecimal() and (path / STATE).exists()]
    return sorted(named, key=lambda path: int(path.name[5:]))


def seal(state: Mapping[str, Any]) -> str:
    """The text of a state file with these JSON values, of which DIGESTS then also has that of the state itself."""
    return json.dumps({**state, DIGESTS: {**state[DIGESTS], STATE: _digest(state)}}, indent=1)


def unseal(text: bytes) -> dict[str, Any]:
    """The values that `seal` wrote. Raises ValueError where the text was changed."""
    try:
        state = json.loads(text)
        sound = state[DIGESTS].pop(STATE) == _digest(state)
    except (ValueError, LookupError, TypeError, AttributeError):
        sound = False
    if not sound or state["format"] not in FORMATS:
        raise ValueError(f"{STATE} is not as it was saved, or of another version")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    # To text and back, because JSON changes keys: what is hashed is what will be read.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def whole(folder: Path) -> Iterator[Found]:
    """The finished folders in `folder` from newest to oldest, with their state files. One with a file that is missing
    or not as it was saved is skipped, with a line that says so."""
    for path in reversed(finished_folders(folder)):
        try:
            state = unseal((path / STATE).read_bytes())
            for name, digest in state[DIGESTS].items():
                if file_digest(path / name) != digest:
                    raise ValueError(f"{name} is not as it was saved")
        except (ValueError, OSError) as error:
            print(f"{path} is damaged ({error}) and is passed over", flush=True)
        else:
            yield path, state


def newest(run_dir: str | Path) -> Found | None:
    """The newest of the run's checkpoints that is `whole`, or None. Raises ValueError where there are checkpoints, but
    none is whole."""
    found = next(whole(checkpoint_folder(run_dir)), None)
    if found is None and finished_folders(checkpoint_folder(run_dir)):
        raise ValueError(
            f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, or give another folder"
        )
    return found


def best(run_dir: str | Path) -> Found | None:
    """The folder of the weights that decoded best, and its state.json; None where there is none that is whole."""
    return next(whole(best_folder(run_dir)), None)  # a kill may leave the worse one before it


def saved_config(run_dir: str | Path, state: Mapping[str, Any]) -> Config:
    """The config that a checkpoint was saved with, with the place where its run lies now. One of a former version may
    have fields in REMOVED, null for a field's default, and `gguf_file`, which is a part of the path now.

    Raises ValueError where this version cannot read it.
    """
    values = {
        name: {key: value for key, value in section.items() if value is not None and f"{name}.{key}" not in REMOVED}
        for name, section in state["config"].items()
    }
    if file := values["target"].pop("gguf_file", None):
        values["target"]["path"] += f"/{file}"
    values["train"]["run_dir"] = str(run_dir)
    return config_from_dict(values)


def changes(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """By `section.field` what decides a run's result and is another value now than in the saved config: now, before."""
    before, now = (
        {f"{section}.{name}": value for section, fields in to_dict(one).items() for name, value in fields.items()}
        for one in (saved, config)
    )
    return {
        name: (value, before.get(name))
        for name, value in now.items()
        if value != before.get(name) and name not in FREE and name.split(".")[0] not in FREE
    }


def check_continues(state: Mapping[str, Any], config: Config, rows: Mapping[str, Any]) -> None:
    """Raises ValueError where a run with this config would not go on as the saved one: whatever decides its result must
    be as it was. A run may move, together with its rows.

    Args:
        state: the checkpoint's. rows: what identifies the training rows (`ShardSet.identity`).
    """
    run_dir = config.train.run_dir
    changed = changes(saved_config(run_dir, state), config)
    if state["extra"].get("target_weights"):
        changed.pop("target.path", None)
    if state["extra"]["data"] != rows:
        changed["data.path"] = f"{config.data.path} with {rows}", state["extra"]["data"]
    for name, (value, before) in changed.items():
        raise ValueError(
            f"{name}: {value!r}, but the run in {run_dir} began with {before!r}, which would give another result; set "
            "it back, or start anew with train.run_dir=another/folder"
        )


class SavedShares:
    """The fp32 weights and moments of a checkpoint, in whichever parts its ranks saved them."""

    def __init__(self, folder: Path):
        self._parts: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
        for file in folder.glob("optimizer-*"):
            with safe_open(file, "pt") as saved:
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


def save(engine: DraftEngine, run_dir: str | Path, state: Mapping[str, Any], keep: int) -> Path:
    """Save what `load` needs to go on; all ranks call it, and each writes its part of the optimizer. Returns the
    checkpoint's folder.

    Args:
        state: JSON values for the state file, among them `step` and `config`; those of rank 0 are written.
        keep: how many checkpoints to keep; older ones are removed.

    Raises TrainingError, on all ranks, where a weight is not a number or a rank cannot write (a full disk). What was
    saved before is untouched.
    """
    folder, weights = checkpoint_folder(run_dir), engine.weights()
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise TrainingError(
            f"step {state['step']}: weights of the draft are no longer numbers and are not saved; the checkpoints "
            "before it are good. Lower optimizer.peak_lr and start a new run: train.run_dir=another/folder"
        )
    own = {key: tensor.cpu() for key, tensor in engine.shares().items()}
    threads = torch.get_num_threads() if engine.ranks.device.type == "cpu" else None
    state = {**state, "optimizer_steps": engine.optimizer_steps()}
    state |= {"threads": threads, "world_size": engine.ranks.world_size}
    return write_folder(engine.ranks, folder, state, weights, keep, own)


def write_folder(
    ranks: Ranks,
    folder: Path,
    state: Mapping[str, Any],
    weights: dict[str, Tensor],
    keep: int,
    own: dict[str, Tensor] | None = None,
) -> Path:
    """Write `folder`/step_N, in place of those before the last `keep`; all ranks call it.

    Args:
        weights: the draft's, as `DraftEngine.weights` returns them; the first rank's are written.
        own: tensors of this rank, in a file of its own.
        state: JSON values for the state file, among them `step` and `config`, and the `score` of best weights, of which
            more is better.

    Raises TrainingError, on all ranks, where one cannot write; what was there before is untouched.
    """
    final = folder / f"step_{state['step']:06d}"
    temporary = folder / f"tmp-{final.name}"
    files = {WEIGHTS: weights} if ranks.first else {}
    if own is not None:
        files[OPTIMIZER.format(ranks.rank)] = own

    def empty() -> None:
        for dead in folder.glob("tmp-*"):  # which a kill or a full disk left
            shutil.rmtree(dead, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> dict[str, str]:
        """Digests of this rank's files."""
        for name, tensors in files.items():
            write_tensors(tensors, temporary / name)
            sync(temporary / name)
        return {name: file_digest(temporary / name) for name in files}

    def finish() -> None:
        """Write the state file and rename the folder, then remove what it replaces and what is too old."""
        digests = {name: digest for of_rank in written for name, digest in of_rank.items()}
        (temporary / STATE).write_text(seal({"format": FORMAT, **state, DIGESTS: digests}), encoding="utf-8")
        sync(temporary / STATE)
        sync(temporary)
        _put_in_place(temporary, final, keep)

    ranks.from_first(empty)
    written = ranks.on_all(write)
    ranks.from_first(finish)
    return final


def _put_in_place(temporary: Path, final: Path, keep: int) -> None:
    if final.exists():  # damaged
        _set_aside(final)
    temporary.rename(final)
    sync(final.parent)
    finished = finished_folders(final.parent)
    end = finished.index(final) + 1
    # Later steps are left from before a damaged checkpoint made the run go back.
    for old in [*finished[end:], *finished[: max(0, end - keep)]]:
        _set_aside(old)
    for dead in final.parent.glob("tmp-*"):
        shutil.rmtree(dead)


def _set_aside(folder: Path) -> None:
    """Rename a folder that is to be removed, so that a kill while its files go leaves no partial checkpoint."""
    folder.rename(folder.with_name(f"tmp-old-{folder.name}"))


def load(engine: DraftEngine, found: Found) -> None:
    """Put weights and optimizer back as they were; all ranks call it, and each reads its part, however many ranks saved
    the checkpoint. With as many, a CPU run goes on with as many threads as it began with, since how a sum is split
    decides its last bits. Raises ValueError where a former version saved it."""
    folder, state = found
    if state["format"] != FORMAT:
        raise ValueError(f"train.run_dir: {folder} was saved by a former version; export it, and begin another run")
    saved = SavedShares(folder)
    engine.set_weights(load_file(folder / WEIGHTS))
    for key, own in engine.shares().items():
        kind, start, name = key.split(":", 2)
        own.copy_(saved.read(name, kind, int(start), len(own)))
    engine.set_optimizer_steps(state["optimizer_steps"])
    same_ranks = state.get("world_size") == engine.ranks.world_size
    if state.get("threads") and same_ranks and engine.ranks.device.type == "cpu":
        torch.set_num_threads(state["threads"])
