"""What a run leaves in its folder, and how it is told from damaged files; read by one process alone.

    run_dir/config.yaml               the resolved config that the run last went on with
    run_dir/start.json                what draft.start_from gave the run to begin with, where the config has it
    run_dir/checkpoints/step_000120/  DeepSpeed's files to resume from (frozen weights left out), draft.safetensors, the
                                      whole draft to export, in bf16 also masters.safetensors, its fp32 weights, and
                                      state.json, written last, with digests of them all
    run_dir/best/step_000080/         draft.safetensors and state.json of the weights that decoded best (evaluate.py)
state.json has a sha256 of every file beside it, and of itself. A core hashes 1 to 2 GB a second, and ranks hash side by
side: for a LongSpec draft of an 8B model, 4 GB, that is half a second on 8 ranks.
DeepSpeed unpickles its files: only ever resume your own runs. Not here: how the ranks save and load (saving.py),
exports (export.py).
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.models.files import file_digest
from longdraft.train.config import Config, config_from_dict, to_flat_dict

WEIGHTS, STATE, DIGESTS = "draft.safetensors", "state.json", "sha256"
# Of a bf16 run, beside the weights: what its optimizer moves, and what a next stage begins with.
MASTERS = "masters.safetensors"
START = "start.json"
STEP_FOLDER = re.compile("step_([0-9]{6,})")
# Of a state file with digests; the first had none, and no such field.
FORMAT = 2
# Names and types of what a state file must have; a name `a.b` is b in a.
Fields = Mapping[str, type | tuple[type, ...]]
FIELDS: Fields = {"step": int, "files": dict, "config": dict, "extra.heldout": dict}
CHECKPOINT_FIELDS = {**FIELDS, "world_size": int, "extra.skipped": int, "extra.wandb_id": (str, type(None))}
BEST_FIELDS = {**FIELDS, "score": (int, float)}
# What may differ between a run and its resumption; anything else would change the result.
FREE = (
    "target.max_positions", "train.run_dir", "train.save_every", "train.keep_checkpoints", "train.micro_batch",
    "train.max_skipped", "train.device", "log", "heldout", "decoding", "data.max_dropped_share",
)  # fmt: skip
# A checkpoint's folder and its state.json.
Found = tuple[Path, dict[str, Any]]


def checkpoint_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints"


def best_folder(run_dir: str | Path) -> Path:
    return Path(run_dir) / "best"


def finished_folders(folder: Path) -> list[Path]:
    """Checkpoints from oldest to newest; a kill leaves only names that begin with tmp-."""
    return [path for path in _step_folders(folder) if (path / STATE).exists()]


def unfinished_folders(folder: Path) -> list[Path]:
    """What has a checkpoint's name and no state file, as an earlier version leaves it where it is killed."""
    return [path for path in _step_folders(folder) if path.is_dir() and not (path / STATE).exists()]


def _step_folders(folder: Path) -> list[Path]:
    """By their steps, which have six digits or more."""
    steps = {path: STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step_*")}
    named = {path: int(match[1]) for path, match in steps.items() if match is not None}
    return sorted(named, key=named.__getitem__)


def newest(run_dir: str | Path, read: Collection[str] = (), passed_over: Collection[Path] = ()) -> Found | None:
    """The newest whole checkpoint and its state.json, or None. A folder whose files are missing or have another size
    than when they were saved is passed over, with a line that says so.

    Args:
        read: names of files that will be read, whose content must be what was saved too.
        passed_over: folders that are known to be damaged.

    Raises:
        ValueError: there are checkpoints, but none is whole.
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
    # Two are there after a kill, just before the worse one was removed.
    sound = [(folder, state) for folder, state in found if state is not None]
    return max(sound, key=lambda one: one[1]["score"], default=None)


def masters_of(
    draft_folder: str | Path, exported: Mapping[str, Tensor], step: int | None
) -> tuple[dict[str, Tensor], str]:
    """The fp32 master weights that an exported draft was rounded from, of the newest checkpoint of the run that it lies
    in; or none, and the reason in a few words.

    Args:
        exported: the draft's weights. step: its step, None where its folder does not say it.
    """
    try:
        found = newest(Path(draft_folder).parent)
    except ValueError as error:  # damaged; the draft is not
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
    """The config a checkpoint was saved under, at the place where its run lies now.

    Raises:
        ValueError: it is none that this version can read.
    """
    values = state["config"]
    try:
        return config_from_dict(values | {"train": {**values.get("train", {}), "run_dir": str(run_dir)}})
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"train.run_dir: the config in {STATE} of {run_dir}'s step {state['step']} cannot be read ({error}); "
            "remove that checkpoint, or give another folder"
        ) from error


def check_same_run(old: Config, new: Config) -> None:
    """Raises ValueError naming the first field in which `new` would not continue `old`."""
    flat_old = to_flat_dict(old)
    for name, value in to_flat_dict(new).items():
        if flat_old.get(name) != value and not any(name == free or name.startswith(free + ".") for free in FREE):
            raise ValueError(
                f"{name}: {value!r}, but the run in {new.train.run_dir} began with {flat_old.get(name)!r}, which would "
                "give another result; set it back, or start anew with train.run_dir=another/folder"
            )


def check_continues(state: dict[str, Any], config: Config, rows: ShardSet) -> None:
    """Raises ValueError where a run with this config and these training rows would not go on as the saved one. The run
    may have moved, together with the draft that it began with, and so may the rows."""
    saved, now = saved_config(config.train.run_dir, state), config.draft.start_from
    then = state["config"]["train"].get("run_dir", config.train.run_dir)
    if is_same_start(saved.draft.start_from, then, now, config.train.run_dir):
        saved = replace(saved, draft=replace(saved.draft, start_from=now))
    if "data" in state["extra"]:  # then the rows themselves are compared, wherever they lie
        saved = replace(saved, data=replace(saved.data, path=config.data.path))
    check_same_run(saved, config)
    new = rows.identity()
    old = state["extra"].get("data", new)  # a checkpoint of an earlier version does not say
    if old != new:
        raise ValueError(
            f"data.path: {config.data.path} holds other rows ({new['rows']:,}, sha256 {new['sha256'][:12]}) than the "
            f"run in {config.train.run_dir} began with ({old['rows']:,}, sha256 {old['sha256'][:12]}); put those back, "
            "or start anew with train.run_dir=another/folder"
        )


def check_same_target(state: dict[str, Any], weights: str | None, config: Config) -> None:
    """Raises ValueError where the target's weights are not those that the saved run began with."""
    old = state["extra"].get("target_weights")  # a checkpoint of an earlier version does not say
    if None not in (old, weights) and old != weights:
        raise ValueError(
            f"target.path: {config.target.path} has other weights (sha256 of a sample {weights}) than the run in "
            f"{config.train.run_dir} began with ({old}); put those back, or start anew with another train.run_dir"
        )


def is_same_start(saved: str | None, saved_run: str, now: str | None, run: str) -> bool:
    """Whether two values of draft.start_from name one folder, however spelt: the same place, or the same place beside
    the run's folder, where both were moved.

    Args:
        saved: of a run in `saved_run`. now: of the same run in `run`.
    """
    if saved is None or now is None:
        return saved == now
    place, beside = Path(saved).absolute(), Path(saved_run).absolute().parent
    places = [place.resolve()]
    if place.is_relative_to(beside):
        places.append((Path(run).absolute().parent / place.relative_to(beside)).resolve())
    return Path(now).resolve() in places


def check_same_start(start: Mapping[str, Any], run_dir: str | Path) -> None:
    """Raises ValueError where a run that must begin anew would not begin with the weights that it began with before:
    whether these are a draft's fp32 masters depends on what lies beside it.

    Args:
        start: what it has now (`Run.start`); START, which may not be there, has what it had.
    """
    saved = Path(run_dir) / START
    old = json.loads(saved.read_text(encoding="utf-8")) if saved.is_file() else start
    same = is_same_start(old["start_from"], old.get("run_dir", str(run_dir)), start["start_from"], str(run_dir))
    if same and any(old[name] != start[name] for name in ("weights", "sha256")):
        was, now = (f"{one['weights']}, sha256 {one['sha256'][:12]}" for one in (old, start))
        raise ValueError(
            f"draft.start_from: the run in {saved.parent} began with the weights of {start['start_from']} {was}, and "
            f"would now begin with {now}; put back what lay there, or remove {saved} to begin with these"
        )


def check_same_vocabulary(found: Found, token_ids: Tensor | None, config: Config) -> None:
    """Raises ValueError where a restricted vocabulary has other tokens than the saved draft's."""
    if token_ids is None:
        return
    with safe_open(found[0] / WEIGHTS, "pt") as saved:
        old = saved.get_tensor("token_ids")
    if not torch.equal(old, token_ids.cpu()):
        source = f"draft.start_from: {config.draft.start_from}" if config.draft.start_from else "draft.draft_vocab_size"
        raise ValueError(
            f"{source} gives other tokens for the draft than the run in {config.train.run_dir} began with; put back "
            "the draft or the target's files, or start anew with train.run_dir=another/folder"
        )


def what_is_good(run_dir: str | Path) -> str:
    """In a few words, what there is of a run that cannot go on."""
    finished = finished_folders(checkpoint_folder(run_dir))
    return f"the last checkpoint is good, {finished[-1]}" if finished else "no checkpoint was saved yet"


def read_state(folder: Path, fields: Fields, read: Collection[str]) -> dict[str, Any] | None:
    """The folder's state file; None, and a line that says so, where it is damaged, a file is missing or has another
    size than when it was saved, or one of those in `read` another content."""
    state = None
    try:
        state = unseal((folder / STATE).read_bytes(), fields)
        broken = wrong_files(folder, state["files"])
        if read and not broken:
            log_without_digests(folder, state)
            broken = changed(folder, state, read)
    except ValueError as error:
        broken = [f"{STATE} {error}"]
    if not broken:
        return state
    print(damage(folder, broken), flush=True)
    return None


def damage(folder: Path, broken: Collection[str]) -> str:
    """A line about a folder and what is wrong in it."""
    return f"{folder} is damaged ({', '.join(broken)}) and is passed over"


def log_without_digests(folder: Path, state: Mapping[str, Any]) -> None:
    if DIGESTS not in state:
        print(f"{folder} has no digests, an earlier version saved it: the sizes of its files alone are checked")


def changed(folder: Path, state: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Those of the folder's files that cannot be read, or are not as they were saved, and what is wrong with each; none
    where there are no digests."""
    found = []
    for name in names if DIGESTS in state else ():
        try:
            if file_digest(folder / name) != state[DIGESTS].get(name):
                found.append(f"{name} is not as it was saved")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def wrong_files(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Those of the named files that are missing or have another size in bytes."""
    return [
        name for name, size in sizes.items() if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]


def seal(content: Mapping[str, Any], digests: Mapping[str, str]) -> str:
    """The text of a state file.

    Args:
        content: JSON values. digests: of the folder's other files, by name.
    """
    whole = {"format": FORMAT, **content, DIGESTS: dict(digests)}
    whole[DIGESTS][STATE] = _own_digest(whole)
    return json.dumps(whole, indent=1)


def unseal(text: bytes, fields: Fields) -> dict[str, Any]:
    """What `seal` or an earlier version wrote.

    Raises:
        ValueError: it is not as it was written, or lacks a field; says what is wrong in a few words.
    """
    try:
        state = json.loads(text)
    except ValueError:
        raise ValueError("is no JSON") from None
    if not isinstance(state, dict):
        raise ValueError("holds no fields")
    sealed = "format" in state or DIGESTS in state
    for name, kind in [*fields.items(), *([(f"{DIGESTS}.{STATE}", str)] if sealed else [])]:
        value: Any = state
        for key in name.split(".", 1):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if value is _MISSING or not isinstance(value, kind):
            raise ValueError(f"has no field {name}" if value is _MISSING else f"has {value!r} in its field {name}")
    if sealed and state[DIGESTS][STATE] != _own_digest(state):
        raise ValueError("is not as it was saved")
    return state


def _own_digest(state: Mapping[str, Any]) -> str:
    """Of a state file's values but this one."""
    others = {**state, DIGESTS: {name: digest for name, digest in state[DIGESTS].items() if name != STATE}}
    # To text and back: what was written is what will be read, keys and numbers too.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(others)), sort_keys=True).encode()).hexdigest()


_MISSING = object()
