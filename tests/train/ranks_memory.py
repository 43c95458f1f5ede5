"""One rank of a test of memory: trains drafts of large matrices under ZeRO, one after the other, and saves by how much
the resident memory of its process grew for each, as `out`-<rank>.json. Started by the fixture `start_ranks`.

The one action: {"out": path, "runs": [[precision, zero_stage, offload], ...]}. Peaks are read every half millisecond,
which is enough for matrices of 16 MiB; MALLOC_MMAP_THRESHOLD_ must be set, so that what is freed is given back.
"""

import gc
import json
import os
import sys
import threading
import time

import torch
from torch import nn

from longdraft.train.config import Config, load_config
from longdraft.train.engine import DraftEngine, Ranks, join_ranks, leave_ranks

WIDTH, MATRICES, PASSES, STEPS = 2048, 4, 2, 2
PAGE = os.sysconf("SC_PAGE_SIZE")


class Net(nn.Module):
    """Almost all of its memory is weights."""

    def __init__(self):
        super().__init__()
        self.proj = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)])
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for proj in self.proj:
            x = proj(self.norm(x))
        return x.float().sum()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


class Watch:
    """The largest `resident()` between enter and exit, as `peak`."""

    def __enter__(self) -> "Watch":
        self.peak, self._stop = resident(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, resident())
            time.sleep(0.0005)


def train(config: Config, ranks: Ranks) -> None:
    engine = DraftEngine(config, Net(), ranks)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    for step in range(STEPS):
        engine.begin_step(step)
        for _ in range(PASSES):
            engine.backward(engine(torch.ones(4, WIDTH, dtype=dtype)) / 1e6)
    engine.deepspeed.destroy()


def main(path: str, action: dict) -> None:
    ranks, grown = join_ranks(), []
    base = ["train.micro_batch=1", f"train.global_batch={PASSES * ranks.world_size}"]
    for precision, stage, offload in [action["runs"][0], *action["runs"]]:  # the first one also warms up
        options = [f"train.precision={precision}", f"train.zero_stage={stage}", f"train.offload_optimizer={offload}"]
        config = load_config(path, [*base, *options])
        gc.collect()
        ranks.barrier()
        before = resident()
        with Watch() as watch:
            train(config, ranks)
        grown.append(watch.peak - before)
    with open(f"{action['out']}-{ranks.rank}.json", "w") as file:
        json.dump(grown[1:], file)
    leave_ranks(ranks)


main(sys.argv[1], json.loads(sys.argv[2])[0])
