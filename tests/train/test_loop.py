"""The small parts of a run: learning rate, parameter groups, what must fit together, tracking, the command's errors;
and the effects of a loss that is not finite."""

import gc
import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter

from longdraft.data_prep.shards import Row, ShardSet
from longdraft.models.draft_folder import read_info
from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import load_target
from longdraft.models.passes import Pass
from longdraft.train import checkpoint
from longdraft.train.batches import step_rows
from longdraft.train.config import DTYPES, OptimizerSection
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import parameter_groups
from longdraft.train.export import export
from longdraft.train.loop import gains, train
from longdraft.train.methods.build import open_method
from longdraft.train.ranks import TrainingError
from longdraft.train.setup import open_rows
from longdraft.train.step import learning_rate
from longdraft.train.teacher import Teacher
from longdraft.train.tracking import Tracker, _flat, read_metrics, wandb_mode


def test_learning_rate_is_a_function_of_the_step():
    optimizer = OptimizerSection(peak_lr=1.0, warmup_steps=4)
    rates = [learning_rate(step, 12, optimizer) for step in range(12)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5) and 0 < rates[11] < 0.05
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(0, 12, OptimizerSection(peak_lr=1.0, warmup_steps=0)) == 1.0


def test_norms_do_not_decay():
    linear = TokenSwift(TokenSwiftConfig(8, 1e-5))
    decayed, others = parameter_groups(linear, 0.1)
    assert decayed["weight_decay"] == 0.1 and [p.ndim for p in decayed["params"]] == [2] * 3
    assert others["weight_decay"] == 0.0 and [p.ndim for p in others["params"]] == [1] * 6
    (only,) = parameter_groups(TokenSwift(TokenSwiftConfig(8, 1e-5, kind="silu_chain")), 0.1)
    assert only["weight_decay"] == 0.1 and len(only["params"]) == 3


def test_teacher_sees_each_piece_alone_and_gives_its_own_choices(target):
    tokens_N = torch.randint(97, (31,), generator=torch.Generator().manual_seed(0))
    borders, teacher = [0, 11, 12, 31], Teacher(target.model)
    needs = {"pre_norm", "post_norm", "last_kv"}
    seen = teacher.forward(tokens_N, borders, None, needs)
    assert seen.logits is None and not seen.pre_norm.requires_grad
    for start, stop in pairwise(borders):
        alone = target.model(Pass(tokens_N[None, start:stop], needs=needs | {"logits"}))
        for field in ("pre_norm", "post_norm"):
            torch.testing.assert_close(getattr(seen, field)[start:stop], getattr(alone, field)[0], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(seen.last_kv, alone.last_kv, strict=True):
            torch.testing.assert_close(ours[start:stop], theirs[0], rtol=1e-5, atol=1e-5)
        choices, totals = teacher.choices(seen.post_norm[start:stop])
        assert torch.equal(choices, alone.logits[0].argmax(-1))
        torch.testing.assert_close(totals, alone.logits[0].logsumexp(-1))
    assert [found.shape for found in teacher.choices(seen.post_norm[:0])] == [(0,), (0,)]
    only = teacher.forward(tokens_N, borders, None, {"last_kv"})
    assert only.pre_norm is None and only.post_norm is None


def test_what_training_brought_is_told_where_it_began_with_a_draft():
    before = {"step": 0, "heldout_choice_rates": [[0.2, 0.1], [0.1, 0.1]], "heldout_overlaps": [0.25, 0.125, None]}
    middle = {"step": 5, "heldout_choice_rates": [[0.9, 0.1], [0.9, 0.1]], "heldout_overlaps": [0.9, 0.9]}
    after = {"step": 9, "heldout_choice_rates": [[0.15, 0.4], [0.2, 0.1]], "heldout_overlaps": [0.2, 0.125, None]}
    decoded = [{"step": step, "decode_tokens_per_step": tokens} for step, tokens in ((0, 1.5), (9, 1.75))]
    told = "target's choice 0.150 -> 0.175; overlap 0.188 -> 0.163"
    assert gains([before, middle, after]) == told
    assert gains([before, decoded[0], middle, after, decoded[1]]) == f"{told}; tokens/step 1.500 -> 1.750"
    assert gains([before, decoded[0], middle, after]) == told, "the last decoding was stopped"
    assert gains([middle, after, decoded[1]]) == gains([]) == ""


LEFT_OUT = {"documents": 40, "bad": {"empty": 50}, "dropped": {"shorter_than_seq_len": 10, "beyond_max_tokens": 900}}


@pytest.mark.parametrize(("manifest", "overrides", "said"), [
    ({}, ["data.seq_len=32"], r"^data\.seq_len: 32, .* 24 "),
    ({}, ["data.positions=anchor_offset", "data.max_position=30000"], r"^data\.max_position: 30000; .* 2048 "),
    ({"tokenizer_sha256": "abc"}, [], r"^data\.path: .* abc"),
    ({"supervised_tokens": 0}, [], r"^data\.path: .*/train .*\(45\)"),
    ({"shards": []}, [], r"^data\.path: .*/train .*\(0\).* --heldout-share"),
    (LEFT_OUT, [], r"^data\.max_dropped_share: 0\.5, .*60%.*\(empty: 50, shorter_than_seq_len: 10\)"),
    (LEFT_OUT, ["data.max_dropped_share=0.6"], None),
    ({"supervised_tokens": 9, "documents": 5}, ["data.max_dropped_share=0"], None),
])  # fmt: skip
def test_data_must_fit_config_and_target(config_file, target, data_folder, tmp_path, manifest, overrides, said):
    shutil.copytree(data_folder, tmp_path / "data")
    file = tmp_path / "data" / "train" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | manifest))
    config = load_config(config_file, [f"data.path={tmp_path / 'data'}", *overrides])
    if said is None:
        assert len(open_rows(config.data, "train", target)) == 45
        return
    with pytest.raises(ValueError, match=said):
        open_rows(config.data, "train", target)


def test_ids_outside_of_the_vocabulary_are_refused(data_folder):
    rows = ShardSet(data_folder / "train")
    rows.verify(vocab_size=97)
    with pytest.raises(ValueError, match=r"shard-00000\.arrow holds token ids from 0 to 96, outside .* 96"):
        rows.verify(vocab_size=96)


def test_wandb_offline_keeps_its_run_and_forgets_what_a_kill_left(config_file, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(config_file, [f"train.run_dir={tmp_path}", "log.wandb=offline"])
    tracker = Tracker(config, ["head1", "head2"])
    for step in (1, 2, 3):
        tracker.write({"step": step, "loss": 1.0 / step, "top1": [0.1, 0.2], "rates": [[0.1, 0.2], [0.3, 0.4]]})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('7\n[]\n{"step": null}\n{"step": 4, "lo')  # damage, and what a kill leaves
    again = Tracker(config, ["head1", "head2"], resume_step=2, wandb_id=tracker.wandb_id)
    again.write({"step": 3, "loss": 0.5})
    again.close()
    assert tracker.wandb_id is not None and again.wandb_id == tracker.wandb_id
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 0.5)]
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert folders and all(tracker.wandb_id in name for name in folders)  # W&B numbers folders of the same second


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


TROUBLE = {
    "NETRC": "machine api.wandb.ai\n  login user\n  password abc\n", "WANDB_MODE": "foo",
    "WANDB_BASE_URL": "wandb.local", "WANDB_API_KEY": "no-key",
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLE)
def test_no_trouble_with_wandb_ends_a_training(config_file, monkeypatch, tmp_path, capsys, name):
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_INIT_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "netrc").write_text(TROUBLE[name] if name == "NETRC" else "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    if name != "NETRC":
        monkeypatch.setenv(name, TROUBLE[name])
    tracker = Tracker(load_config(config_file, [f"train.run_dir={tmp_path}", "log.wandb=auto"]), ["head1"])
    tracker.write({"step": 1, "loss": 1.0})
    tracker.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}]
    assert "no-key" not in capsys.readouterr().out


def kept_bytes():
    """Bytes of all tensors that are alive."""
    gc.collect()
    storages = [tensor.untyped_storage() for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("stage", "precision"), [(2, "fp32"), (3, "bf16")])
def test_a_finished_run_lets_go_of_its_memory(alone, config_file, target_folder, tmp_path, stage, precision):
    """The next stage of a curriculum runs in the same process. The fp32 weights may stay; gradients and AdamW's state
    would be several times as much."""
    run = [*LONGSPEC, "train.steps=2", "optimizer.warmup_steps=1", f"train.zero_stage={stage}"]
    used = load_target(target_folder, DTYPES[precision])
    before = kept_bytes()
    train(load_config(config_file, [*run, f"train.precision={precision}", f"train.run_dir={tmp_path}"]), alone, used)
    n_weights = sum(weight.numel() for weight in weights(tmp_path).values())
    assert kept_bytes() - before <= 4.1 * n_weights


def test_a_target_that_changed_under_a_run_is_named(alone, config_file, target_folder, tmp_path):
    """Its configuration is the same, but one weight of its last layer has changed."""
    steps = ["train.steps=2", "optimizer.warmup_steps=1", "train.save_every=1"]
    config = load_config(config_file, [*steps, f"train.run_dir={tmp_path}"])
    assert train(config, alone, load_target(target_folder, torch.float32))
    shutil.rmtree(checkpoint.checkpoint_folder(tmp_path) / "step_000002")
    own, other = (load_target(target_folder, torch.float32) for _ in range(2))
    other.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1
    with pytest.raises(ValueError, match=r"^target\.path: "):
        train(config, alone, other)
    assert train(config, alone, own)


LONGSPEC = ["draft.method=longspec", "draft.window=6", "draft.noise=3"]
POISON = 96  # a token whose embedding is NaN


@pytest.fixture(scope="module")
def poisoned(target_folder):
    """A target that gives NaN for one token."""
    broken = load_target(target_folder, torch.float32)
    broken.model.embed_tokens.weight.data[POISON] = torch.nan
    return broken


@pytest.fixture
def rows(prepare, tmp_path):
    """(name, rows, poisoned row or None, row without labels or None) -> a prepared folder of rows of one piece."""

    def make(name, n_rows, bad=None, mute=None):
        generator = np.random.Philox(key=np.array([4, 4], dtype=np.uint64))
        written = []
        for i in range(n_rows):
            tokens = (generator.random_raw(24) % POISON).astype(np.int32)
            if i == bad:
                tokens[13] = POISON
            written.append(Row(tokens, [0, 24], [] if i == mute else [1, 24], [f"document {i}"], [0]))
        prepare(tmp_path / name / "train", 24, written)
        prepare(tmp_path / name / "heldout", 24, [written[0]])
        return f"data.path={tmp_path / name}"

    return make


# One step over all four rows, each in its own pass, whose result does not depend on the norm of the gradient.
ONE_STEP = [
    "train.steps=1", "train.global_batch=4", "train.micro_batch=1", "optimizer.warmup_steps=0", "optimizer.clip=1e9",
    "optimizer.eps=1e-30",
]  # fmt: skip


def weights(run):
    found = checkpoint.newest(run)
    assert found is not None
    return load_file(found[0] / checkpoint.WEIGHTS)


@pytest.mark.parametrize("draft", [[], LONGSPEC], ids=["tokenswift", "longspec"])
def test_rows_without_labels_have_no_loss(alone, config_file, target, rows, tmp_path, draft):
    """Of four steps one reads the row without labels, and so does every validation; what follows does without."""
    run, steps = tmp_path / "run", ["train.steps=4", "train.global_batch=1", "train.micro_batch=1", "heldout.every=2"]
    given = [*draft, *steps, "optimizer.warmup_steps=1", rows("mute", 4, mute=0), f"train.run_dir={run}"]
    assert train(load_config(config_file, given), alone, target)
    records = read_metrics(run)
    stepped = [record for record in records if "loss" in record]
    (without,) = [record for record in stepped if record["loss"] is None]
    assert [without[key] for key in ("part_loss", "top1", "top3")] == [[None] * 3] * 3
    assert all(record["loss"] > 0 and record["top3"] != [None] * 3 for record in stepped if record is not without)
    validations = [record for record in records if "heldout_loss" in record]
    of_parts = {"heldout_part_loss": [None] * 3, "heldout_overlaps": [None] * 3}
    rates = {"heldout_rank_rates": None, "heldout_choice_rates": None}
    nothing = {"heldout_loss": None, "heldout_positions": 0} | of_parts | rates
    assert all(one.pop("heldout_s") > 0 for one in validations)
    assert validations == [{"step": step} | nothing for step in (2, 4)]
    assert _flat(validations[0], ["a", "b", "c"]) == {"step": 2, "heldout_positions": 0}
    info = read_info(export(run, target=target, card=True))
    assert info.tree["choice_rates"] is None and info.tree["levels"]
    assert "cross-entropy" not in (run / "draft" / "README.md").read_text()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("draft", [[], LONGSPEC], ids=["tokenswift", "longspec"])
def test_a_row_without_a_number_is_a_row_without_labels(
    alone, config_file, target, poisoned, rows, tmp_path, capsys, draft, stage
):
    records = []
    cases = {"poisoned": (poisoned, rows("bad", 4, bad=2)), "mute": (target, rows("mute", 4, mute=2))}
    for name, (used, data) in cases.items():
        run = [f"train.run_dir={tmp_path / name}-run", data, f"train.zero_stage={stage}"]
        train(load_config(config_file, [*draft, *ONE_STEP, *run]), alone, used)
        records.append(read_metrics(tmp_path / f"{name}-run")[0])
    said = [line for line in capsys.readouterr().out.splitlines() if "is not finite" in line]
    assert said == ["The loss of step 1 is not finite for rows 2 (epoch 0)"]
    assert [record["skipped"] for record in records] == [1, 0]
    # The row's labels still count in the step's mean.
    assert records[0]["grad_norm"] * 4 / 3 == pytest.approx(records[1]["grad_norm"], rel=1e-5)
    found, expected = (weights(tmp_path / f"{name}-run") for name in cases)
    config = load_config(config_file, draft)
    start = open_method(config.draft, config.data, config.train, target.model).draft.state_dict()
    for key, weight in expected.items():
        assert torch.isfinite(found[key]).all()
        assert torch.equal(weight, start[key]) or (found[key] != start[key]).any(), key
        torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-6)


def test_too_many_rows_without_a_number_stop_the_run(alone, config_file, poisoned, rows, tmp_path, capsys):
    """What was saved is good, and with a higher limit the run goes on to what it would have come to at once."""
    run = [rows("bad", 12, bad=5), "train.steps=6", "train.global_batch=4", "train.save_every=1", "heldout.every=6"]
    strict, patient = (load_config(config_file, [*run, f"train.run_dir={tmp_path / n}"]) for n in ("strict", "patient"))
    strict_1 = load_config(config_file, [*run, f"train.run_dir={tmp_path / 'strict'}", "train.max_skipped=1"])
    # Once an epoch.
    first, second = (step for step in range(6) if any(place.row == 5 for place in step_rows(0, step, 12, 4)))
    assert train(patient, alone, poisoned)
    capsys.readouterr()
    with pytest.raises(TrainingError, match=rf"step {second + 1}: losses or gradients that were not finite: 2, more "
                       r"than train\.max_skipped = 1; "):  # fmt: skip
        train(strict_1, alone, poisoned)
    said = [line for line in capsys.readouterr().out.splitlines() if "is not finite" in line]
    assert len(said) == 2
    assert f"The loss of step {first + 1} is not finite for rows " in said[0] and "(epoch 0)" in said[0]
    assert f"The loss of step {second + 1} is not finite for rows " in said[1] and "5 (epoch 1)" in said[1]
    new = ["train.max_skipped=0", "train.save_every=6", f"train.run_dir={tmp_path / 'new'}"]
    new += ["log.every=6", f"heldout.every={first + 1}"]
    with pytest.raises(TrainingError, match=r"train\.max_skipped = 0; "):
        train(load_config(config_file, [*run, *new]), alone, poisoned)
    assert not [record for record in read_metrics(tmp_path / "new") if record["step"] > first]
    found = checkpoint.newest(tmp_path / "strict")
    assert found is not None and found[1]["step"] == second and found[1]["extra"]["skipped"] == 1
    assert all(torch.isfinite(weight).all() for weight in weights(tmp_path / "strict").values())
    assert train(strict, alone, poisoned)
    ours, theirs = weights(tmp_path / "strict"), weights(tmp_path / "patient")
    assert all(torch.equal(ours[key], weight) for key, weight in theirs.items())
    losses = [
        [(r["step"], r["loss"], r["skipped"]) for r in read_metrics(tmp_path / name) if "loss" in r]
        for name in ("strict", "patient")
    ]
    assert losses[0] == losses[1] and losses[0][-1][-1] == 2


def test_a_number_missing_where_nothing_is_learned_counts_too(alone, config_file, poisoned, rows, tmp_path, capsys):
    """The row has no labels, so its loss is a number although its states are NaN; no weight becomes NaN."""
    run = [f"train.run_dir={tmp_path}/run", rows("both", 4, bad=2, mute=2), *LONGSPEC]
    train(load_config(config_file, [*run, *ONE_STEP]), alone, poisoned)
    assert "is not finite" in capsys.readouterr().out
    assert read_metrics(tmp_path / "run")[0]["skipped"] == 1
    assert all(torch.isfinite(weight).all() for weight in weights(tmp_path / "run").values())
