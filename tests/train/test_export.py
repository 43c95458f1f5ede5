"""Any checkpoint, sharded ones too, becomes a folder that holds exactly the trained draft, and that can be served."""

import json
import os
import pickle
import resource
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.drafters.build import build_drafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch.export import main
from longdraft.models.draft_folder import CONFIG, DRAFTS, WEIGHTS, load_draft, read_info
from longdraft.models.files import file_digest
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import LOADERS, load_target
from longdraft.models.passes import Pass
from longdraft.train import checkpoint
from longdraft.train.config import DTYPES, config_from_dict, to_dict
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import MASTER
from longdraft.train.export import export
from longdraft.train.tracking import read_metrics
from longdraft.train.vocabulary import frequent_tokens

CASES = ["fp32-2-1", "fp32-2-3", "bf16-2-2", "bf16-2-3", "silu_chain"]
BLOCK = {"method": "longspec", "window": 6, "noise": 3}
SECTIONS = {
    "linear_chain": {"method": "tokenswift"},
    "silu_chain": {"method": "tokenswift", "kind": "silu_chain"},
    "medusa": {"method": "medusa", "n_heads": 2},
    "silu_narrow": {"method": "tokenswift", "kind": "silu_chain", "draft_vocab_size": 20},
    "longspec": BLOCK,
    "longspec-narrow": BLOCK | {"noise": 7, "final_norm": True, "draft_vocab_size": 20},
}


@pytest.fixture
def made_run(config_file, tmp_path):
    """(name of SECTIONS, precision) -> a run's folder with one checkpoint of random weights, far from the initial
    ones."""

    def make(name, precision="fp32", damage=None):
        values = to_dict(load_config(config_file, [f"train.run_dir={tmp_path}/run", f"train.precision={precision}"]))
        config = config_from_dict(values | {"draft": SECTIONS[name]})
        target = load_target(config.target.path, DTYPES[precision])
        draft = DRAFTS[config.draft.method][1](config.draft.network(target.model.config))
        generator = torch.Generator().manual_seed(3)
        for key, parameter in draft.named_parameters():
            parameter.data.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
        if "draft_vocab_size" in SECTIONS[name]:
            draft.token_ids = torch.randperm(97, generator=generator)[:20]
        if damage is not None:
            damage(draft)
        folder = checkpoint.checkpoint_folder(tmp_path / "run") / "step_000007"
        folder.mkdir(parents=True)
        save_file(draft.to(DTYPES[precision]).state_dict(), folder / checkpoint.WEIGHTS)
        content = {"step": 7, "world_size": 1, "config": to_dict(config), "extra": {"skipped": 0, "wandb_id": None}}
        content["extra"] |= {"heldout": {"rank_rates": [[0.5]]}, "data": {}}
        files = {checkpoint.WEIGHTS: (folder / checkpoint.WEIGHTS).stat().st_size}
        digests = {checkpoint.WEIGHTS: file_digest(folder / checkpoint.WEIGHTS)}
        (folder / checkpoint.STATE).write_text(checkpoint.seal(content | {"files": files}, digests))
        return tmp_path / "run", target, draft

    return make


@pytest.mark.parametrize("name", CASES)
def test_export_is_the_trained_draft(runs, tmp_path, name):
    out = export(runs / name, tmp_path / "draft")
    assert out == tmp_path / "draft"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    found = checkpoint.newest(runs / name)
    assert found is not None
    saved = checkpoint.SavedShares(*found)  # what the optimizer moved, on each rank its part
    exported = load_draft(out).state_dict()
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    for key, weight in exported.items():
        master = saved.read(key, MASTER, 0, weight.numel())
        assert weight.dtype == dtype and torch.equal(weight.flatten(), master.to(dtype)), key


def test_config_json_tells_how_it_was_made(runs, tmp_path):
    info = read_info(export(runs / "fp32-2-1", tmp_path / "draft"))
    assert info.train_length == 24 and info.noise is None
    assert info.train_config["train"]["global_batch"] == 8 and info.train_config["optimizer"]["peak_lr"] == 5e-3
    assert info.tree["levels"] == [3, 3, 3]
    heldout = [record for record in read_metrics(runs / "fp32-2-1") if "heldout_loss" in record]
    for rates in ("rank_rates", "choice_rates"):
        assert info.tree[rates] == heldout[-1][f"heldout_{rates}"]
    assert set(info.versions) == {"longdraft", "torch", "transformers", "deepspeed", "safetensors"}


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_else_may_read_an_export_is_the_umasks_to_say(made_run, umask):
    run, target, _ = made_run("medusa")
    before = os.umask(umask)
    try:
        out = export(run, run / "new" / "draft", target=target)
    finally:
        os.umask(before)
    for folder in (out, run / "new"):
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    for path in (out / CONFIG, out / WEIGHTS):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path


def test_who_else_may_read_a_run_is_the_umasks_to_say(runs):
    umask = os.umask(0o077)
    os.umask(umask)
    paths = list((runs / "bf16-2-2").rglob("*"))
    assert {"draft.safetensors", "state.json", "config.yaml", "metrics.jsonl"} <= {path.name for path in paths}
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_exports_are_read_without_unpickling(runs, tmp_path, monkeypatch):
    out = export(runs / "bf16-1-3", tmp_path / "draft")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *given, **named: pytest.fail("unpickled"))
    assert len(load_draft(out).state_dict()) == 9 and len(load_file(out / "model.safetensors")) == 9


def test_only_a_folder_of_ours_is_written(made_run, target_folder, tmp_path, capsys, monkeypatch):
    """A model's folder, a run's, and whatever stands in the way of a folder are named, before the target is loaded."""
    run, _, _ = made_run("medusa")
    shutil.copytree(target_folder, tmp_path / "model")
    (tmp_path / "file").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setitem(LOADERS, "longdraft", lambda *given, **named: pytest.fail("loaded"))
    for out in (
        tmp_path / "model", run, run / "checkpoints" / "step_000007", tmp_path / "file", tmp_path / "file" / "draft",
        tmp_path / ("x" * 300), Path("/dev/full"),
    ):  # fmt: skip
        assert main([str(run), "--out", str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("longdraft export: error: out: ") and str(out) in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_export_that_finds_no_room_leaves_the_older_one(made_run, capsys):
    run, target, _ = made_run("medusa")
    out = export(run, target=target)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # as a full disk, for any file beyond
    try:
        assert [main([str(run), *to]) for to in ([], ["--out", str(run / "new")])] == [2, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("error: out: " in error and "File too large" in error for error in errors)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before and not any((run / "new").iterdir())


@pytest.mark.parametrize("moment", ["load_target", "frozen_draft", "save_draft"])
def test_ctrl_c_is_one_line_and_leaves_nothing(made_run, capsys, monkeypatch, moment):
    run, _, _ = made_run("medusa")
    interrupt = lambda *given, **named: signal.raise_signal(signal.SIGINT)  # noqa: E731
    if moment == "load_target":
        monkeypatch.setitem(LOADERS, "longdraft", interrupt)
    else:
        monkeypatch.setattr(f"longdraft.train.export.{moment}", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever earlier tests have left
    try:
        assert main([str(run)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "longdraft export: interrupted\n"
    held = [path.name for path in (run / "draft").iterdir()] if (run / "draft").exists() else []
    assert held == []


def test_weights_that_are_no_numbers_are_not_exported(made_run, capsys):
    run, _, _ = made_run("medusa", damage=lambda draft: draft.proj[1].weight.data[3].fill_(torch.nan))
    assert main([str(run)]) == 2
    assert "out: the draft has NaN or infinite weights (" in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


def test_the_draft_says_which_weights_it_was_trained_with(runs, config_file, tmp_path):
    """Even where other weights lie at the target's path when it is exported."""
    target = load_target(load_config(config_file, []).target.path, torch.bfloat16)
    expected = weights_hash(target.model)
    for name in ("fp32-2-1", "bf16-2-3"):
        assert read_info(export(runs / name, tmp_path / name)).target["weights_sha256"] == expected
    target.model.norm.weight.data += 1
    out = export(runs / "bf16-2-3", tmp_path / "again", target)
    assert read_info(out).target["weights_sha256"] == expected
    with pytest.warns(UserWarning, match="was trained with other weights"):
        load_draft(out, target)


def test_a_folder_without_checkpoint_is_an_error_of_the_command(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert f"error: run_dir: {tmp_path} holds no whole checkpoint; train first" in capsys.readouterr().err


def test_best_weights_are_exported_when_asked(made_run, capsys):
    """The run's newest checkpoint is step 7; the best that decoding found is step 4."""
    run, target, _ = made_run("medusa")
    assert main([str(run), "--best"]) == 2
    assert "run_dir: " in capsys.readouterr().err
    newest = checkpoint.checkpoint_folder(run) / "step_000007"
    best = checkpoint.best_folder(run) / "step_000004"
    shutil.copytree(newest, best)
    weights = {name: weight + 1 for name, weight in load_file(newest / checkpoint.WEIGHTS).items()}
    save_file(weights, best / checkpoint.WEIGHTS)
    content = json.loads((best / checkpoint.STATE).read_text()) | {"step": 4, "score": 1.5}
    (best / checkpoint.STATE).write_text(
        checkpoint.seal(content, {checkpoint.WEIGHTS: file_digest(best / checkpoint.WEIGHTS)})
    )
    folder = export(run, target=target, best=True)
    assert "Exported step 4 of" in capsys.readouterr().out
    assert all(torch.equal(weight, weights[name]) for name, weight in load_file(folder / WEIGHTS).items())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SECTIONS)
def test_every_method(made_run, capsys, name, precision):
    run, _, trained = made_run(name, precision)
    out = export(run)
    said = capsys.readouterr().out
    assert out == run / "draft" and f"Exported step 7 of {run} to {out}" in said
    assert (", for 20 of 97 tokens" in said) == ("draft_vocab_size" in SECTIONS[name])
    exported, weights = load_draft(out), trained.state_dict()
    assert exported.config == trained.config and exported.state_dict().keys() == weights.keys()
    for key, weight in exported.state_dict().items():
        assert weight.dtype == weights[key].dtype and torch.equal(weight, weights[key]), key
    info = read_info(out)
    levels = {"medusa": [3, 3], "longspec": [8, 16, 16], "longspec-narrow": [8, 16, 16, 16, 16]}
    assert info.tree == {"levels": levels.get(name, [3, 3, 3]), "rank_rates": [[0.5]], "choice_rates": None}
    assert info.noise == {"longspec": 3, "longspec-narrow": 7}.get(name)
    assert info.train_config["draft"] | SECTIONS[name] == info.train_config["draft"]


@pytest.mark.parametrize("restrict", [False, True])
def test_the_runtime_decodes_with_an_exported_longspec_draft(made_run, data_folder, capsys, restrict):
    """Exactly, with the folder's tree, for the whole vocabulary or the most frequent tokens of the training data."""
    run, target, trained = made_run("longspec")
    assert main([str(run), *(["--draft-vocab-size", "30"] if restrict else [])]) == 0
    draft = load_draft(run / "draft", target)
    if restrict:
        assert ", for 30 of 97 tokens\n" in capsys.readouterr().out
        assert read_info(run / "draft").train_config["draft"]["draft_vocab_size"] is None  # trained with all tokens
        rows = ShardSet(data_folder / "train")
        assert torch.equal(draft.token_ids, frequent_tokens(rows, 97, 30, target.eos_token_ids))
        assert target.eos_token_ids and set(target.eos_token_ids) <= set(draft.token_ids.tolist())
        weights = draft.state_dict()
        assert all(torch.equal(weights[key], weight) for key, weight in trained.state_dict().items())
    params = [SamplingParams(max_new_tokens=16), SamplingParams(temperature=1.0, seed=6, max_new_tokens=16)]
    prompts = [[5, 9, 2, 7, 11, 30, 2, 9], [3, 61]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as for a tree deeper than the draft's noise
        engine = Engine(target, drafter="longspec", draft=run / "draft", nodes=None)
    assert engine.drafter.widths == (8, 16, 16)
    drafted, plain = engine.generate(prompts, params), Engine(target).generate(prompts, params)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert len(drafted[1].tokens) == 16 and drafted[0].tokens_per_step > 1  # some proposal was right
    # No decision of the greedy text is so close that rounding could change it.
    logits = target.model(Pass(torch.tensor([prompts[0] + plain[0].tokens]))).logits[0, len(prompts[0]) - 1 : -1]
    best = logits.topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3


def test_a_restricted_draft_is_restricted_further(made_run, data_folder, capsys):
    """To the most frequent of the tokens it was trained with, which need not be those of the training data."""
    run, target, trained = made_run("longspec-narrow")
    assert main([str(run), "--draft-vocab-size", "10"]) == 0
    assert ", for 10 of 97 tokens\n" in capsys.readouterr().out
    draft = load_draft(run / "draft", target)
    kept, most = set(draft.token_ids.tolist()), frequent_tokens(ShardSet(data_folder / "train"), 97, 10)
    assert len(kept) == draft.config.draft_vocab_size == 10
    assert set(target.eos_token_ids) <= kept and kept - set(target.eos_token_ids) <= set(trained.token_ids.tolist())
    assert kept != set(most.tolist())
    of_its_own = frequent_tokens(ShardSet(data_folder / "train"), 97, 10, target.eos_token_ids, among=trained.token_ids)
    assert torch.equal(draft.token_ids, of_its_own)
    params = SamplingParams(temperature=1.0, seed=6, max_new_tokens=16)
    drafted = Engine(target, drafter="longspec", draft=draft, nodes=None).generate([[5, 9, 2, 7, 11, 30]], params)
    assert drafted[0].tokens == Engine(target).generate([[5, 9, 2, 7, 11, 30]], params)[0].tokens


@pytest.mark.parametrize("name", ["medusa", "silu_narrow"])
def test_the_runtime_decodes_with_heads_of_few_words(made_run, data_folder, capsys, name):
    """Exactly, whether restricted in training or by the export, and no other token is ever proposed."""
    run, target, trained = made_run(name)
    restrict = [] if name == "silu_narrow" else ["--draft-vocab-size", "20"]
    assert main([str(run), *restrict]) == 0
    assert ", for 20 of 97 tokens\n" in capsys.readouterr().out
    draft = load_draft(run / "draft", target)
    ids = trained.token_ids
    if restrict:
        ids = frequent_tokens(ShardSet(data_folder / "train"), 97, 20, target.eos_token_ids)
    assert torch.equal(draft.token_ids, ids)
    drafter = build_drafter(read_info(run / "draft").train_config["draft"]["method"], target, run / "draft")
    heads, proposed = (drafter.parts or [drafter])[0], set()
    grow = heads.grow

    def growing(state, budget, plan):
        tree = grow(state, budget, plan)
        proposed.update(tree.tokens[:, 1:][tree.parents[:, 1:] >= 0].tolist())
        return tree

    heads.grow = growing
    params = [SamplingParams(max_new_tokens=16), SamplingParams(temperature=1.0, seed=6, max_new_tokens=16)]
    prompts = [[5, 9, 2, 7, 11, 30, 2, 9], [3, 61]]
    drafted, plain = (
        Engine(target, drafter, nodes=None).generate(prompts, params),
        Engine(target).generate(prompts, params),
    )
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert len(proposed) > 5 and proposed <= set(ids.tolist())


@pytest.mark.parametrize(("name", "n"), [("longspec-narrow", 21), ("longspec", 98)])
def test_a_vocabulary_that_cannot_be_is_an_error_of_the_command(made_run, capsys, name, n):
    run, _, _ = made_run(name)
    assert main([str(run), "--draft-vocab-size", str(n)]) == 2
    assert f"longdraft export: error: draft_vocab_size: {n};" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]
