"""Load a checkpoint on another number of ranks, through DeepSpeed's universal checkpoint (arXiv 2406.18820).

The first rank converts it: every parameter's fp32 weights and moments become separate files, of which each rank then
reads its share. Not here: when that is needed (saving.py); the rows of a step, which do not depend on the number of
ranks (batches.py).
"""

import argparse
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from longdraft.train.deepspeed_engine import DraftEngine  # before DeepSpeed: it names the accelerator
from longdraft.train.ranks import TrainingError  # before DeepSpeed: it names the accelerator

# isort: split
import torch
from deepspeed.checkpoint import ds_to_universal

CONVERTED = "tmp-universal"  # beside the checkpoints, none of whose names begins like this
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def load(engine: DraftEngine, folder: Path, n_ranks: int) -> None:
    """Put weights and optimizer of a checkpoint that `n_ranks` ranks saved into the engine of any other number; all
    ranks call it, and wait for the first one.

    Raises:
        ValueError: a rank would hold no part of a parameter group, or does not see the converted files.
        TrainingError: the conversion failed.
    """
    ranks = engine.ranks
    _check_shares(engine)
    place = folder.parent / CONVERTED / folder.name
    names = [name for name, parameter in engine.draft.named_parameters() if parameter.requires_grad]
    try:
        sizes = ranks.from_first(partial(_convert, folder, place, names, (n_ranks, ranks.world_size)))
        unseen = ranks.unseen(place, sizes)
        if unseen:
            raise ValueError(
                f"train.run_dir: not every rank sees {place} ({unseen}); it must lie on a file system they share"
            )
        _read(engine, place)
        ranks.barrier()
    finally:
        if ranks.first:
            shutil.rmtree(place.parent, ignore_errors=True)


def _convert(folder: Path, place: Path, names: list[str], n_ranks: tuple[int, int]) -> dict[str, int]:
    """Write the universal form of `folder` to `place`; returns its files' sizes. `n_ranks`: when saved, now."""
    shutil.rmtree(place.parent, ignore_errors=True)
    arguments = argparse.Namespace(
        input_folder=folder.name,
        output_folder=str(place.relative_to(folder.parent)),
        num_extract_workers=1,  # no child processes: they would inherit the threads of this one's process group
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    old, new = n_ranks
    try:
        # From inside the folder, for the reason given in DraftEngine.read.
        with chdir(folder.parent), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ds_to_universal.main(arguments)
    except (OSError, RuntimeError) as error:
        needed = sum(file.stat().st_size for file in folder.iterdir())
        raise TrainingError(
            f"train.run_dir: {folder}, saved by {old} ranks, could not be converted for {new} ({error}); that needs "
            f"about {2 * needed / 1e6:,.0f} MB beside it. Make room, or start {old} ranks"
        ) from error
    files = {str(file.relative_to(place)): file.stat().st_size for file in place.rglob("*.pt")}
    missing = [f"{name}.{state}" for name in names for state in STATES if f"zero/{name}/{state}.pt" not in files]
    if missing:
        raise TrainingError(
            f"train.run_dir: DeepSpeed's conversion of {folder} from {old} to {new} ranks left out "
            f"{', '.join(missing)}; start {old} ranks"
        )
    return files


def _read(engine: DraftEngine, place: Path) -> None:
    """Read the converted files, and correct what DeepSpeed 0.19 gets wrong."""
    config: Any = engine.deepspeed._config
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    config.load_universal_checkpoint = True
    try:
        engine.read(place)
    finally:
        # Left on, it has kept ZeRO-3 from saving more than the first rank's file (issue 7546).
        config.load_universal_checkpoint = False
    for group, before in zip(engine.optimizer.param_groups, options, strict=True):
        group.update(before)  # ZeRO-3 gives every group the first one's weight decay
    for parameter, values in engine.optimizer.state.items():
        # Under ZeRO-3 all groups share one tensor of steps, which each of them would count up. It also lies on the CPU,
        # where AdaMuon needs it and a fused AdamW on a GPU cannot read it.
        place_of_steps = parameter.device if engine.optimizer.defaults.get("fused") else "cpu"
        values["step"] = torch.tensor(float(values["step"]), device=place_of_steps)


def _check_shares(engine: DraftEngine) -> None:
    """Raises ValueError where a rank would hold only padding of a group: DeepSpeed cannot load that."""
    ranks = engine.ranks
    groups = getattr(engine.deepspeed.optimizer, "bit16_groups", None) or getattr(
        engine.deepspeed.optimizer, "bf16_groups", []
    )
    empty = [i for i, group in enumerate(groups) if all(p._hp_mapping is None for p in group)]
    if any(ranks.gather(empty)):
        raise ValueError(
            f"train.run_dir: among {ranks.world_size} ranks some would hold no part of the draft's small parameters; "
            "go on with fewer ranks"
        )
