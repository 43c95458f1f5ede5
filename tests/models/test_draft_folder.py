"""A draft folder, also of an earlier version, gives back the draft in the target's dtype; it is written whole or not at
all; what does not belong together is refused."""

import json
import warnings
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.models.draft_folder import (
    CONFIG,
    WEIGHTS,
    DraftInfo,
    check_out,
    load_draft,
    read_info,
    save_draft,
    target_entry,
)
from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, plan_queries


def longspec(target, generator):
    """With RoPE of many fields, a restricted vocabulary and every option."""
    config = LongSpecConfig.for_target(
        target.model.config, window=8, noise=3, final_norm=True, warm_start=True, draft_vocab_size=5
    )
    return LongSpec(config, generator, target.model, torch.tensor([90, 4, 17, 3, 66]))


MAKE = {
    "tokenswift": lambda _, generator: TokenSwift(TokenSwiftConfig(32, 1e-6), generator),
    "silu_chain": lambda _, generator: TokenSwift(TokenSwiftConfig(32, 1e-6, kind="silu_chain"), generator),
    "medusa": lambda _, generator: Medusa(MedusaConfig(32, init_std=0.1), generator),
    "longspec": longspec,
}
METHODS = {"silu_chain": "tokenswift"}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# A folder a method as an earlier version wrote it, for a target of this shape, and what each network gave for `states`.
WRITTEN_BEFORE = Path(__file__).with_name("drafts_written_before")
OUTPUTS = json.loads((WRITTEN_BEFORE / "outputs.json").read_text())
SHAPE = {"hidden_size": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4, "intermediate_size": 12}


@pytest.fixture(params=MAKE)
def kind(request) -> str:
    return request.param


@pytest.fixture
def target(tiny_target):
    return tiny_target(rope=LLAMA3)


@pytest.fixture
def draft(kind, target):
    return MAKE[kind](target, torch.Generator().manual_seed(4))


@pytest.fixture
def info(target):
    return DraftInfo(
        target=target_entry(target),
        train_length=24,
        tree={"levels": [3, 3, 3], "rank_rates": [[0.3, 0.1, 0.05]] * 3},
        versions={"longdraft": "0"},
        train_config={"train": {"steps": 20}},
        noise=3,
    )


@pytest.fixture
def folder(tmp_path, draft, info):
    save_draft(tmp_path / "draft", draft, info)
    return tmp_path / "draft"


def content(folder) -> dict:
    return json.loads((folder / CONFIG).read_text())


def change(folder, **fields):
    (folder / CONFIG).write_text(json.dumps(content(folder) | fields))


def put_weights(folder, weights):
    """As an export would write them."""
    save_file(weights, folder / WEIGHTS)
    change(folder, weights_sha256=sha256((folder / WEIGHTS).read_bytes()).hexdigest())


def refused(folder, target, *names):
    """Loading is refused in one line that has these names."""
    with pytest.raises(ValueError, match=r"\S") as error:
        load_draft(folder, target)
    text = str(error.value)
    assert all(name in text for name in names), text
    assert "\n" not in text


def test_round_trip(folder, draft, kind):
    loaded = load_draft(folder)
    assert type(loaded) is type(draft) and loaded.config == draft.config
    assert not any(p.is_meta for p in (*loaded.parameters(), *loaded.buffers()))
    assert not any(p.requires_grad for p in loaded.parameters())
    weights = loaded.state_dict()
    assert weights.keys() == draft.state_dict().keys()
    assert all(torch.equal(weights[name], p) for name, p in draft.state_dict().items())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    written, info = content(folder), read_info(folder)
    assert written["format_version"] == 1 and written["method"] == METHODS.get(kind, kind)
    assert set(written["target"]) == {"name", "config_sha256", "tokenizer_sha256", "weights_sha256"}
    assert written["weights_sha256"] == sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert (info.tree["levels"], info.train_length, info.noise) == ([3, 3, 3], 24, 3)


def test_it_comes_in_the_targets_dtype_and_keeps_its_own_on_disk(tmp_path, folder, tiny_target):
    loaded = load_draft(folder, tiny_target(dtype=torch.bfloat16, rope=LLAMA3))
    assert all(b.dtype == torch.int64 for b in loaded.buffers())
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    save_draft(tmp_path / "bf16", loaded, read_info(folder))
    assert {p.dtype for p in load_draft(tmp_path / "bf16").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_folder_of_an_earlier_version(name, tiny_target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a target with other weights
        draft = load_draft(WRITTEN_BEFORE / name, tiny_target(rope=LLAMA3, **SHAPE))
    hidden = torch.linspace(-1, 1, 72).reshape(9, 8)
    if isinstance(draft, LongSpec):
        kv = hidden[:, :4].reshape(9, 1, 4)
        states = draft.states(hidden, torch.arange(90, 99), kv, kv, plan_queries([0, 4, 9], [1, 3], 8))
    else:
        states = torch.cat(draft.states(hidden))
    torch.testing.assert_close(states[-1], torch.tensor(OUTPUTS[name]), rtol=1e-5, atol=2e-6)
    restricted = name in ("silu_chain", "longspec")
    assert (None if draft.token_ids is None else draft.token_ids.tolist()) == (
        [90, 4, 17, 3, 66] if restricted else None
    )
    info = read_info(WRITTEN_BEFORE / name)
    assert (info.train_length, info.step, info.noise) == (24, 20, 3 if name == "longspec" else None)
    assert info.tree["levels"] == [3, 2] and info.tree["choice_rates"] == [[0.5, 0.2, 0.1], [0.25, 0.125, 0.0]]
    assert info.target["name"] == "tiny-0" and info.train_config == {"seed": 1, "train": {"steps": 20}}


def test_another_target_is_refused_and_other_weights_are_warned_of(folder, tiny_target):
    refused(folder, tiny_target(n_layers=3, rope=LLAMA3), "tiny-0", "config_sha256")
    other = tiny_target(rope=LLAMA3)
    other.fingerprint["tokenizer"] = "f" * 64
    refused(folder, other, "tokenizer_sha256")
    other = tiny_target(rope=LLAMA3, seed=1)
    with pytest.warns(UserWarning, match="other weights than those of tiny-1") as seen:
        load_draft(folder, other)
    assert seen[0].filename == __file__
    same = tiny_target(rope=LLAMA3, dtype=torch.bfloat16)
    same.name = "a/local/copy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(folder, same)
        entry = content(folder)["target"]
        change(folder, target={name: value for name, value in entry.items() if name != "weights_sha256"})
        load_draft(folder, other)  # as earlier versions wrote it


@pytest.mark.parametrize("length", [256, 4096])
def test_heads_go_on_with_yarn_and_a_block_does_not(tmp_path, tiny_target, kind, length):
    """As model cards add it to config.json, whether or not the positions are then those of the longer texts."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    target = tiny_target(rope=plain)
    save_draft(tmp_path, MAKE[kind](target, None), DraftInfo(target_entry(target), 24, {"levels": [3]}, {}, {}))
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256}
    longer = tiny_target(rope=plain | yarn, max_positions=length)
    if kind == "longspec":
        refused(tmp_path, longer, "config_sha256")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_draft(tmp_path, longer)
    refused(tmp_path, tiny_target(rope=plain | yarn | {"rope_theta": 1e4}), "config_sha256")
    refused(tmp_path, tiny_target(rope=plain | yarn | {"original_max_position_embeddings": 64}), "config_sha256")


# Names in the message: fields of config.json that are changed (None: left out). "draft.x" is in the network's shape.
DAMAGED_FIELDS = [
    ("format_version", {"format_version": 9}),
    ("format_version", {"format_version": None}),
    ("method", {"method": "eagle"}),
    ("method", {"method": ["medusa"]}),
    ("color", {"color": "red"}),
    ("train_length", {"train_length": None}),
    ("versions", {"versions": 3}),
    ("draft", {"draft": 7}),
    ("draft", {"draft": None}),
    ("target.config_sha256", {"target": {"name": "x", "tokenizer_sha256": "y"}}),
    ("target.name", {"target": {"name": 7, "config_sha256": "x", "tokenizer_sha256": "y"}}),
    *((f"tree.{name}", {"tree": {name: value}}) for name, value in (
        ("levels", [10**12]), ("levels", "3"), ("levels", [True]), ("levels", [0]), ("levels", [1] * 65),
        ("choice_rates", [[float("nan")]]), ("rank_rates", [0.5]), ("choice_rates", [[2.0]]), ("rank_rates", "x"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["medusa"], indirect=True)
@pytest.mark.parametrize(("name", "fields"), DAMAGED_FIELDS)
def test_a_damaged_field_is_named(folder, target, name, fields):
    change(folder, **fields)
    refused(folder, target, CONFIG, name)


def test_a_damaged_field_of_the_shape_is_named(folder):
    shape = content(folder)["draft"]
    for name, value in shape.items():
        for wrong in (["x"], "x" * 10_000, float("nan"), *([0, True] if type(value) is int else [])):
            change(folder, draft=shape | {name: wrong})
            refused(folder, None, CONFIG, name)
    change(folder, draft=shape | {"width": 32})
    refused(folder, None, CONFIG, "draft.width")
    change(folder, draft={name: value for name, value in shape.items() if name != "hidden_size"})
    refused(folder, None, CONFIG, "draft.hidden_size")
    change(folder, draft=shape | {"hidden_size": 16})
    refused(folder, None, WEIGHTS)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000 + "]" * 100_000, '{"a": ' * 100_000 + "1" + "}" * 100_000, "9" * 5000, "[]",
        '{"format_version": 1', b"\xff\xfe{}", "",
    ],
    ids=["lists", "objects", "digits", "list", "half", "bytes", "empty"],
)  # fmt: skip
def test_a_config_json_that_is_none(tmp_path, text):
    (tmp_path / CONFIG).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path, None, CONFIG)
    with pytest.raises(ValueError, match=r"^out: "):
        check_out(tmp_path)  # it is not ours to replace


def test_damaged_weights_are_named(folder, draft, target):
    whole = load_file(folder / WEIGHTS)
    name = max(name for name, p in whole.items() if p.is_floating_point())
    for weights in (
        whole | {name: whole[name].to(torch.int64)},
        whole | {name: whole[name][:-1]},
        {other: p for other, p in whole.items() if other != name},
    ):
        put_weights(folder, weights)
        refused(folder, None, WEIGHTS, name)
    put_weights(folder, whole | {"extra": torch.ones(1)})
    refused(folder, None, WEIGHTS, "extra")
    put_weights(folder, {key: p.half() if p.is_floating_point() else p for key, p in whole.items()})
    load_draft(folder)
    whole[name].view(-1)[0] += 1
    save_file(whole, folder / WEIGHTS)
    refused(folder, target, WEIGHTS)  # another export's
    change(folder, weights_sha256=None)  # as earlier versions wrote it
    assert torch.equal(load_draft(folder).state_dict()[name], whole[name])
    (folder / WEIGHTS).unlink()
    refused(folder, target, WEIGHTS)


@pytest.fixture
def small():
    """A draft of some 4 KB."""
    return Medusa(MedusaConfig(32, 1, init_std=0.1), torch.Generator().manual_seed(9))


@pytest.mark.parametrize("kind", ["medusa"], indirect=True)
class TestWriting:
    def test_a_pair_replaces_a_pair_and_nothing_else(self, tmp_path, folder, small, info, files_of):
        (folder / "notes.txt").write_text("kept")
        (folder / f".{WEIGHTS}.77.tmp").write_text("half")  # as a kill leaves it
        (tmp_path / "link").symlink_to(folder)
        for out in (folder, tmp_path / "link", tmp_path / "not" / "there"):
            check_out(out)
            save_draft(out, small, info)
            assert torch.equal(load_draft(out).proj[0].weight, small.proj[0].weight)
        assert sorted(files_of(folder)) == [f".{WEIGHTS}.77.tmp", CONFIG, WEIGHTS, "notes.txt"]

    # The weights take 4.2 KB: one limit meets them, the other the long config.json that is written after them.
    @pytest.mark.parametrize("limit", [3000, 6000])
    def test_a_full_disk_changes_nothing(self, folder, small, info, limit, files_of, no_file_above):
        before = files_of(folder)
        info.train_config["padding"] = "x" * 9000
        with no_file_above(limit), pytest.raises(ValueError, match=r"^out: .*File too"):
            save_draft(folder, small, info)
        assert files_of(folder) == before

    @pytest.mark.parametrize(
        ("name", "held"),
        [
            ("model", {CONFIG: '{"model_type": "llama"}', WEIGHTS: "w"}),
            ("model", {WEIGHTS: "w"}),
            ("model/a.txt", {"a.txt": ""}),
            ("new/" + "x" * 300, {}),
            ("/proc/nothing/draft", {}),
        ],
    )
    def test_nothing_that_is_not_ours_is_touched(self, tmp_path, small, info, name, held, kind, files_of):
        (tmp_path / "model").mkdir()
        for file, text in held.items():
            (tmp_path / "model" / file).write_text(text)
        before = files_of(tmp_path)
        with pytest.raises(ValueError, match=r"^out: ") as error:
            save_draft(tmp_path / name, small, info)
        assert "\n" not in str(error.value) and files_of(tmp_path) == before

    @pytest.mark.parametrize(
        ("dtype", "wrong"), [(torch.float32, torch.nan), (torch.bfloat16, torch.inf), (torch.float16, -torch.inf)]
    )
    def test_weights_that_are_no_numbers_are_not_written(self, tmp_path, small, info, wrong, dtype, kind):
        small.to(dtype).proj[0].weight.data[1, 2] = wrong
        with pytest.raises(ValueError, match=r"^out: .*proj\.0"):
            save_draft(tmp_path / "draft", small, info)
        assert not (tmp_path / "draft").exists()
