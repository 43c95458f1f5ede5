"""A draft folder gives back the draft, in the target's dtype, and refuses what does not belong together."""

import json
import warnings
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.models.draft_checks import UNSEEN
from longdraft.models.draft_files import CONFIG, STAGED, WEIGHTS
from longdraft.models.draft_folder import DraftInfo, load_draft, read_info, save_draft, target_entry
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
    assert set(content["target"]) == {"name", "config_sha256", "tokenizer_sha256", "weights_sha256"}
    assert content["weights_sha256"] == sha256((folder / WEIGHTS).read_bytes()).hexdigest()
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
    with pytest.raises(ValueError, match=r"model\.safetensors: .* export again"):
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


def test_a_write_that_breaks_off_leaves_the_older_draft(folder, draft, monkeypatch):
    info, before = read_info(folder), {path.name: path.read_bytes() for path in folder.iterdir()}

    def broken(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longdraft.models.draft_files.write_tensors", broken)
    with pytest.raises(ValueError, match=r"out: no draft can be written to .*: No space left on device\. It takes \d"):
        save_draft(folder, draft, info)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    load_draft(folder)


def put_weights(folder, weights):
    """As an export would write them."""
    save_file(weights, folder / WEIGHTS)
    change(folder, weights_sha256=sha256((folder / WEIGHTS).read_bytes()).hexdigest())


def change(folder, **fields):
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(content | fields))


def test_another_exports_weights_are_named(folder):
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[-1]
    weights[name].view(-1)[0] += 1
    save_file(weights, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"model\.safetensors: not the weights that config\.json was written with"):
        load_draft(folder)
    change(folder, weights_sha256=None)  # as earlier versions wrote it
    assert torch.equal(load_draft(folder).state_dict()[name], weights[name])


def test_a_folder_that_is_being_replaced_is_read_once_it_is_whole(folder, target, monkeypatch):
    """The reader finds the new weights beside the old config.json."""
    old, info = (folder / CONFIG).read_bytes(), read_info(folder)
    new = Medusa(MedusaConfig(32, 2, init_std=0.1), torch.Generator().manual_seed(9))
    save_draft(folder, new, info)
    whole = (folder / CONFIG).read_bytes()
    (folder / CONFIG).write_bytes(old)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("nobody is replacing it: there is no use in waiting"))
    with pytest.raises(ValueError, match=r"export again"):
        load_draft(folder, target)
    (folder / STAGED).mkdir()
    monkeypatch.setattr("time.sleep", lambda seconds: (folder / CONFIG).write_bytes(whole))
    loaded = load_draft(folder, target)
    assert all(torch.equal(loaded.state_dict()[name], p) for name, p in new.state_dict().items())


def test_sizes_beyond_the_weights_are_named_before_they_are_built(folder, target):
    """Each would otherwise take all memory, or minutes."""
    content = json.loads((folder / CONFIG).read_text())
    shape = content["draft"]
    sizes = [name for name, value in shape.items() if isinstance(value, int) and not isinstance(value, bool)]
    assert "hidden_size" in sizes and "n_heads" in sizes
    for name in sizes:
        for value in (10**9, 10**30):
            change(folder, draft=shape | {name: value})
            if name not in UNSEEN:
                with pytest.raises(
                    ValueError, match=rf"config\.json: draft\.{name} is 1\d*.*, but model\.safetensors has"
                ):
                    load_draft(folder)
            if name not in ("window", "noise"):
                with pytest.raises(ValueError, match=rf"config\.json: draft\.{name} is 1\d*.*, (and tiny-0|but model)"):
                    load_draft(folder, target)
    change(folder, draft=shape | {"hidden_size": 16})
    with pytest.raises(ValueError, match=r"draft\.hidden_size is 16, and tiny-0 has 32; export again, or load"):
        load_draft(folder, target)


def test_a_rope_that_is_not_the_targets_is_named(tmp_path, target):
    block = longspec(target, torch.Generator())
    info = DraftInfo(target_entry(target), 24, {}, {}, {})
    save_draft(tmp_path, block, info)
    shape = json.loads((tmp_path / CONFIG).read_text())["draft"]
    change(tmp_path, draft=shape | {"rope": shape["rope"] | {"factor": 4.0}})
    with pytest.raises(ValueError, match=r"draft\.rope is .*, and tiny-0 has"):
        load_draft(tmp_path, target)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4}
    longest = "original_max_position_embeddings"
    for rope in (yarn, yarn | {"factor": "x"}, yarn | {"factor": 2.0, longest: "64"}, {"rope_type": "yarn"}, {}):
        change(tmp_path, draft=shape | {"rope": rope})
        with pytest.raises(ValueError, match=r"config\.json: .*export again$") as error:
            load_draft(tmp_path)
        assert "\n" not in str(error.value)


def test_values_of_the_wrong_type_are_named(folder, target):
    content = json.loads((folder / CONFIG).read_text())
    deep = []
    for _ in range(200):
        deep = [deep]
    right = {"kind": str, "out_norm_init": str, "draft_vocab_size": type(None)}  # but for the value's own
    for name, value in content["draft"].items():
        for wrong in (True, deep, "x" * 10_000, float("nan"), float("inf"), None):
            if type(wrong) in (type(value), right.get(name)) and wrong == wrong and wrong != float("inf"):
                continue
            change(folder, draft=content["draft"] | {name: wrong})
            with pytest.raises(ValueError, match=rf"config\.json: draft\.{name} is ") as error:
                load_draft(folder, target)
            assert len(str(error.value)) < 600 and "\n" not in str(error.value)
    tree = content["tree"]
    for wrong in (
        {"levels": [10**12]}, {"levels": "3"}, {"levels": [True]}, {"levels": [0]}, {"levels": [1] * 65},
        {"choice_rates": [[float("nan")]]}, {"rank_rates": [0.5]}, {"choice_rates": [[2.0]]}, {"rank_rates": "x"},
    ):  # fmt: skip
        change(folder, draft=content["draft"], tree=tree | wrong)
        with pytest.raises(ValueError, match=r"config\.json: tree\."):
            read_info(folder)
    for wrong in ({"target": content["target"] | {"name": 7}}, {"format_version": True}, {"method": ["medusa"]}):
        change(folder, **content | wrong)
        with pytest.raises(ValueError, match=r"target must hold|has format_version True|holds the method"):
            load_draft(folder, target)


def test_weights_that_are_no_numbers_are_named(folder, draft):
    whole = load_file(folder / WEIGHTS)
    name = sorted(name for name, p in whole.items() if p.is_floating_point())[-1]
    for wrong in (torch.nan, torch.inf):
        bad = {key: p.clone() for key, p in whole.items()}
        bad[name].view(-1)[-1] = wrong
        put_weights(folder, bad)
        with pytest.raises(ValueError, match=rf"model\.safetensors: the draft has NaN or infinite weights \({name}\)"):
            load_draft(folder)
    for dtype, word in ((torch.int64, "I64"), (torch.int8, "I8"), (torch.bool, "BOOL")):
        put_weights(folder, whole | {name: whole[name].to(dtype)})
        with pytest.raises(
            ValueError, match=rf"model\.safetensors: {name} is of {word}, not F32 or BF16 or F16 or F64"
        ):
            load_draft(folder)
    if isinstance(draft, LongSpec):
        put_weights(folder, whole | {"token_ids": whole["token_ids"].float()})
        with pytest.raises(ValueError, match=r"token_ids is of F32, not I64"):
            load_draft(folder)
    put_weights(folder, {key: p.half() if p.is_floating_point() else p for key, p in whole.items()})
    load_draft(folder)


def test_a_target_of_other_weights_is_told_apart(folder, tiny_target):
    other = tiny_target(rope=LLAMA3, seed=1)
    with pytest.warns(UserWarning, match=r"trained with the weights of tiny-0 \(weights_sha256 \w{64}\), and") as seen:
        load_draft(folder, other)
    assert "tiny-1 (weights_sha256" in str(seen[0].message) and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(folder, tiny_target(rope=LLAMA3, dtype=torch.bfloat16))
        entry = json.loads((folder / CONFIG).read_text())["target"]
        change(folder, target={name: value for name, value in entry.items() if name != "weights_sha256"})
        load_draft(folder, other)  # as earlier versions wrote it
