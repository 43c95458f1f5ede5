"""From any checkpoint, sharded ones too, to a folder that holds exactly the trained draft."""

import subprocess
import sys

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

from longdraft.launch.export import main
from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.hf import load_target
from longdraft.train import state
from longdraft.train.export import export, largest_difference
from longdraft.train.tracking import read_metrics

CASES = ["fp32-2-1", "fp32-2-3", "bf16-2-2", "bf16-2-3", "silu_chain"]


@pytest.mark.parametrize("name", CASES)
def test_export_is_the_trained_draft(runs, tmp_path, capsys, name):
    out = export(runs / name, tmp_path / "draft")
    assert out == tmp_path / "draft" and "largest difference of a logit 0\n" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    # DeepSpeed's own consolidation of its shards, the fp32 masters, is the independent witness.
    masters = get_fp32_state_dict_from_zero_checkpoint(
        str(state.checkpoint_folder(runs / name)), tag="step_000020", exclude_frozen_parameters=True
    )
    exported = load_draft(out).state_dict()
    assert exported.keys() == masters.keys()
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    for key, weight in exported.items():
        assert weight.dtype == dtype and torch.equal(weight, masters[key].to(dtype)), key


def test_config_json_tells_how_it_was_made(runs, tmp_path):
    info = read_info(export(runs / "fp32-2-1", tmp_path / "draft"))
    assert info.train_length == 24 and info.noise is None
    assert info.train_config["train"]["global_batch"] == 8 and info.train_config["optimizer"]["peak_lr"] == 5e-3
    assert info.tree["levels"] == [3, 3, 3]
    heldout = [record for record in read_metrics(runs / "fp32-2-1") if "heldout_loss" in record]
    for rates in ("rank_rates", "choice_rates"):
        assert info.tree[rates] == heldout[-1][f"heldout_{rates}"]
    assert set(info.versions) == {"longdraft", "torch", "transformers", "deepspeed", "safetensors"}


def test_the_comparison_sees_a_difference(runs, tmp_path):
    out = export(runs / "fp32-2-1", tmp_path / "draft")
    found = state.newest(runs / "fp32-2-1")
    assert found is not None
    config = state.saved_config(runs / "fp32-2-1", found[1])
    target = load_target(config.target.path, torch.float32)
    one, other = load_draft(out, target), load_draft(out, target)
    assert largest_difference(config, target, one, other) == 0
    other.proj[2].weight[0, 0] += 1e-3
    assert largest_difference(config, target, one, other) > 0


def test_exports_are_read_without_unpickling(runs, tmp_path):
    out = export(runs / "bf16-1-3", tmp_path / "draft")
    check = (
        "import pickle, sys\n"
        "from longdraft.models.draft_folder import load_draft\n"
        "def refuse(*a, **k): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "print(len(load_draft(sys.argv[1]).state_dict()))\n"
    )
    done = subprocess.run([sys.executable, "-c", check, str(out)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9" and len(load_file(out / "model.safetensors")) == 9


def test_a_folder_without_checkpoint_is_an_error_of_the_command(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"error: run_dir: {tmp_path} holds no whole checkpoint; train first" in capsys.readouterr().err
