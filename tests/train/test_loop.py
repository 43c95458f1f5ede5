"""The small parts of a run: learning rate, parameter groups, what must fit together, tracking, the command's errors."""

import json

import pytest
import torch

from longdraft.launch.train import main
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import load_target
from longdraft.train.config import OptimizerSection, load_config
from longdraft.train.engine import learning_rate, parameter_groups
from longdraft.train.loop import open_rows
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker, read_metrics, wandb_mode


def test_learning_rate_is_a_function_of_the_step():
    optimizer = OptimizerSection(peak_lr=2.0, warmup_steps=4)
    rates = [learning_rate(step, 12, optimizer) for step in range(12)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[8] == pytest.approx(1.0) and 0 < rates[11] < 0.1
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, 12, OptimizerSection(peak_lr=2.0, warmup_steps=0)) == 2.0


def test_norms_do_not_decay():
    linear = TokenSwift(TokenSwiftConfig(8, 1e-5))
    decayed, others = parameter_groups(linear, 0.1)
    assert decayed["weight_decay"] == 0.1 and [p.ndim for p in decayed["params"]] == [2] * 3
    assert others["weight_decay"] == 0.0 and [p.ndim for p in others["params"]] == [1] * 6
    (only,) = parameter_groups(TokenSwift(TokenSwiftConfig(8, 1e-5, kind="silu_chain")), 0.1)
    assert only["weight_decay"] == 0.1 and len(only["params"]) == 3


@pytest.fixture(scope="module")
def target(target_folder):
    return load_target(target_folder, torch.float32)


@pytest.mark.parametrize("field", ["pre_norm", "post_norm"])
def test_teacher_gives_states_and_its_own_choices(target, field):
    tokens_BT = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(0))
    teacher = Teacher(target.model, frozenset({field}))
    hidden_BTD = teacher.hidden(tokens_BT)
    full = target.model(tokens_BT, needs={"logits", field})
    assert torch.equal(hidden_BTD, getattr(full, field)) and not hidden_BTD.requires_grad
    choices = teacher.choices(hidden_BTD.flatten(0, 1)).view(2, 11)
    assert torch.equal(choices, full.logits.argmax(-1))
    assert teacher.choices(hidden_BTD[0, :0]).shape == (0,)


def test_data_must_fit_config_and_target(config_file, target, data_folder, tmp_path):
    config = load_config(config_file)
    assert len(open_rows(config, "train", target)) == 45
    with pytest.raises(ValueError, match=r"data\.seq_len: 32, but .* has rows of 24 tokens; set data\.seq_len=24"):
        open_rows(load_config(config_file, ["data.seq_len=32"]), "train", target)
    manifest = json.loads((data_folder / "train" / "manifest.json").read_text()) | {"tokenizer_sha256": "abc"}
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    with pytest.raises(ValueError, match=r"was prepared with the tokenizer abc, but target0's is none"):
        open_rows(load_config(config_file, [f"data.path={tmp_path}"]), "train", target)


def test_wandb_offline_keeps_its_run_and_forgets_what_a_kill_left(config_file, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(config_file, [f"train.run_dir={tmp_path}", "log.wandb=offline"])
    tracker = Tracker(config)
    for step in (1, 2, 3):
        tracker.write({"step": step, "loss": 1.0 / step, "top1": [0.1, 0.2], "rates": [[0.1, 0.2], [0.3, 0.4]]})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # what a kill leaves
    again = Tracker(config, resume_step=2, wandb_id=tracker.wandb_id)
    again.write({"step": 3, "loss": 0.5})
    again.close()
    assert tracker.wandb_id is not None and again.wandb_id == tracker.wandb_id
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert folders and all(name.endswith(tracker.wandb_id) for name in folders)


def test_wandb_auto_is_offline_without_a_key(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "a-key")
    assert wandb_mode("auto") == "online"
    assert wandb_mode("disabled") == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("online") == "offline"
    assert wandb_mode("disabled") == "disabled"


def test_a_mistake_is_one_line_and_status_2(config_file, capsys):
    assert main([str(config_file), "train.stepz=3"]) == 2
    assert capsys.readouterr().err.strip().startswith("launch/train.py: error: train.stepz: unknown key; did you mean")
