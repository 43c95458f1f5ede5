"""A run's checkpoints: all ranks save them together, and any number of ranks can load them.

    run_dir/config.yaml               the resolved config of the run's latest start
    run_dir/checkpoints/step_000120/  draft.safetensors: the whole draft in its training dtype, as it is exported;
                                      optimizer-00000.safetensors, ...: each rank's part of the fp32 weights and of both
                                      moments, by parameter name; state.json
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)

A folder is written under a temporary name, synced and renamed. state.json is written last. It holds the digests of all
other files and of itself, so that a single changed bit is detected.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest, sync, write_tensors
from longdraft.train.config import Config, config_from_dict, differences
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import Ranks, TrainingError

STATE, DIGESTS = "state.json", "sha256"
# Format 2 had DeepSpeed's pickled files: its weights can still be read, its optimizer state cannot.
FORMAT, FORMATS = 3, (2, 3)
WEIGHTS = "draft.safetensors"
OPTIMIZER = "optimizer-{:05d}.safetensors"
# Fields and sections that may change when a run is resumed. Any other would change the result by more than rounding,
# which the number of ranks changes too. The rows and the target's weights are compared by content; the draft that the
# run started from is not read again.
FREE = (
    "target.max_positions", "target.zero_stage", "train.run_dir", "train.save_every", "train.keep_checkpoints",
    "train.micro_batch", "train.zero_stage", "train.offload_optimizer", "train.max_skipped", "train.device", "log",
    "heldout", "decoding", "data.max_dropped_share", "data.path", "draft.start_from",
)  # fmt: skip
# Fields of older versions, which the saved configs of their runs and drafts still have.
REMOVED = ("decoding.share", "log.wandb_project")


class Found(NamedTuple):
    """An intact checkpoint: its folder, and the values of its state.json."""

    folder: Path
    state: dict[str, Any]


def checkpoint_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def best_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "best"


def remove_unfinished(folder: Path) -> None:
    """Remove what a kill or a full disk left among checkpoints: a half-written one, or one half removed."""
    for dead in folder.glob("tmp-*"):
        shutil.rmtree(dead, ignore_errors=True)


def finished_folders(folder: Path) -> list[Path]:
    """Checkpoints from oldest to newest, by step. A kill leaves only folders that are named tmp-*."""
    named = [path for path in folder.glob("step_*") if path.name[5:].isdecimal() and (path / STATE).exists()]
    return sorted(named, key=lambda path: int(path.name[5:]))


def seal(state: Mapping[str, Any]) -> str:
    """The text of a state file with these JSON values, with the digest of the state itself added to its DIGESTS."""
    return json.dumps({**state, DIGESTS: {**state[DIGESTS], STATE: _digest(state)}}, indent=1)


def unseal(text: bytes) -> dict[str, Any]:
    """The values that `seal` wrote. Raises ValueError if the text was changed."""
    try:
        state = json.loads(text)
        sound = state[DIGESTS].pop(STATE) == _digest(state)
    except (ValueError, LookupError, TypeError, AttributeError):
        sound = False
    if not sound or state["format"] not in FORMATS:
        raise ValueError(f"{STATE} is not as it was saved, or of another version")
    return state


def _digest(state: Mapping[str, Any]) -> str:
    # To JSON and back, which turns keys into strings: the digest is of what will be read.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()


def whole(folder: Path) -> Iterator[Found]:
    """The intact checkpoints in `folder` from newest to oldest, with their states. One with a missing or changed file
    is skipped, and a line is printed about it."""
    for path in reversed(finished_folders(folder)):
        try:
            state = unseal((path / STATE).read_bytes())
            for name, digest in state[DIGESTS].items():
                if file_digest(path / name) != digest:
                    raise ValueError(f"{name} is not as it was saved")
        except (ValueError, OSError) as error:
            print(f"{path} is damaged ({error}) and is skipped", flush=True)
        else:
            yield Found(path, state)


def newest(run_dir: str | Path) -> Found | None:
    """The run's newest intact checkpoint, or None if it has no checkpoints. Raises ValueError if it has some, but none
    is intact."""
    found = next(whole(checkpoint_folder(run_dir)), None)
    if found is None and finished_folders(checkpoint_folder(run_dir)):
        raise ValueError(
            f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, or give another folder"
        )
    return found


def best(run_dir: str | Path) -> Found | None:
    """The folder of the weights that decoded best, and its state.json; None if there is no intact one."""
    return next(whole(best_folder(run_dir)), None)  # a kill may also leave the previous, worse one


def saved_config(run_dir: str | Path, state: Mapping[str, Any]) -> Config:
    """The config that a checkpoint was saved with, with the run's present folder as run_dir. Configs of older versions
    may have fields in REMOVED, null for a field's default, and `gguf_file`, which is now a part of the path.

    Raises ValueError if this version cannot read it.
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
    """The fields that decide a run's result and differ from the saved config: `section.field` to (now, before)."""
    found = differences(config, saved)
    return {name: values for name, values in found.items() if not {name, name.split(".")[0]} & set(FREE)}


def check_continues(state: Mapping[str, Any], config: Config, rows: Mapping[str, Any]) -> None:
    """Raises ValueError if this config would not continue the saved run: whatever decides its result must be unchanged.
    A run may be moved, together with its rows.

    Args:
        state: the checkpoint's. rows: the identity of the training rows (`ShardSet.identity`).
    """
    run_dir = config.train.run_dir
    changed = changes(saved_config(run_dir, state), config)
    if state["extra"].get("target_weights"):
        changed.pop("target.path", None)
    if state["extra"]["data"] != rows:
        changed["data.path"] = f"{config.data.path} with {rows}", state["extra"]["data"]
    for name, (value, before) in changed.items():
        raise ValueError(
            f"{name}: {value!r}, but the run in {run_dir} began with {before!r}, and its result depends on it; restore "
            "it, or start a new run with train.run_dir=another/folder"
        )


class SavedShares:
    """The fp32 weights and moments of a checkpoint, however they are split among its ranks' files."""

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
    """Save what `load` needs to resume; all ranks call it, and each writes its part of the optimizer. Returns the
    checkpoint's folder.

    Args:
        state: JSON values for the state file, including `step` and `config`; those of rank 0 are written.
        keep: how many checkpoints to keep; older ones are removed.

    Raises TrainingError, on all ranks, if a weight is not finite or a rank cannot write (a full disk). Earlier
    checkpoints are then untouched.
    """
    folder, weights = checkpoint_folder(run_dir), engine.weights()
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise TrainingError(
            f"step {state['step']}: weights of the draft are not finite and are not saved; earlier checkpoints "
            "are good. Lower optimizer.peak_lr and start a new run: train.run_dir=another/folder"
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
    """Write `folder`/step_N and remove all but the last `keep` checkpoints; all ranks call it.

    Args:
        weights: the draft's, as `DraftEngine.weights` returns them; the first rank's are written.
        own: this rank's tensors, written to a file of its own.
        state: JSON values for the state file, including `step` and `config`, and for best weights `score`, where higher
            is better.

    Raises TrainingError, on all ranks, if one cannot write; existing checkpoints are then untouched.
    """
    final = folder / f"step_{state['step']:06d}"
    temporary = folder / f"tmp-{final.name}"
    files = {WEIGHTS: weights} if ranks.first else {}
    if own is not None:
        files[OPTIMIZER.format(ranks.rank)] = own

    def empty() -> None:
        remove_unfinished(folder)
        temporary.mkdir(parents=True)

    def write() -> dict[str, str]:
        """Write this rank's files. Returns their digests."""
        for name, tensors in files.items():
            write_tensors(tensors, temporary / name)
            sync(temporary / name)
        return {name: file_digest(temporary / name) for name in files}

    def finish() -> None:
        """Write the state file and rename the folder, then remove what it replaces and old checkpoints."""
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
    # Later steps remain if the run resumed from an earlier checkpoint because a later one was damaged.
    for old in [*finished[end:], *finished[: max(0, end - keep)]]:
        _set_aside(old)
    remove_unfinished(final.parent)


def _set_aside(folder: Path) -> None:
    """Rename a folder before it is removed, so that a kill during the removal leaves no partial checkpoint."""
    folder.rename(folder.with_name(f"tmp-old-{folder.name}"))


def load(engine: DraftEngine, found: Found) -> None:
    """Restore weights and optimizer; all ranks call it, and each reads its part, however many ranks saved the
    checkpoint. With the same number of ranks, a CPU run also restores its number of threads, since the split of a sum
    decides its last bits. Raises ValueError if an older version saved the checkpoint."""
    folder, state = found
    if state["format"] != FORMAT:
        raise ValueError(f"train.run_dir: {folder} was saved by an older version; export it and start another run")
    saved = SavedShares(folder)
    engine.set_weights(load_file(folder / WEIGHTS))
    for key, own in engine.shares().items():
        kind, start, name = key.split(":", 2)
        own.copy_(saved.read(name, kind, int(start), len(own)))
    engine.set_optimizer_steps(state["optimizer_steps"])
    same_ranks = state.get("world_size") == engine.ranks.world_size
    if state.get("threads") and same_ranks and engine.ranks.device.type == "cpu":
        torch.set_num_threads(state["threads"])
