"""Training with the recipes for Llama-3.1-8B, without a checkpoint or texts: weights and tokens are random.

`python benchmarks/checks/long_training.py` trains LongSpec's block on rows of 32,768 tokens and TokenSwift's heads on
rows of 8,192, one pass a step. It prints a JSON object for each: medians over its steps, their memory beside
`--estimate`'s, and the seconds of held-out rows and checkpoint at the last step.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from longdraft.benchmarks.checks.gpu_check import figures
from longdraft.benchmarks.checks.long_contexts import LAYERS, random_target
from longdraft.data_prep.shards import FORMAT_VERSION, MANIFEST, SPLITS, Row, write_shard
from longdraft.models.files import write_json
from longdraft.models.target import Target
from longdraft.train.config import DTYPES, Config
from longdraft.train.config_file import load_stages
from longdraft.train.estimate import memory
from longdraft.train.launcher import settle_device
from longdraft.train.loop import train
from longdraft.train.ranks import Ranks, join_ranks, leave_ranks
from longdraft.train.tracking import read_metrics

STEPS = 6
# By method: the stage of configs/METHOD/llama3.1-8b.yaml, and the rows of a pass.
STAGES = {"longspec": ("long", 1), "tokenswift": (None, 3)}
END_FIGURES = ("heldout_s", "checkpoint_s")


def recipe(method: str, folder: Path, overrides: Sequence[str]) -> Config:
    """The recipe's stage, for a few steps of one pass on one rank."""
    stage, rows = STAGES[method]
    given = [
        "target.zero_stage=0", "train.zero_stage=1", f"train.steps={STEPS}", f"train.save_every={STEPS}",
        f"train.micro_batch={rows}", f"train.global_batch={rows}", f"train.run_dir={folder}/run",
        f"data.path={folder}/data", "heldout.rows=1", f"heldout.every={STEPS}", "log.every=1", "log.wandb=disabled",
        "optimizer.warmup_steps=1",
    ]  # fmt: skip
    file = Path(__file__).parents[2] / "configs" / method / "llama3.1-8b.yaml"
    config = next(one.config for one in load_stages(file, [*given, *overrides]) if one.name == stage)
    return config.changed(draft={"start_from": None})  # there is no trained stage before it


def write_rows(folder: Path, n_rows: int, length: int, target: Target) -> None:
    """Write both splits, each with `n_rows` rows of random tokens."""
    generator = np.random.default_rng(0)
    for split in SPLITS:
        (folder / split).mkdir(parents=True)
        tokens = generator.integers(0, target.model.config.vocab_size, (n_rows, length)).astype(np.int32)
        rows = [Row(row, [0, length], [1, length], [f"{split} {i}"], [0]) for i, row in enumerate(tokens)]
        shard = write_shard(folder / split / "shard-00000.arrow", rows, length, fill_id=0)
        told = {"format_version": FORMAT_VERSION, "seq_len": length, "shards": [shard]}
        write_json(folder / split / MANIFEST, told | {"tokenizer_sha256": target.fingerprint["tokenizer"]})


def measure(method: str, target: Target, ranks: Ranks, overrides: Sequence[str]) -> dict[str, Any]:
    """The figures of a method's training."""
    with TemporaryDirectory() as name:
        config = recipe(method, Path(name), overrides)
        write_rows(Path(name) / "data", STEPS * config.train.global_batch, config.data.seq_len, target)
        train(config, ranks, target)
        records = read_metrics(config.train.run_dir)
    found: dict[str, Any] = {"rows": config.train.global_batch, "seq_len": config.data.seq_len}
    found |= figures([record for record in records if "loss" in record])
    found |= {key: record[key] for record in records for key in END_FIGURES if key in record}
    counted = memory(config, target.model.config, 1, gpu=ranks.device.type == "cuda")
    return found | {"estimated_memory_gib": (counted.peak - counted.process) / 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training at the size of Llama-3.1-8B, with random weights.")
    parser.add_argument("overrides", nargs="*", metavar="SECTION.FIELD=VALUE", help="overrides of both recipes")
    parser.add_argument("--shape", choices=LAYERS, default="llama3.1-8b")
    parser.add_argument("--methods", choices=STAGES, nargs="+", default=list(STAGES))
    args = parser.parse_intermixed_args(argv)
    given = recipe(args.methods[0], Path(), args.overrides).train
    settle_device(given.device)
    ranks = join_ranks()
    target = random_target(args.shape, ranks.device, DTYPES[given.precision])
    for method in args.methods:
        print(json.dumps({method: measure(method, target, ranks, args.overrides)}), flush=True)
    leave_ranks(ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
