"""What the trainer's tests share: a tiny Hugging Face target on disk, prepared rows, a config, ranks as processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from longdraft.data_prep.shards import FORMAT_VERSION, Row, write_json, write_shard
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
VOCAB, SEQ_LEN = 97, 24
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


@pytest.fixture(scope="session")
def write_rows() -> Callable[..., None]:
    return _write_rows


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
def train_in_ranks(config_file) -> Callable[[int, Sequence[Sequence[str]]], None]:
    """`train_in_ranks(2, [[override, ...], ...])` trains one run after the other in that many processes."""

    def train(n_ranks: int, runs: Sequence[Sequence[str]]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(config_file), json.dumps(runs)]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(n_ranks)
        ]
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * n_ranks, "\n".join(outputs)

    return train
