"""A trained draft as a repository of the hub: its card, and decoding with it by its name."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from longdraft.train.tracking import read_metrics

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40
CONFIG = """
target: {path: me/target}
data: {path: data, seq_len: 64}
draft: {method: medusa, n_heads: 2}
train: {run_dir: run, steps: 4, global_batch: 4, micro_batch: 4, precision: fp32}
optimizer: {peak_lr: 5e-3, warmup_steps: 1}
heldout: {every: 2, rows: 4}
decoding: {every: 2, prompts: 1, contexts: [32], new_tokens: 8}
log: {wandb: disabled, every: 1}
"""
COMMANDS = [
    "prepare --source stdlib --target me/target --seq-len 64 --heldout-share 0.5 --max-tokens 20000 --out data",
    "train run.yaml",
    "export run --card me/draft",
    "generate --draft me/draft --dtype fp32 --prompt the --max-new-tokens 4",
]
# All in one process, with DECODE after it; training without the launcher.
MAKE = """
import shutil, sys
from longdraft.launch import cli, train
for command in sys.argv[1:]:
    name, *rest = command.split()
    if name == "generate":
        shutil.copytree("run/draft", "hub/me/draft")  # the upload
    assert (train.main(rest) if name == "train" else cli.main([name, *rest])) == 0, command
"""
# transformers' own loader runs the repository's generate.py; its greedy tokens are those of its own decoding.
DECODE = """
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("me/target", dtype=torch.float32)
ids = AutoTokenizer.from_pretrained("me/target")("the cat sat on the", return_tensors="pt").input_ids
asked = {"max_new_tokens": 24, "do_sample": False}
own = {"custom_generate": "me/draft", "trust_remote_code": True}
by_name, by_place = model.generate(input_ids=ids, **asked, **own), model.generate(ids, **asked, **own)
from longdraft.infer.transformers_api import _KEPT
drafter = type(_KEPT[model]._engine.drafter).__name__
print(json.dumps([model.generate(ids, **asked).tolist(), by_name.tolist(), by_place.tolist(), drafter]))
"""


@pytest.fixture(scope="module")
def uploaded(tmp_path_factory, shared, serving):
    """A folder where a draft was trained for me/target and became me/draft, and what DECODE printed."""
    folder = tmp_path_factory.mktemp("uploaded")
    shared("tiny_checkpoint.py").save(folder / "hub" / "me" / "target", TEXT, 290, seed=3)
    (folder / "run.yaml").write_text(CONFIG)
    own = {"HF_HOME": str(folder / "cache"), "HF_TOKEN": "hf_ours", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    with serving(folder / "hub") as (address, _):
        asked = {"cwd": folder, "env": os.environ | own | {"HF_ENDPOINT": address}, "timeout": 240}
        done = subprocess.run([sys.executable, "-c", MAKE + DECODE, *COMMANDS], capture_output=True, text=True, **asked)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_transformers_decodes_with_the_repository(uploaded):
    own, by_name, by_place, drafter = uploaded[1]
    assert own == by_name == by_place and len(own[0]) > 24 and drafter == "HeadsDrafter"


def test_the_card_says_what_the_run_recorded(uploaded):
    folder = uploaded[0] / "run" / "draft"
    names = ["README.md", "config.json", "curves.png", "custom_generate/generate.py", "model.safetensors"]
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == names
    card = ModelCard.load(folder / "README.md")
    assert card.data.base_model == "me/target"
    assert {"speculative-decoding", "draft-model", "medusa", "long-context"} <= set(card.data.tags)
    decoded = [record for record in read_metrics(uploaded[0] / "run") if "decode_tokens_per_step" in record][-1]
    assert "(curves.png)" in card.text and "--draft me/draft" in card.text
    assert f"| ctx32.T0 | {decoded['decode_tokens_per_step/ctx32.T0']:.2f} |" in card.text
    assert "\n  method: medusa\n" in card.text and "\n  seq_len: 64\n" in card.text
