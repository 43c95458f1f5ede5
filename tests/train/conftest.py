"""What the trainer's tests share: a tiny Hugging Face target on disk, prepared rows, a config, ranks as processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_json, write_shard
from longdraft.train.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
VOCAB, SEQ_LEN = 97, 24
KINDS = {"linear_chain": [], "silu_chain": ["draft.kind=silu_chain", "draft.out_norm_init=ones"]}
# Many small passes: a step takes tens of milliseconds, so that a signal can hit it.
SLOW = ["train.steps=40", "train.micro_batch=1", "train.global_batch=16", "train.save_every=6", "train.zero_stage=2"]
CONFIG = """
target: {{path: {target}}}
draft: {{out_norm_init: target}}
data: {{path: {data}, seq_len: 24}}
train: {{run_dir: {run_dir}, steps: 20, global_batch: 8, micro_batch: 2, precision: fp32, save_every: 10}}
optimizer: {{peak_lr: 5e-3, warmup_steps: 4}}
heldout: {{every: 10, rows: 5, choices: 20}}
log: {{wandb: disabled}}
"""


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """A Llama of 2 layers with weights of its own seed, whatever transformers draws; no tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **sizes))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def _write_rows(folder: Path, n_rows: int, seed: int) -> None:
    """A split of rows that hold two or three pieces and a little padding. Of every four tokens the third and fourth
    follow from the first, so that the first two heads have something to learn."""
    generator = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64))
    rows = []
    for i in range(n_rows):
        used = SEQ_LEN - i % 3
        borders = [0, 5 + i % 7, used] if i % 2 else [0, 3, 11 + i % 5, used]
        tokens = (generator.random_raw(used) % VOCAB).astype(np.int32)
        for offset in (2, 3):
            behind = tokens[offset::4]
            behind[:] = (tokens[0::4] * 3 + offset)[: len(behind)] % VOCAB
        rows.append(Row(tokens, borders, [1, used], ["d"] * (len(borders) - 1), list(range(len(borders) - 1))))
    folder.mkdir(parents=True)
    shard = write_shard(folder / "shard-00000.arrow", rows, SEQ_LEN, fill_id=0)
    manifest = {"format_version": FORMAT_VERSION, "seq_len": SEQ_LEN, "tokenizer_sha256": "none", "shards": [shard]}
    write_json(folder / "manifest.json", manifest)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    _write_rows(folder / "train", 45, seed=1)
    _write_rows(folder / "heldout", 9, seed=2)
    return folder


@pytest.fixture(scope="session")
def config_file(tmp_path_factory, target_folder, data_folder) -> Path:
    folder = tmp_path_factory.mktemp("config")
    path = folder / "tiny.yaml"
    path.write_text(CONFIG.format(target=target_folder, data=data_folder, run_dir=folder / "run"))
    return path


@pytest.fixture(scope="session")
def start_ranks(config_file) -> Callable[..., list[subprocess.Popen]]:
    """`start_ranks(2, [{"train": [override, ...]}, ...])` starts that many ranks of ranks.py, or of another script."""

    def start(n_ranks: int, actions: Sequence[dict], script: str = "ranks.py") -> list[subprocess.Popen]:
        shared = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, str(Path(__file__).with_name(script)), str(config_file), json.dumps(actions)]
        return [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(n_ranks)
        ]

    return start


def finish(processes: Sequence[subprocess.Popen]) -> str:
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return outputs[0]


@pytest.fixture(scope="session")
def finish_ranks() -> Callable[[Sequence[subprocess.Popen]], str]:
    """Waits for the ranks, asserts that all left with 0, and gives rank 0's output."""
    return finish


@pytest.fixture(scope="session")
def runs(tmp_path_factory, start_ranks) -> Path:
    """A folder of finished runs, trained in as few processes as possible:

    {fp32,bf16}-{ranks}-{stage}: 20 steps; linear_chain, silu_chain: the same on one rank in fp32, for golden losses;
    bf16-1-{stage}-again: gone on with from step 10; unbroken: SLOW on two ranks; output.txt: what one rank printed.
    """
    folder = tmp_path_factory.mktemp("runs")

    def train(name: str, *overrides: str) -> dict:
        return {"train": [f"train.run_dir={folder / name}", *overrides]}

    started = []
    for n_ranks in (1, 2):
        actions = [
            train(f"{precision}-{n_ranks}-{stage}", f"train.precision={precision}", f"train.zero_stage={stage}")
            for precision, stage in product(("fp32", "bf16"), (1, 2, 3))
        ]
        if n_ranks == 1:
            actions += [train(kind, *overrides) for kind, overrides in KINDS.items()]
            for stage in (1, 3):
                name = f"bf16-1-{stage}"
                actions.append({"copy": [str(folder / name), str(folder / f"{name}-again")], "without": "step_000020"})
                actions.append(train(f"{name}-again", "train.precision=bf16", f"train.zero_stage={stage}"))
            actions.append(train("fp32-1-1"))  # which is finished, and says so
        else:
            actions.append(train("unbroken", *SLOW))
        started.append(start_ranks(n_ranks, actions))
    output, _ = (finish(processes) for processes in started)
    (folder / "output.txt").write_text(output)
    return folder
