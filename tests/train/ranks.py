"""One rank of a test: performs a list of actions in order. Started by the fixture `start_ranks`.

{"train": [override, ...]} trains, with another "config" where it is given, and with "until" to the checkpoint of that
step. With "out": training must fail, and the error goes to `out`-<rank>. With "stop": n, rank 1's `stop` has something
in it from the n-th look on. With "overflow": step, rank 1's gradient of that step is infinite, its loss is not. With
"kill": a moment of KILLS, the process kills itself then. {"limit": {rank: bytes}}: that rank can write no larger file;
the others can. {"resave": [override, ...], "to": folder}: loads the run's newest checkpoint and saves it into another
folder; with "negative_zeros" the first entry of each tensor is -0.0 by then. {"copy": [from, to]}: copies a run's
folder, without the checkpoints in "without". {"stages": [override, ...], "there": [override, ...]}: trains as the
command does, with further overrides on the second machine (start_ranks). {"main": [override, ...]}: the rest is the
command's; as the first action, before the ranks have met.
"""

import gc
import json
import os
import resource
import shutil
import signal
import sys
from functools import lru_cache
from pathlib import Path

import torch

from longdraft.launch.train import main
from longdraft.models.hf import load_target
from longdraft.models.target import Target
from longdraft.train import checkpoint
from longdraft.train.config import DTYPES
from longdraft.train.config_file import load_config, load_stages
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.loop import train, train_stages
from longdraft.train.ranks import TrainingError, join_ranks, leave_ranks
from longdraft.train.setup import open_run, open_target


@lru_cache(maxsize=2)
def target(path: str, precision: str) -> Target:
    return load_target(path, DTYPES[precision])


class Until(list):
    """It has something in it once a checkpoint is there."""

    def __init__(self, run_dir: str, step: int):
        super().__init__()
        self._checkpoint = checkpoint.checkpoint_folder(run_dir) / f"step_{step:06d}"

    def __bool__(self) -> bool:
        return self._checkpoint.exists()


class Later(list):
    """A list that has something in it from the n-th look on."""

    def __init__(self, n: int):
        super().__init__()
        self.looks = n

    def __bool__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Overflow(torch.autograd.Function):
    """The identity, with a gradient that overflows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.inf


def overflowing(backward, step: int):
    passes = 0

    def wrapped(self, part, left_out):
        nonlocal passes
        now = passes // self.deepspeed.gradient_accumulation_steps() + 1
        passes += 1
        backward(self, Overflow.apply(part) if now == step else part, left_out)

    return wrapped


def die(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(tensors, path):
    path.write_bytes(b"\0" * 100)
    die()


def half_removed(path, **given):
    for file in Path(path).glob("*.safetensors"):
        file.unlink()
        die()


# Moments of a run, as what is replaced there: (owner, name, replacement). All but the first are of a save.
KILLS = {
    "backward": (DraftEngine, "backward", die),
    "temporary folder made": (checkpoint, "write_tensors", die),
    "file half written": (checkpoint, "write_tensors", half_written),
    "without its state file": (checkpoint, "seal", die),
    "not renamed": (checkpoint, "_put_in_place", die),
    "former one not removed": (checkpoint, "_set_aside", die),
    "former one half removed": (checkpoint.shutil, "rmtree", half_removed),
}


def run(action):
    config = load_config(action.get("config", sys.argv[1]), action["train"])
    whole = config.target.zero_stage == 0 and config.target.loader == "longdraft"
    frozen = target(config.target.path, config.train.precision) if whole else open_target(config, ranks)
    backward, stop = DraftEngine.backward, []
    if "until" in action:
        stop = Until(config.train.run_dir, action["until"])
    elif "stop" in action and ranks.rank == 1:
        stop = Later(action["stop"])
    if "overflow" in action and ranks.rank == 1:
        DraftEngine.backward = overflowing(backward, action["overflow"])
    if "kill" in action:
        setattr(*KILLS[action["kill"]])
    try:
        train(config, ranks, frozen, stop)
    finally:
        DraftEngine.backward = backward


def resave(action):
    config = load_config(sys.argv[1], action["resave"])
    opened = open_run(config, ranks, target(config.target.path, config.train.precision))
    found = checkpoint.newest(config.train.run_dir)
    assert found is not None
    checkpoint.load(opened.engine, found)
    if action.get("negative_zeros"):
        for tensor in opened.engine.shares().values():
            tensor[0] = -0.0
    state = {name: found[1][name] for name in ("step", "config", "extra")}
    checkpoint.save(opened.engine, action["to"], state, keep=1)
    opened.engine.close()


def limit(by_rank):
    size = by_rank.get(str(ranks.rank), resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def copy(action):
    shutil.copytree(*action["copy"])
    for name in action.get("without", []):
        shutil.rmtree(Path(action["copy"][1]) / "checkpoints" / name)


def perform(action):
    if "train" in action:
        return run(action)
    if "stages" in action:
        there = action["there"] if ranks.rank != ranks.local_rank else []
        return train_stages(load_stages(sys.argv[1], [*action["stages"], *there]), ranks)
    if "resave" in action:
        return resave(action)
    if "limit" in action:
        return limit(action["limit"])
    if "main" in action:
        sys.exit(main([sys.argv[1], *action["main"]]))
    return copy(action) if ranks.first else None


actions = json.loads(sys.argv[2])
if "main" in actions[0]:
    perform(actions[0])
ranks = join_ranks()
gc.freeze()  # DeepSpeed collects garbage at every start of a run; objects of the imports need not be searched
for action in actions:
    try:
        perform(action)
        assert "out" not in action, f"nothing went wrong: {action}"
    except (ValueError, TrainingError) as error:
        if "out" not in action:
            raise
        Path(f"{action['out']}-{ranks.rank}").write_text(str(error))
    ranks.barrier()
leave_ranks(ranks)
