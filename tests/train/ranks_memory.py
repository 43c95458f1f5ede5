"""One rank of a test of memory: saves the growth of its process's resident memory as `out`-<rank>.json. Started by the
fixture `start_ranks`.

There is one action. {"states": [[precision, zero_stage, offload, optimizer, bytes expected], ...], "out"}: drafts of
large matrices train under ZeRO, one after the other. {"run": [override, ...], "out"}: two steps of a run, on data that
it makes up. Peaks are the kernel's own, so that none is missed on a busy machine.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import datasets  # noqa: F401 (a later import would count)
import gguf  # noqa: F401
import numpy as np
import torch
from torch import nn

from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_shard
from longdraft.models.files import write_json
from longdraft.models.target import Target
from longdraft.train.batches import epoch_order
from longdraft.train.config import Config
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import DraftEngine
from longdraft.train.ranks import Ranks, join_ranks, leave_ranks
from longdraft.train.setup import open_run, open_target
from longdraft.train.step import learning_rate, train_step

M_MMAP_THRESHOLD = -3  # of malloc.h
WIDTH, MATRICES, PASSES, STEPS = 1024, 4, 2, 2


class Net(nn.Module):
    """A network whose memory is almost all weights."""

    def __init__(self):
        super().__init__()
        self.proj = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)])
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for proj in self.proj:
            x = proj(self.norm(x))
        return x.float().sum()


def status(*names: str) -> list[int]:
    """Fields of this process's memory, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 for name in names]


def train(config: Config, ranks: Ranks) -> None:
    engine = DraftEngine(Net(), ranks, config.train, config.optimizer)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    for step in range(STEPS):
        engine.set_rate(learning_rate(step, config.train.n_steps, config.optimizer))
        for _ in range(PASSES):
            engine.backward(engine.deepspeed(torch.ones(4, WIDTH, dtype=dtype)) / 1e6, torch.tensor(False))
    engine.close()


def growth(config: Config, ranks: Ranks) -> int:
    """The largest growth of this process's memory while it trains."""
    gc.collect()
    ranks.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, files = status("VmRSS", "RssFile")
    train(config, ranks)
    peak, files_then = status("VmHWM", "RssFile")
    return peak - resident - (files_then - files)


def states(runs: list, path: str, ranks: Ranks) -> list[int]:
    """The largest growth of memory that is not backed by files, in each case. Files are left out: whether a case is the
    first to touch some megabytes of a library's code depends on the processor."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory goes back at once
    gc.freeze()  # DeepSpeed collects garbage at every start of a run; objects of the imports need not be searched
    grown, first = [], {precision: [precision, *rest] for precision, *rest in reversed(runs)}
    base = ["train.micro_batch=1", f"train.global_batch={PASSES * ranks.world_size}"]
    # The first case of a precision is a warm-up: oneDNN compiles its products then, more code with AVX-512.
    for precision, stage, offload, optimizer, expected in [*first.values(), *runs]:
        options = [f"train.precision={precision}", f"train.zero_stage={stage}", f"train.offload_optimizer={offload}"]
        config = load_config(path, [*base, *options, f"optimizer.name={optimizer}"])
        grown.append(growth(config, ranks))
        # The lesser of two: gloo's thread frees what it has summed when the system lets it run, which on a busy machine
        # may be after the next buffer is made.
        if len(grown) > len(first) and max(ranks.gather(grown[-1])) > 1.04 * expected:
            grown[-1] = min(grown[-1], growth(config, ranks))
    return grown[len(first) :]


def write_rows(config: Config, target: Target) -> None:
    """A split of two rows, each one random piece: the first step's is short, the second step's full."""
    length, vocab_size = config.data.seq_len, target.model.config.vocab_size
    for i, split in enumerate(("train", "heldout")):
        folder, generator = Path(config.data.path) / split, np.random.default_rng(i)
        folder.mkdir(parents=True)
        sizes = {row: size for row, size in zip(epoch_order(config.train.seed, 0, 2), (128, length), strict=True)}
        texts = [generator.integers(0, vocab_size, sizes[j]).astype(np.int32) for j in range(2)]
        rows = [Row(text, [0, len(text)], [1, len(text)], ["d"], [j]) for j, text in enumerate(texts)]
        shard = write_shard(folder / "shard-00000.arrow", rows, length, fill_id=0)
        about = {"format_version": FORMAT_VERSION, "seq_len": length, "shards": [shard]}
        write_json(folder / "manifest.json", about | {"tokenizer_sha256": target.fingerprint["tokenizer"]})


def run(overrides: list[str], path: str, ranks: Ranks) -> int:
    config, (before,) = load_config(path, overrides), status("VmRSS")
    target = open_target(config, ranks)
    write_rows(config, target)
    opened = open_run(config, ranks, target)
    for _ in range(STEPS):
        train_step(opened)
        opened.step += 1
    return status("VmHWM")[0] - before  # not ru_maxrss, which also counts the process that started this one


def main(path: str, action: dict) -> None:
    ranks = join_ranks()
    grown = states(action["states"], path, ranks) if "states" in action else run(action["run"], path, ranks)
    Path(f"{action['out']}-{ranks.rank}.json").write_text(json.dumps(grown))
    leave_ranks(ranks)


main(sys.argv[1], json.loads(sys.argv[2])[0])
