"""Writes the fixtures in former_runs/: what a version of this project left of a finished and of a killed run.

    python tests/train/write_former_runs.py FOLDER

FOLDER gets a target, prepared rows, a finished run, and the same run as a kill behind its first checkpoint leaves it.
Paths in the configs are relative to FOLDER. The files are committed; later versions must read the finished run, so they
are not written anew.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_shard
from longdraft.models.files import write_json

VOCAB, SEQ_LEN = 24, 16
CONFIG = """
target: {path: target}
data: {path: data, seq_len: 16}
train: {run_dir: finished, steps: 4, global_batch: 2, micro_batch: 2, precision: bf16, save_every: 2}
optimizer: {peak_lr: 5e-3, warmup_steps: 1}
heldout: {every: 4, rows: 2, choices: 8}
log: {wandb: disabled}
"""


def write_target(folder: Path) -> None:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=True, **sizes)).bfloat16()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)


def write_rows(folder: Path) -> None:
    for split, n_rows in (("train", 5), ("heldout", 2)):
        (folder / split).mkdir(parents=True)
        tokens = (np.arange(n_rows * SEQ_LEN).reshape(n_rows, SEQ_LEN) * 7 % VOCAB).astype(np.int32)
        rows = [Row(row, [0, SEQ_LEN], [1, SEQ_LEN], [f"document {i}"], [0]) for i, row in enumerate(tokens)]
        shard = write_shard(folder / split / "shard-00000.arrow", rows, SEQ_LEN, fill_id=0)
        manifest = {"format_version": FORMAT_VERSION, "seq_len": SEQ_LEN, "tokenizer_sha256": "none", "shards": [shard]}
        write_json(folder / split / "manifest.json", manifest)


def main(folder: Path) -> None:
    write_target(folder / "target")
    write_rows(folder / "data")
    (folder / "run.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "longdraft.launch.train", "run.yaml"]
    subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    # The killed run is the finished one without its last two steps.
    finished, killed = folder / "finished", folder / "killed"
    shutil.copytree(finished, killed)
    shutil.rmtree(killed / "checkpoints" / "step_000004")
    shutil.rmtree(finished / "checkpoints" / "step_000002")
    for name in ("config.yaml", "metrics.jsonl"):
        text = (killed / name).read_text()
        if name == "metrics.jsonl":
            lines = [line for line in text.splitlines(keepends=True) if json.loads(line)["step"] <= 2]
            text = "".join(lines)
        (killed / name).write_text(text.replace("finished", "killed"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
