"""Any checkpoint, sharded ones too, becomes a folder that holds exactly the trained draft, and that can be served."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.data_prep.shards import ShardSet
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.launch import cli
from longdraft.models import draft_folder
from longdraft.models.draft_folder import DRAFTS, WEIGHTS, load_draft, read_info
from longdraft.models.files import file_digest
from longdraft.models.fingerprint import weights_hash
from longdraft.models.hf import load_target
from longdraft.models.passes import Pass
from longdraft.train import checkpoint
from longdraft.train.config import DTYPES, config_from_dict, to_dict
from longdraft.train.config_file import load_config
from longdraft.train.deepspeed_engine import MASTER
from longdraft.train.export import export
from longdraft.train.methods.build import frequent_tokens
from longdraft.train.tracking import read_metrics

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

    def make(name, precision="fp32"):
        values = to_dict(load_config(config_file, [f"train.run_dir={tmp_path}/run", f"train.precision={precision}"]))
        config = config_from_dict(values | {"draft": SECTIONS[name]})
        target = load_target(config.target.path, DTYPES[precision])
        draft = DRAFTS[config.draft.method][1](config.draft.network(target.model.config))
        generator = torch.Generator().manual_seed(3)
        for key, parameter in draft.named_parameters():
            parameter.data.normal_(1.0 if "norm" in key else 0.0, 0.3, generator=generator)
        if "draft_vocab_size" in SECTIONS[name]:
            draft.token_ids = torch.randperm(97, generator=generator)[:20]
        folder = checkpoint.checkpoint_folder(tmp_path / "run") / "step_000007"
        folder.mkdir(parents=True)
        save_file(draft.to(DTYPES[precision]).state_dict(), folder / checkpoint.WEIGHTS)
        content = {"step": 7, "config": to_dict(config), "extra": {"skipped": 0, "wandb_id": None}}
        content["extra"] |= {"heldout": {"rank_rates": [[0.5]]}, "data": {}}
        content |= {
            "format": checkpoint.FORMAT,
            checkpoint.DIGESTS: {checkpoint.WEIGHTS: file_digest(folder / checkpoint.WEIGHTS)},
        }
        (folder / checkpoint.STATE).write_text(checkpoint.seal(content))
        return tmp_path / "run", target, draft

    return make


@pytest.mark.parametrize("name", CASES)
def test_export_is_the_trained_draft(runs, tmp_path, name):
    out = export(runs / name, tmp_path / "draft")
    assert out == tmp_path / "draft"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    found = checkpoint.newest(runs / name)
    assert found is not None
    saved = checkpoint.SavedShares(found[0])  # what the optimizer moved, on each rank its part
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


def test_best_weights_are_exported_when_asked(made_run, capsys):
    """The run's newest checkpoint is step 7; the best that decoding found is step 4."""
    run, target, _ = made_run("medusa")
    for missing in ([str(run), "--best"], [str(run / "checkpoints")]):
        assert cli.main(["export", *missing]) == 2 and "error: run_dir: " in capsys.readouterr().err
    newest = checkpoint.checkpoint_folder(run) / "step_000007"
    best = checkpoint.best_folder(run) / "step_000004"
    shutil.copytree(newest, best)
    weights = {name: weight + 1 for name, weight in load_file(newest / checkpoint.WEIGHTS).items()}
    save_file(weights, best / checkpoint.WEIGHTS)
    content = json.loads((best / checkpoint.STATE).read_text()) | {"step": 4, "score": 1.5}
    content[checkpoint.DIGESTS] = {checkpoint.WEIGHTS: file_digest(best / checkpoint.WEIGHTS)}
    (best / checkpoint.STATE).write_text(checkpoint.seal(content))
    folder = export(run, target=target, best=True)
    assert "Exported step 4 of" in capsys.readouterr().out
    assert all(torch.equal(weight, weights[name]) for name, weight in load_file(folder / WEIGHTS).items())


def test_what_is_not_read_back_as_it_was_trained_is_an_error(made_run, monkeypatch):
    run, *_ = made_run("medusa")
    for damage in (lambda weight: weight + 1, lambda weight: weight.bfloat16()):
        monkeypatch.undo()
        monkeypatch.setattr(draft_folder, "load_file", lambda file, load=load_file, damage=damage: {
            name: damage(weight) for name, weight in load(file).items()
        })  # fmt: skip
        with pytest.raises(ValueError, match=r"out: .* differs from the trained one"):
            export(run)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", SECTIONS)
def test_every_method(made_run, capsys, name, precision):
    run, _, trained = made_run(name, precision)
    out = export(run)
    said = capsys.readouterr().out
    assert out == run / "draft" and f"Exported step 7 of {run} to {out}" in said
    assert said.endswith(": reloaded, every weight is equal\n")
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
    assert cli.main(["export", str(run), *(["--draft-vocab-size", "30"] if restrict else [])]) == 0
    draft = load_draft(run / "draft", target)
    if restrict:
        assert ", for 30 of 97 tokens: reloaded" in capsys.readouterr().out
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
    assert cli.main(["export", str(run), "--draft-vocab-size", "10"]) == 0
    assert ", for 10 of 97 tokens: reloaded" in capsys.readouterr().out
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


@pytest.mark.parametrize(("name", "n"), [("longspec-narrow", 22), ("longspec", 98)])
def test_a_vocabulary_that_cannot_be_is_an_error_of_the_command(made_run, capsys, name, n):
    run, _, _ = made_run(name)
    assert cli.main(["export", str(run), "--draft-vocab-size", str(n)]) == 2
    assert f"longdraft export: error: draft_vocab_size: {n};" in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]
