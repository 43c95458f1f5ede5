"""Stages of one file: each begins with the weights of the one before, wherever it was interrupted."""

import json
import re
import shutil
import signal
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longdraft.data_prep.shards import ShardSet
from longdraft.models.draft_folder import load_draft
from longdraft.train import loop, setup
from longdraft.train.config_file import load_config, load_stages
from longdraft.train.export import export
from longdraft.train.loop import train_stages
from longdraft.train.methods.build import frequent_tokens
from longdraft.train.ranks import join_ranks, leave_ranks
from longdraft.train.setup import open_target
from longdraft.train.tracking import read_metrics

TEXT = """
target: {{path: {target}}}
draft: {{method: longspec, window: 6, noise: 3, final_norm: true, draft_vocab_size: 80}}
train: {{run_dir: {run_dir}, global_batch: 4, micro_batch: 2, precision: fp32, zero_stage: 1, save_every: 4}}
optimizer: {{peak_lr: 5e-3, warmup_share: 0.25}}
heldout: {{every: 50, rows: 2, choices: 8}}
log: {{wandb: disabled}}
stages:
  short:
    data: {{path: {short}, seq_len: 24, positions: anchor_offset, max_position: 100}}
    train: {{steps: 6}}
  long:
    data: {{path: {long}, seq_len: 312, query_share: 0.5}}
    train: {{steps: 20, global_batch: 2, micro_batch: 1, zero_stage: 3}}
    optimizer: {{peak_lr: 1e-3}}
"""

TIMES = ("step", "decode_s", "heldout_s")


@pytest.fixture(scope="module")
def staged(tmp_path_factory, target_folder, data_folder, long_folder) -> Path:
    """A file with two stages."""
    folder = tmp_path_factory.mktemp("staged")
    places = {"target": target_folder, "short": data_folder, "long": long_folder, "run_dir": folder / "run"}
    (folder / "staged.yaml").write_text(TEXT.format(**places))
    return folder / "staged.yaml"


@pytest.fixture(scope="module")
def unbroken(staged, train_command) -> tuple[Path, str]:
    """The folder of a curriculum that ran without a break, and what it printed."""
    status, printed = train_command(staged)
    assert status == 0, printed
    return staged.parent / "run", printed


def drafts(run: Path) -> dict[str, bytes]:
    return {name: (run / name / "draft" / "model.safetensors").read_bytes() for name in ("1-short", "2-long")}


def test_each_stage_is_the_file_with_its_own_on_top(staged):
    short, long = load_stages(staged)
    assert (short.name, long.name) == ("short", "long")
    run = staged.parent / "run"
    assert [stage.config.train.run_dir for stage in (short, long)] == [f"{run}/1-short", f"{run}/2-long"]
    assert short.draft == run / "1-short" / "draft"
    assert [stage.config.draft.start_from for stage in (short, long)] == [None, f"{run}/1-short/draft"]
    shapes = [(s.config.train.zero_stage, s.config.train.global_batch, s.config.train.steps) for s in (short, long)]
    assert shapes == [(1, 4, 6), (3, 2, 20)]
    assert [stage.config.optimizer.peak_lr for stage in (short, long)] == [5e-3, 1e-3]
    assert [stage.config.data.positions for stage in (short, long)] == ["anchor_offset", "plain"]
    assert [stage.config.data.query_share for stage in (short, long)] == [1.0, 0.5]
    assert all(stage.config.optimizer.warmup_share == 0.25 for stage in (short, long))


def test_overrides_are_for_all_stages_or_for_one(staged):
    overrides = ["train.seed=3", "stages.long.optimizer.peak_lr=0.25", "train.run_dir=elsewhere", "train.save_every=9"]
    short, long = load_stages(staged, [*overrides, "stages.short.train.save_every=2"])
    assert [stage.config.train.seed for stage in (short, long)] == [3, 3]
    assert [stage.config.optimizer.peak_lr for stage in (short, long)] == [5e-3, 0.25]
    assert [stage.config.train.run_dir for stage in (short, long)] == ["elsewhere/1-short", "elsewhere/2-long"]
    assert long.config.draft.start_from == "elsewhere/1-short/draft"
    (short, long), epochs = load_stages(staged, ["stages.long.train.epochs=2"]), [None, 2]
    assert [stage.config.train.epochs for stage in (short, long)] == epochs and long.config.train.steps is None
    # One for a stage holds before one for all, and of two others the later.
    short, long = load_stages(staged, ["stages.short.train.save_every=2", "train.save_every=8", "train.save_every=9"])
    assert [stage.config.train.save_every for stage in (short, long)] == [2, 9]
    (long,) = load_stages(staged, [], "long")
    assert long.config.draft.start_from == f"{staged.parent}/run/1-short/draft"
    (long,) = load_stages(staged, [], "long", "a/draft")
    assert long.config.draft.start_from == "a/draft" and long.config.train.run_dir.endswith("/2-long")
    short, long = load_stages(staged, [], None, "a/draft")
    assert short.config.draft.start_from == "a/draft" and long.config.draft.start_from.endswith("/1-short/draft")
    (long,) = load_stages(staged, ["draft.start_from=b/draft"], "long")
    assert long.config.draft.start_from.endswith("/1-short/draft")  # the first stage's alone


def test_a_file_without_stages_is_a_run_of_its_own(config_file):
    (only,) = load_stages(config_file, ["train.steps=7"])
    assert only.name is None and only.config == load_config(config_file, ["train.steps=7"])
    (only,) = load_stages(config_file, [], None, "a/draft")
    assert only.config.draft.start_from == "a/draft"


MISTAKES = {
    "--num-gpus 2": "--num-gpus: ",  # for `longdraft train`
    "--tflops 5": "--tflops: ",
    "--stage lung": r"stages\.lung: .*short, long",
    "stages.shirt.train.steps=3": r"stages\.shirt: ",
    "stages.long": r"override: 'stages\.long' ",
    "stages.long=3": r"stages\.long: ",
    "stages.long.data.path=${nope}": r"stages\.long: data\.path: .*'nope'",
    "train.zero_stage=4": r"stages\.short: train\.zero_stage: ",
    "stages.long.train.device=cuda": r"stages\.long: train\.device: ",
    "--stage long": r"stages\.long: draft: .*1-short/draft ",
    "--from-draft nowhere": r"stages\.short: draft: nowhere ",
    "--from-draft smollm2-135m-tokenswift": r"stages\.short: draft: .* was trained for smollm2-135m,",
    "data.path=nowhere": r"stages\.short: nowhere/train/manifest\.json: ",
    "stages.long.draft.window=5": r"stages\.long: draft\.start_from: .*1-short/draft holds .*window=6.* window=5",
    "target.loader=transformers stages.long.draft.warm_start=true": r"stages\.long: draft\.warm_start: True ",
    "target.loader=transformers stages.long.data.seq_len=100": r"stages\.long: data\.seq_len: 100, ",
    "stages.long.data.seq_len=100": r"stages\.long: data\.seq_len: 100, ",
    "stages.long.train.epochs=0.1": r"stages\.long: train\.epochs: ",
    "draft.draft_vocab_size=98": r"stages\.short: draft\.draft_vocab_size: 98; ",
    "train.sequence_parallel=2": r"stages\.short: train\.sequence_parallel: 2; give a divisor of 1, ",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_named(staged, train_command, monkeypatch, tmp_path, arguments):
    """Before the target is loaded."""
    monkeypatch.setattr(setup, "whole_target", None)
    status, printed = train_command(staged, *arguments.split(), f"train.run_dir={tmp_path / 'run'}")
    assert status == 2
    (line,) = [line for line in printed.splitlines() if "error: " in line]
    assert re.match(f"launch/train.py: error: {MISTAKES[arguments]}", line), line
    assert not list(tmp_path.glob("run/*/checkpoints"))


@pytest.mark.parametrize("stages", ["3", "[short, long]", "{}", "{short: }", "{short: {train: [{steps: 6}]}}"])
def test_stages_that_are_none_are_refused(staged, tmp_path, stages):
    text = staged.read_text().split("stages:")[0]
    (tmp_path / "bad.yaml").write_text(f"{text}stages: {stages}\n")
    with pytest.raises(ValueError, match=r"^stages(\.short)?: "):
        load_stages(tmp_path / "bad.yaml")
    (tmp_path / "none.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"^stages\.long: .*none\.yaml "):
        load_stages(tmp_path / "none.yaml", [], "long")


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "..", "", "a\\0b"])
def test_a_stages_name_becomes_a_folders_and_no_other(staged, train_command, tmp_path, name):
    (tmp_path / "bad.yaml").write_text(staged.read_text().replace("  long:\n", f'  "{name}":\n'))
    status, printed = train_command(tmp_path / "bad.yaml", f"train.run_dir={tmp_path / 'run' / 'inner'}")
    assert status == 2 and "error: stages." in printed and printed.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_what_is_done_is_passed_over(unbroken, staged, train_command):
    run, _ = unbroken
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    status, printed = train_command(staged)
    assert status == 0 and "Training" not in printed
    assert [line for line in printed.splitlines() if line.startswith("Stage")] == [
        "Stage short, 1 of 2: done",
        "Stage long, 2 of 2: done",
    ]
    for changed, said in {  # these would give another draft
        "optimizer.weight_decay=7": "optimizer.weight_decay: 7", "train.steps=7": "train.steps: 7",
        "draft.draft_vocab_size=null": "draft.draft_vocab_size: None",
        "train.level_weights=[1,1,0]": "train.level_weights: [",
        "optimizer.warmup_share=0.5": "optimizer.warmup_steps: 3",
    }.items():  # fmt: skip
        status, printed = train_command(staged, f"stages.short.{changed}")
        assert status == 2 and f"error: stages.short: {said}" in printed
    status, printed = train_command(staged, "log.every=7", "stages.long.train.epochs=3")
    assert status == 0 and "Training" not in printed
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == files


def test_a_stage_that_is_exported_half_way_is_trained_on(unbroken, staged, train_command, tmp_path):
    """It was stopped and exported to be tried. It ends with the draft that it would have ended with."""
    run = shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(run / "1-short" / "checkpoints" / "step_000006")
    export(run / "1-short")
    status, printed = train_command(staged, f"train.run_dir={run}", f"stages.short.data.path={tmp_path / 'gone'}")
    assert status == 2 and f"{tmp_path / 'gone'}" in printed  # without its rows it is not done either
    status, printed = train_command(staged, f"train.run_dir={run}")
    assert status == 0, printed
    said = [line.split(" of " + str(run))[0] for line in printed.splitlines() if line.startswith(("Stage", "Exported"))]
    assert said == [
        "Stage short, 1 of 2",
        "Exported step 6",
        "Stage long, 2 of 2: done",
    ]
    assert drafts(run) == drafts(unbroken[0])
    status, printed = train_command(staged, f"train.run_dir={run}", f"stages.short.data.path={tmp_path / 'gone'}")
    assert status == 0 and "Training" not in printed  # a finished stage needs no rows


def test_a_converted_draft_stands_for_a_finished_stage(unbroken, staged, train_command, tmp_path):
    """`longdraft convert` knows neither steps nor a run of ours."""
    run = shutil.copytree(unbroken[0], tmp_path / "run")
    shutil.rmtree(run / "1-short" / "checkpoints")
    config = run / "1-short" / "draft" / "config.json"
    about = json.loads(config.read_text()) | {"step": None, "train_config": {"converted_from": "authors/draft"}}
    config.write_text(json.dumps(about))
    status, printed = train_command(staged, f"train.run_dir={run}", f"stages.short.data.path={tmp_path / 'gone'}")
    assert status == 0 and "Training" not in printed, printed


def test_a_curriculum_that_moved_goes_on(unbroken, staged, train_command, tmp_path):
    """And so does one whose folder is spelt differently."""
    run, _ = unbroken
    shutil.copytree(run, tmp_path / "moved")
    (tmp_path / "moved" / "2-long" / "draft" / "model.safetensors").unlink()  # as a kill may leave it
    for folder in (tmp_path / "moved", run.parent / ".." / run.parent.name / run.name):
        status, printed = train_command(staged, f"train.run_dir={folder}")
        assert status == 0, printed
        assert ("Training is done already: 20 steps" in printed) == (folder == tmp_path / "moved")
    assert drafts(tmp_path / "moved") == drafts(run)


def test_weights_and_vocabulary_are_handed_on(unbroken, staged, train_command, losses, no_launcher, tmp_path):
    """At a rate too small to move a weight, the second stage ends with what it began with, which is measured before any
    step, anew where that was stopped, and again at its end. Its first loss, computed before any step, is that of the
    stage that followed the first."""
    run, _ = unbroken
    first, second = (load_draft(run / name / "draft") for name in ("1-short", "2-long"))
    assert torch.equal(first.token_ids, second.token_ids)
    changed = [key for key, w in first.state_dict().items() if not torch.equal(w, second.state_dict()[key])]
    assert len(changed) == len(list(first.parameters()))
    still = ["stages.long.optimizer.peak_lr=1e-30", "stages.long.train.steps=2", f"train.run_dir={tmp_path}/run"]
    still += ["decoding={every: 9, prompts: 1, contexts: [5], new_tokens: 4}"]
    draft, ranks = run / "1-short" / "draft", join_ranks()
    train_stages(load_stages(staged, still, "long", str(draft)), ranks, [signal.SIGTERM])
    leave_ranks(ranks)
    assert not any("decode_s" in record for record in read_metrics(tmp_path / "run" / "2-long"))
    status, printed = train_command(staged, *still, "--stage", "long", "--from-draft", draft)
    assert status == 0, printed
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2-long"]
    found = load_file(tmp_path / "run" / "2-long" / "draft" / "model.safetensors")
    expected = load_file(draft / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], weight) for key, weight in expected.items())
    assert losses(tmp_path / "run" / "2-long")[0] == losses(run / "2-long")[0]
    records = read_metrics(tmp_path / "run" / "2-long")
    assert [record["step"] for record in records] == [0, 0, 1, 2, 2, 2, 2]
    (held, tokens), (held_again, tokens_again) = (
        [{key: value for key, value in one.items() if key not in TIMES} for one in pair]
        for pair in (records[:2], records[4:6])
    )
    assert held == held_again and tokens == tokens_again and "heldout_overlaps" in held and tokens
    assert f"Held out, from {draft} to step 2: target's choice " in printed


def test_a_wish_to_stop_ends_the_curriculum_too(staged, no_launcher, tmp_path, capsys):
    """There is a signal before the first step: the second stage does not begin."""
    ranks = join_ranks()
    overrides = [f"train.run_dir={tmp_path / 'run'}", f"stages.long.data.path={tmp_path / 'later'}"]
    train_stages(load_stages(staged, overrides), ranks, [signal.SIGTERM])
    leave_ranks(ranks)
    printed = capsys.readouterr().out
    assert "Stopped after 0 of 6 steps" in printed and f"{tmp_path / 'later'} is not prepared yet" in printed
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1-short"]
    assert not (tmp_path / "run" / "1-short" / "draft").exists()


def test_a_target_is_freed_before_another_is_loaded(staged, no_launcher, monkeypatch, tmp_path):
    """The first stage has a whole one, the second its share of one, with which it also exports."""
    seen = list[weakref.ref]()

    def opened(config, ranks):
        assert not any(model() for model in seen)
        target = open_target(config, ranks)
        seen.append(weakref.ref(target.model))
        return target

    monkeypatch.setattr(loop, "open_target", opened)
    ranks = join_ranks()
    sharded = ["stages.long.target.zero_stage=3", "train.steps=1", "stages.long.train.steps=1"]
    stages = load_stages(staged, [*sharded, f"train.run_dir={tmp_path}"])
    train_stages(stages, ranks)
    leave_ranks(ranks)
    assert len(seen) == 2 and all((stage.draft / "model.safetensors").is_file() for stage in stages)


def test_a_smaller_vocabulary_is_that_of_its_own_rows(unbroken, staged, train_command, tmp_path):
    still = ["stages.long.optimizer.peak_lr=1e-30", "stages.long.train.steps=2", f"train.run_dir={tmp_path}"]
    draft, smaller = unbroken[0] / "1-short" / "draft", "draft.draft_vocab_size=70"
    status, printed = train_command(staged, *still, smaller, "--stage", "long", "--from-draft", draft)
    assert status == 0, printed
    before, after = (load_draft(folder).state_dict() for folder in (draft, tmp_path / "2-long" / "draft"))
    rows = ShardSet(load_config(tmp_path / "2-long" / "config.yaml").data.path + "/train")
    assert torch.equal(after.pop("token_ids"), frequent_tokens(rows, 97, 70, [2]))
    assert len(before.pop("token_ids")) == 80 and before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


OTHERS = {"draft.window=5": "window=5", "draft={method: medusa}": "MedusaConfig("}


@pytest.mark.parametrize("override", OTHERS)
def test_another_shape_or_method_is_refused(
    unbroken, staged, config_file, train_command, tmp_path, monkeypatch, override
):
    monkeypatch.setattr(setup, "whole_target", None)
    draft = unbroken[0] / "1-short" / "draft"
    file = config_file if "method" in override else staged
    status, printed = train_command(file, override, f"train.run_dir={tmp_path}", "--from-draft", draft)
    assert status == 2
    (line,) = [line for line in printed.splitlines() if "error: " in line]
    assert f"draft.start_from: {draft} holds LongSpecConfig(" in line and "noise=3" in line
    assert OTHERS[override] in line.split("but this run trains")[1]
