"""A draft folder gives back the draft, in the target's dtype, and refuses what does not belong together."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.models.draft_folder import CONFIG, WEIGHTS, DraftInfo, load_draft, read_info, save_draft, target_entry
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig


@pytest.fixture(params=["linear_chain", "silu_chain"])
def draft(request) -> TokenSwift:
    return TokenSwift(TokenSwiftConfig(32, 1e-6, kind=request.param), torch.Generator().manual_seed(4))


@pytest.fixture
def target(tiny_target):
    return tiny_target()


@pytest.fixture
def folder(tmp_path, draft, target):
    info = DraftInfo(
        target=target_entry(target),
        train_length=24,
        tree={"levels": [3, 3, 3], "rank_rates": [[0.3, 0.1, 0.05]] * 3},
        versions={"longdraft": "0"},
        train_config={"train": {"steps": 20}},
    )
    save_draft(tmp_path / "draft", draft, info)
    return tmp_path / "draft"


def test_round_trip(folder, draft, target):
    for loaded in (load_draft(folder), load_draft(folder, target)):
        assert loaded.config == draft.config
        assert not any(p.requires_grad for p in loaded.parameters())
        weights = loaded.state_dict()
        assert weights.keys() == draft.state_dict().keys()
        assert all(torch.equal(weights[name], p) for name, p in draft.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_it_comes_in_the_targets_dtype_and_keeps_its_own_on_disk(tmp_path, folder, draft, tiny_target):
    loaded = load_draft(folder, tiny_target(dtype=torch.bfloat16))
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    save_draft(tmp_path / "bf16", loaded, read_info(folder))
    assert {p.dtype for p in load_draft(tmp_path / "bf16").parameters()} == {torch.bfloat16}


def test_config_json(folder, draft):
    content = json.loads((folder / CONFIG).read_text())
    assert content["format_version"] == 1 and content["method"] == "tokenswift"
    assert content["draft"]["kind"] == draft.config.kind and content["draft"]["hidden_size"] == 32
    assert set(content["target"]) == {"name", "config_sha256", "tokenizer_sha256"}
    assert read_info(folder).tree["levels"] == [3, 3, 3] and read_info(folder).train_length == 24


def test_another_target_is_refused_with_both_fingerprints(folder, target, tiny_target):
    other = tiny_target(n_layers=3)
    with pytest.raises(ValueError, match="was trained for tiny-0") as error:
        load_draft(folder, other)
    assert target.fingerprint["config"] in str(error.value) and other.fingerprint["config"] in str(error.value)

    other = tiny_target()
    other.fingerprint["tokenizer"] = "f" * 64
    with pytest.raises(
        ValueError, match=r"tokenizer_sha256 none\) and cannot draft for tiny-0 \(tokenizer_sha256 ffff"
    ):
        load_draft(folder, other)


def test_another_name_of_the_same_target_is_accepted(folder, tiny_target):
    same = tiny_target()
    same.name = "a/local/copy"
    load_draft(folder, same)


def test_damage_is_named(folder, draft, tmp_path):
    with pytest.raises(ValueError, match=r"nothing holds no config\.json; give a folder that `longdraft export` wrote"):
        load_draft(tmp_path / "nothing")

    weights = load_file(folder / WEIGHTS)
    save_file({n: p for n, p in weights.items() if n != "proj.1.weight"} | {"extra": torch.ones(1)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"missing, unknown or of another shape: extra, proj\.1\.weight"):
        load_draft(folder)

    content = json.loads((folder / CONFIG).read_text())
    for change, message in (({"format_version": 9}, "format_version 9"), ({"method": "eagle"}, "known: tokenswift")):
        (folder / CONFIG).write_text(json.dumps(content | change))
        with pytest.raises(ValueError, match=message):
            load_draft(folder)


def test_a_write_that_breaks_off_leaves_no_folder_that_loads(folder, draft, monkeypatch):
    info = read_info(folder)

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("longdraft.models.draft_folder.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_draft(folder, draft, info)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_draft(folder)
