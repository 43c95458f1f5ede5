"""What a run leaves in its folder, and how it is found again; read by one process alone.

    run_dir/config.yaml               the resolved config that the run last went on with
    run_dir/start.json                what draft.start_from gave the run to begin with, where the config has it
    run_dir/checkpoints/step_000120/  DeepSpeed's files to resume from (frozen weights left out), draft.safetensors, the
                                      whole draft to export, in bf16 also masters.safetensors, its fp32 weights, and
                                      state.json, written last (state_file.py)
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)
DeepSpeed unpickles its files: only ever resume your own runs. Not here: how the ranks save and load (saving.py),
whether a run may go on from a checkpoint (resuming.py), exports (export.py).
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.train.config import Config, config_from_dict
from longdraft.train.state_file import STATE, Fields, changed, read_state

WEIGHTS = "draft.safetensors"
# In a bf16 run, beside the weights: the weights that its optimizer moves, from which a next stage begins.
MASTERS = "masters.safetensors"
START = "start.json"
STEP_FOLDER = re.compile("step_([0-9]{6,})")
FIELDS: Fields = {"step": int, "files": dict, "config": dict, "extra.heldout": dict}
CHECKPOINT_FIELDS = {
    **FIELDS,
    "world_size": int,
    "extra.skipped": int,
    "extra.wandb_id": (str, type(None)),
    "extra.data": dict,
}
BEST_FIELDS = {**FIELDS, "score": (int, float)}
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


def newest(run_dir: str | Path, read: Collection[str] = (), passed_over: Collection[Path] = ()) -> Found | None:
    """The newest whole checkpoint and its state.json, or None. A folder with files that are missing or have another
    size than when they were saved is passed over, with a line that says so.

    Args:
        read: names of files that will be read, whose content is therefore checked too.
        passed_over: folders that are known to be damaged.

    Raises ValueError where there are checkpoints, but none is whole.
    """
    finished = finished_folders(checkpoint_folder(run_dir))
    for folder in reversed(finished):
        state = None if folder in passed_over else read_state(folder, CHECKPOINT_FIELDS, read)
        if state is not None:
            return folder, state
    if finished:
        raise ValueError(
            f"train.run_dir: every checkpoint in {run_dir} is damaged; restore one, remove the folder to start anew, "
            "or give another"
        )
    return None


def best(run_dir: str | Path) -> Found | None:
    """The folder of the weights that decoded best, and its state.json; None where there is none that is whole, with a
    line about a damaged one."""
    found = [(folder, read_state(folder, BEST_FIELDS, [WEIGHTS])) for folder in finished_folders(best_folder(run_dir))]
    # After a kill just before the worse one was removed, there are two.
    whole = [(folder, state) for folder, state in found if state is not None]
    return max(whole, key=lambda one: one[1]["score"], default=None)


def masters_of(
    draft_folder: str | Path, exported: Mapping[str, Tensor], step: int | None
) -> tuple[dict[str, Tensor], str]:
    """The fp32 master weights that an exported draft was rounded from, out of the newest checkpoint of the run that the
    draft lies in; or an empty dict, and the reason in a few words.

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
    if MASTERS not in state["files"]:
        return {}, f"{folder} has no {MASTERS}"
    if broken := changed(folder, state, [MASTERS]):
        return {}, f"{folder} is damaged ({broken[0]})"
    masters = load_file(folder / MASTERS)
    rounded = {name: master.bfloat16() for name, master in masters.items()}
    same = all(name in exported and torch.equal(exported[name].cpu().bfloat16(), rounded[name]) for name in rounded)
    return (masters, "") if same else ({}, f"{folder / MASTERS} has other weights")


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
