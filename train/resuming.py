"""Whether a run may go on from what is saved: whatever decides its result must be as it was when the run began.

A run may move, together with the draft that it began with and with its rows.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.data_prep.shards import ShardSet
from longdraft.train.checkpoint import FORMAT, WEIGHTS, Found, saved_config
from longdraft.train.config import Config, to_flat_dict

# Fields and sections that may change when a run is resumed. Any other would change the result.
FREE = (
    "target.max_positions", "train.run_dir", "train.save_every", "train.keep_checkpoints", "train.micro_batch",
    "train.max_skipped", "train.device", "log", "heldout", "decoding", "data.max_dropped_share",
)  # fmt: skip


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
    """Raises ValueError where a run with this config and these training rows would not go on as the saved one."""
    saved, start_now = saved_config(config.train.run_dir, state), config.draft.start_from
    run_then = state["config"]["train"]["run_dir"]
    if is_same_start(saved.draft.start_from, run_then, start_now, config.train.run_dir):
        saved = saved.changed(draft={"start_from": start_now})
    # Below, the rows themselves are compared, wherever they lie.
    check_same_run(saved.changed(data={"path": config.data.path}), config)
    old, new = state["extra"]["data"], rows.identity()
    if old != new:
        raise ValueError(
            f"data.path: {config.data.path} holds other rows ({new['rows']:,}, sha256 {new['sha256'][:12]}) than the "
            f"run in {config.train.run_dir} began with ({old['rows']:,}, sha256 {old['sha256'][:12]}); put those back, "
            "or start anew with train.run_dir=another/folder"
        )


def check_format(found: Found) -> None:
    """Raises ValueError where a former version saved the checkpoint: the state of its optimizer cannot be read."""
    if found[1]["format"] != FORMAT:
        raise ValueError(
            f"train.run_dir: {found[0]} was saved by a former version, which alone can go on from it; export it and "
            "begin another run with draft.start_from, or give another folder"
        )


def check_same_target(state: dict[str, Any], weights: str | None, config: Config) -> None:
    """Raises ValueError where the target's weights, by their hash, are not those that the saved run began with."""
    old = state["extra"].get("target_weights")
    if None not in (old, weights) and old != weights:
        raise ValueError(
            f"target.path: {config.target.path} has other weights (sha256 of a sample {weights}) than the run in "
            f"{config.train.run_dir} began with ({old}); put those back, or start anew with another train.run_dir"
        )


def is_same_start(saved: str | None, saved_run: str, now: str | None, run: str) -> bool:
    """Whether two values of draft.start_from name one folder: the same place, however it is spelt, or the same place
    seen from beside the run's folder, as where both were moved.

    Args:
        saved: the value of a run in `saved_run`. now: that of the same run in `run`.
    """
    if saved is None or now is None:
        return saved == now
    beside = [os.path.relpath(start, Path(of).absolute().parent) for start, of in ((saved, saved_run), (now, run))]
    return Path(saved).resolve() == Path(now).resolve() or beside[0] == beside[1]


def check_same_vocabulary(found: Found, token_ids: Tensor | None, config: Config) -> None:
    """Raises ValueError where a restricted vocabulary has other tokens than the saved draft's."""
    if token_ids is not None and not torch.equal(load_file(found[0] / WEIGHTS)["token_ids"], token_ids.cpu()):
        source = f"draft.start_from: {config.draft.start_from}" if config.draft.start_from else "draft.draft_vocab_size"
        raise ValueError(
            f"{source} gives other tokens for the draft than the run in {config.train.run_dir} began with; put back "
            "the draft or the target's files, or start anew with train.run_dir=another/folder"
        )
