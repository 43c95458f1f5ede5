"""What a run leaves in its folder, and how one process finds and reads it again.

    run_dir/config.yaml               the resolved config that the run last went on with
    run_dir/checkpoints/step_000120/  draft.safetensors: the whole draft in its training dtype, which is exported;
                                      optimizer-00000.safetensors, ...: each rank's part of the fp32 weights and of both
                                      moments, by parameter name; state.json
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)

state.json is written last. It has the size and the digest of every file beside it, and a digest of itself, so that one
changed bit is found. Saving and loading on all ranks: saving.py.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.files import file_digest
from longdraft.train.config import Config, config_from_dict

STATE, DIGESTS = "state.json", "sha256"
# Format 2 had pickled files of DeepSpeed: its weights can be read, the state of its optimizer cannot.
FORMAT, FORMATS = 3, (2, 3)
WEIGHTS = "draft.safetensors"
OPTIMIZER = "optimizer-{:05d}.safetensors"
FORMER_MASTERS = "masters.safetensors"  # the fp32 weights of a bf16 run of format 2
STEP_FOLDER = re.compile("step_([0-9]{6,})")
# What is saved of each parameter: the fp32 weights that the optimizer moves, and its moments.
MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
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
    """The values of a state file that `seal` wrote. Raises ValueError where the text was changed."""
    try:
        state = json.loads(text)
        digest = state[DIGESTS][STATE]
        others = {name: digest for name, digest in state[DIGESTS].items() if name != STATE}
        sound = digest == _digest({**state, DIGESTS: others})
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


def whole(folder: Path, read: Collection[str] = ()) -> Iterator[Found]:
    """The finished folders in `folder` from newest to oldest, with their state files. One is left out, with a line that
    says so, where its state file is damaged or files are missing or have another size than when they were saved.

    Args:
        read: names of files that will be read, whose content is therefore checked too.
    """
    for path in reversed(finished_folders(folder)):
        try:
            state = unseal((path / STATE).read_bytes())
            broken = wrong_files(path, state) or changed(path, state, read)
        except ValueError as error:
            state, broken = {}, [str(error)]
        if not broken:
            yield path, state
        else:
            print(damage(path, broken), flush=True)


def damage(folder: Path, broken: Collection[str]) -> str:
    """A line about a folder and what is wrong in it."""
    return f"{folder} is damaged ({', '.join(broken)}) and is passed over"


def changed(folder: Path, state: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Which of these files of the folder cannot be read or are not as they were saved, each with what is wrong."""
    found = []
    for name in names:
        try:
            if file_digest(folder / name) != state[DIGESTS].get(name):
                found.append(f"{name} is not as it was saved")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def wrong_files(folder: Path, state: Mapping[str, Any]) -> list[str]:
    """Names of the files that are missing or do not have their size in bytes."""
    paths = {folder / name: size for name, size in state["files"].items()}
    return [path.name for path, size in paths.items() if not path.is_file() or path.stat().st_size != size]


def newest(run_dir: str | Path, read: Collection[str] = ()) -> Found | None:
    """The newest of the run's checkpoints that is `whole`, or None. Raises ValueError where there are checkpoints, but
    none is whole."""
    found = next(whole(checkpoint_folder(run_dir), read), None)
    if found is None and finished_folders(checkpoint_folder(run_dir)):
        raise every_one_damaged(run_dir)
    return found


def every_one_damaged(run_dir: str | Path) -> ValueError:
    return ValueError(
        f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, remove the folder to start anew, or "
        "give another"
    )


def best(run_dir: str | Path) -> Found | None:
    """The folder of the weights that decoded best, and its state.json; None where there is none that is whole."""
    # After a kill just before the worse one was removed, there are two.
    return max(whole(best_folder(run_dir), [WEIGHTS]), key=lambda found: found[1]["score"], default=None)


def share_key(name: str, kind: str, start: int) -> str:
    """The name, in a rank's file, of a part of a parameter's MASTER or moment; `start`: its first entry."""
    return f"{kind}:{start}:{name}"


class SavedShares:
    """The fp32 weights and moments of a checkpoint, in whichever parts its ranks saved them."""

    def __init__(self, folder: Path, state: Mapping[str, Any]):
        self._parts: dict[tuple[str, str], list[tuple[int, Any]]] = defaultdict(list)
        for file in optimizer_files(state):
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

    def masters(self) -> dict[str, Tensor]:
        """All fp32 weights, flattened."""
        sizes = {
            name: sum(part.get_shape()[0] for _, part in parts)
            for (name, kind), parts in self._parts.items()
            if kind == MASTER
        }
        return {name: self.read(name, MASTER, 0, size) for name, size in sizes.items()}


def optimizer_files(state: Mapping[str, Any]) -> list[str]:
    return [name for name in state["files"] if name.startswith("optimizer-")]


def masters_of(
    draft_folder: str | Path, exported: Mapping[str, Tensor], step: int | None
) -> tuple[dict[str, Tensor], str]:
    """The fp32 weights that an exported draft was rounded from, out of the newest checkpoint of the run that the draft
    lies in; or an empty dict, and the reason in a few words.

    Args:
        exported: the draft's weights. step: its step, None where its folder does not say it.
    """
    try:
        found = newest(Path(draft_folder).parent)
    except ValueError as error:  # the checkpoints are damaged, the draft is not
        return {}, str(error)
    if found is None:
        return {}, "no checkpoint of its run lies beside it"
    folder, state = found
    if step not in (None, state["step"]):
        return {}, f"it is of step {step}, and {folder} of step {state['step']}"
    files = [FORMER_MASTERS] if FORMER_MASTERS in state["files"] else optimizer_files(state)
    if not files:
        return {}, f"{folder} has no fp32 weights beside the draft"
    if broken := changed(folder, state, files):
        return {}, f"{folder} is damaged ({broken[0]})"
    saved = load_file(folder / FORMER_MASTERS) if files == [FORMER_MASTERS] else SavedShares(folder, state).masters()
    masters = {name: saved[name].view_as(weight) for name, weight in exported.items() if _rounds(saved, name, weight)}
    return (masters, "") if masters.keys() == saved.keys() else ({}, f"{folder} has other weights")


def _rounds(masters: Mapping[str, Tensor], name: str, weight: Tensor) -> bool:
    """Whether the weight is this master, rounded."""
    master = masters.get(name)
    return master is not None and torch.equal(master.flatten().bfloat16(), weight.cpu().flatten().bfloat16())


def saved_config(run_dir: str | Path, state: dict[str, Any]) -> Config:
    """The config that a checkpoint was saved with, with the place where its run lies now.

    Raises ValueError where this version cannot read it.
    """
    values = state["config"]
    try:
        return config_from_dict(values | {"train": {**values.get("train", {}), "run_dir": str(run_dir)}})
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"train.run_dir: the config in {STATE} of {run_dir}'s step {state['step']} cannot be read ({error}); "
            "remove that checkpoint, or give another folder"
        ) from error


def what_is_good(run_dir: str | Path) -> str:
    """What is left of a run that cannot go on, in a few words."""
    finished = finished_folders(checkpoint_folder(run_dir))
    return f"the last checkpoint is good, {finished[-1]}" if finished else "no checkpoint was saved yet"
