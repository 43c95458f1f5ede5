"""One rank of a test of faults and of other numbers of ranks: performs a list of actions in order. Started by the
fixture `start_ranks`.

{"train": [override, ...]} trains. With "out": training must fail, and the error goes to `out`-<rank>. With "stop": n,
rank 1's `stop` has something in it from the n-th look on. With "overflow": step, rank 1's gradient of that step is
infinite, its loss is not. {"limit": {rank: bytes}}: that rank can write no larger file; the others can. {"find":
[run_dir by rank], "patience", "out"}. {"few": [override, ...], "out"}: an engine whose smallest group leaves rank 1
nothing. {"copy": [from, to]}: copies a run's folder, without the checkpoints in "without". {"flip": [file]}: flips a
bit in each. {"swap": [old, new]}: puts new in place of old. {"done": path} makes a file, {"wait": path} waits for one.
{"main": [override, ...]}: the rest is the command's, with another "config" where it is given.
"""

import json
import resource
import shutil
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from longdraft.launch.train import main
from longdraft.models.hf import load_target
from longdraft.models.target import Target
from longdraft.train import elastic, saving
from longdraft.train.config import DTYPES
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.loop import train
from longdraft.train.ranks import TrainingError, join_ranks, leave_ranks


@lru_cache(maxsize=2)
def target(path: str, precision: str) -> Target:
    return load_target(path, DTYPES[precision])


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


def run(action):
    config = load_config(sys.argv[1], action["train"])
    backward = DraftEngine.backward
    stop = Later(action["stop"]) if "stop" in action and ranks.rank == 1 else []
    if "overflow" in action and ranks.rank == 1:
        DraftEngine.backward = overflowing(backward, action["overflow"])
    try:
        train(config, ranks, target(config.target.path, config.train.precision), stop)
    finally:
        DraftEngine.backward = backward


def few(overrides):
    draft = nn.Linear(4, 1)
    engine = DraftEngine(load_config(sys.argv[1], overrides), draft, ranks)
    elastic.load(engine, Path("nowhere"), 3)


def limit(by_rank):
    size = by_rank.get(str(ranks.rank), resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def alone(action):
    """Actions that one process does for all."""
    if "copy" in action:
        shutil.copytree(*action["copy"])
        for name in action.get("without", []):
            shutil.rmtree(Path(action["copy"][1]) / "checkpoints" / name)
    elif "flip" in action:
        for file in map(Path, action["flip"]):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    elif "swap" in action:
        old, new = action["swap"]
        shutil.rmtree(old)
        Path(new).rename(old)
    elif "done" in action:
        Path(action["done"]).touch()
    elif "wait" in action:
        while not Path(action["wait"]).exists():
            time.sleep(0.02)


def perform(action):
    if "train" in action:
        return run(action)
    if "limit" in action:
        return limit(action["limit"])
    if "few" in action:
        return few(action["few"])
    if "find" in action:
        found = saving.find(action["find"][ranks.rank], ranks, action["patience"])
        return found and str(found[0])
    if "main" in action:
        sys.exit(main([action.get("config", sys.argv[1]), *action["main"]]))
    return alone(action) if ranks.first else None


ranks = join_ranks()
for action in json.loads(sys.argv[2]):
    try:
        said = perform(action)
        assert "out" not in action or "find" in action, f"nothing went wrong: {action}"
    except (ValueError, TrainingError) as error:
        if "out" not in action:
            raise
        said = str(error)
    if "out" in action:
        Path(f"{action['out']}-{ranks.rank}").write_text(said or "")
    ranks.barrier()
leave_ranks(ranks)
