"""A draft folder gives back the draft, in the target's dtype, and refuses what does not belong together."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.models.draft_folder import CONFIG, WEIGHTS, DraftInfo, load_draft, read_info, save_draft, target_entry
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, plan_queries
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig


def tokenswift(target, generator):
    return TokenSwift(TokenSwiftConfig(32, 1e-6), generator)


def silu_chain(target, generator):
    return TokenSwift(TokenSwiftConfig(32, 1e-6, kind="silu_chain"), generator)


def medusa(target, generator):
    return Medusa(MedusaConfig(32, init_std=0.1), generator)


def longspec(target, generator):
    """With RoPE of many fields, a restricted vocabulary and every option."""
    config = LongSpecConfig.for_target(
        target.model.config, window=8, noise=3, final_norm=True, warm_start=True, draft_vocab_size=5
    )
    return LongSpec(config, generator, target.model, torch.tensor([90, 4, 17, 3, 66]))


MAKE = {"tokenswift": tokenswift, "silu_chain": silu_chain, "medusa": medusa, "longspec": longspec}
METHODS = {"silu_chain": "tokenswift"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(params=MAKE)
def kind(request) -> str:
    return request.param


@pytest.fixture
def draft(kind, target):
    return MAKE[kind](target, torch.Generator().manual_seed(4))


@pytest.fixture
def target(tiny_target):
    return tiny_target(rope=LLAMA3)


@pytest.fixture
def folder(tmp_path, draft, target):
    info = DraftInfo(
        target=target_entry(target),
        train_length=24,
        tree={"levels": [3, 3, 3], "rank_rates": [[0.3, 0.1, 0.05]] * 3},
        versions={"longdraft": "0"},
        train_config={"train": {"steps": 20}},
        noise=3,
    )
    save_draft(tmp_path / "draft", draft, info)
    return tmp_path / "draft"


def test_round_trip(folder, draft, target):
    for loaded in (load_draft(folder), load_draft(folder, target), load_draft(folder, None, type(draft))):
        assert type(loaded) is type(draft) and loaded.config == draft.config
        assert not any(p.is_meta for p in (*loaded.parameters(), *loaded.buffers()))
        assert not any(p.requires_grad for p in loaded.parameters())
        weights = loaded.state_dict()
        assert weights.keys() == draft.state_dict().keys()
        assert all(torch.equal(weights[name], p) for name, p in draft.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_it_comes_in_the_targets_dtype_and_keeps_its_own_on_disk(tmp_path, folder, draft, tiny_target):
    loaded = load_draft(folder, tiny_target(dtype=torch.bfloat16, rope=LLAMA3))
    assert all(b.dtype == torch.int64 for b in loaded.buffers())
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    save_draft(tmp_path / "bf16", loaded, read_info(folder))
    assert {p.dtype for p in load_draft(tmp_path / "bf16").parameters()} == {torch.bfloat16}


def test_config_json(folder, kind):
    content = json.loads((folder / CONFIG).read_text())
    assert content["format_version"] == 1 and content["method"] == METHODS.get(kind, kind)
    assert content["draft"]["hidden_size"] == 32
    assert set(content["target"]) == {"name", "config_sha256", "tokenizer_sha256"}
    info = read_info(folder)
    assert (info.tree["levels"], info.train_length, info.noise) == ([3, 3, 3], 24, 3)


def test_a_loaded_draft_computes_what_the_saved_one_did(folder, draft, target):
    """Buffers and the RoPE that was rebuilt from JSON included."""
    loaded, hidden = load_draft(folder, target), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))

    def output(one):
        if not isinstance(one, LongSpec):
            return torch.stack(one.states(hidden))
        kv = hidden[0, :, :16].reshape(9, 2, 8)
        return one.states(hidden[1], torch.arange(90, 99), kv, kv, plan_queries([0, 4, 9], [1, 3], one.config.window))

    assert torch.equal(output(loaded), output(draft))
    if isinstance(draft, LongSpec):
        assert loaded.token_ids.tolist() == [90, 4, 17, 3, 66]


def test_another_method_than_the_one_asked_for_is_refused(folder, draft):
    other = Medusa if not isinstance(draft, Medusa) else LongSpec
    with pytest.raises(ValueError, match=r"holds a draft of .*; give one of (medusa|longspec)"):
        load_draft(folder, None, other)


def test_version_1_as_first_written_still_loads(folder):
    """Before other methods came: no difference but a `noise` that was always null."""
    content = json.loads((folder / CONFIG).read_text())
    for change in ({"noise": None}, {}):
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in content.items() if k != "noise"} | change))
        assert read_info(folder).noise is None
        load_draft(folder)


def test_another_target_is_refused_with_both_fingerprints(folder, target, tiny_target):
    other = tiny_target(n_layers=3, rope=LLAMA3)
    with pytest.raises(ValueError, match="was trained for tiny-0") as error:
        load_draft(folder, other)
    assert target.fingerprint["config"] in str(error.value) and other.fingerprint["config"] in str(error.value)

    other = tiny_target(rope=LLAMA3)
    other.fingerprint["tokenizer"] = "f" * 64
    with pytest.raises(
        ValueError, match=r"tokenizer_sha256 none\) and cannot draft for tiny-0 \(tokenizer_sha256 ffff"
    ):
        load_draft(folder, other)


def test_another_name_of_the_same_target_is_accepted(folder, tiny_target):
    same = tiny_target(rope=LLAMA3)
    same.name = "a/local/copy"
    load_draft(folder, same)


def test_damaged_weights_are_named(folder):
    weights = load_file(folder / WEIGHTS)
    first = sorted(weights)[0]
    save_file({n: p for n, p in weights.items() if n != first} | {"extra": torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="missing, unknown or of another shape: ") as error:
        load_draft(folder)
    assert "extra" in str(error.value) and first in str(error.value)

    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged .* export again"):
        load_draft(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors; copy the whole folder, or export again"):
        load_draft(folder)


def test_a_damaged_config_is_named(folder, tmp_path, tiny_target):
    with pytest.raises(ValueError, match=r"nothing holds no config\.json; give a folder that `longdraft export` wrote"):
        load_draft(tmp_path / "nothing")

    content = json.loads((folder / CONFIG).read_text())
    shape = content["draft"]
    damage = {
        "format_version 9": content | {"format_version": 9},
        "is no draft folder, its config.json has no format_version; give one": {"model_type": "medusa"},
        "known: tokenswift, longspec, medusa": content | {"method": "eagle"},
        r"config\.json: does not know color; export again": content | {"color": "red"},
        r"config\.json: lacks train_length, versions and does not know color": {
            name: value for name, value in content.items() if name not in ("train_length", "versions")
        }
        | {"color": "red"},
        r"config\.json: lacks draft": {name: value for name, value in content.items() if name != "draft"},
        r"config\.json: lacks draft\.hidden_size and does not know draft\.width": content
        | {"draft": {name: value for name, value in shape.items() if name != "hidden_size"} | {"width": 32}},
        r"config\.json: draft must hold fields, not 7": content | {"draft": 7},
        r"config\.json: draft\.hidden_size is '32', not of type": content | {"draft": shape | {"hidden_size": "32"}},
        r"config\.json: train_length is None, not of type": content | {"train_length": None},
        r"config\.json: draft\.\w+: ": content | {"draft": shape | _wrong(shape)},
        r"config\.json: holds no fields": [content],
    }
    for message, damaged in damage.items():
        (folder / CONFIG).write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match=message):
            load_draft(folder)
    (folder / CONFIG).write_text(json.dumps(content)[:-20])
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON .* export again"):
        read_info(folder)
    (folder / CONFIG).write_text(json.dumps(content | {"target": {"name": "x"}}))
    with pytest.raises(ValueError, match=r"target must hold name, config_sha256, tokenizer_sha256"):
        load_draft(folder, tiny_target())


def _wrong(shape):
    return {"window": 0} if "window" in shape else {"n_heads": 0}


def test_a_write_that_breaks_off_leaves_no_folder_that_loads(folder, draft, monkeypatch):
    info = read_info(folder)

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("longdraft.models.draft_folder.write_tensors", broken)
    with pytest.raises(OSError, match="disk full"):
        save_draft(folder, draft, info)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_draft(folder)
