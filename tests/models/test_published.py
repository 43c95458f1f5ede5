"""Published drafts to draft folders: files, folders and a hub's, what decodes and trains with them, what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from longdraft.launch import cli
from longdraft.models import hub
from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.hf import load_target
from longdraft.models.published import convert
from longdraft.train.config_file import load_stages
from longdraft.train.methods.build import open_draft, same_shape

TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared):
    """The target: a checkpoint of its own."""
    return shared("tiny_checkpoint.py").save(tmp_path_factory.mktemp("published") / "target", TEXT, 290, seed=3)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, torch.float32)


@pytest.fixture(scope="module")
def block(folder, target, authors):
    """LongSpec's folder, and the block in it."""
    return folder.parent / "longspec", authors.publish_longspec(folder.parent / "longspec", target, folder)


@pytest.fixture(scope="module")
def merged(folder, authors):
    """TokenSwift's folder, and the heads in it."""
    return folder.parent / "merged", authors.publish_tokenswift(folder.parent / "merged", folder)


def same_weights(draft, other) -> bool:
    weights = other.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in draft.state_dict().items())


@pytest.mark.parametrize("form", ["folder", "file", "pickle", "folder of a pickle"])
def test_longspec_in_every_form(tmp_path, folder, target, block, form, authors):
    source, draft = block
    if form == "file":
        source = source / "model.safetensors"
    elif form != "folder":
        source = authors.write(tmp_path / "d" / "draft_model_weights.pth", authors.longspec_tensors(draft, "glide."))
        source = source.parent if form == "folder of a pickle" else source
    convert(source, tmp_path / "out", str(folder))
    info = read_info(tmp_path / "out")
    assert same_weights(load_draft(tmp_path / "out", target), draft)
    assert (info.noise, info.tree["levels"], info.train_length) == (4, [4, 16, 16, 16, 16], 32768)
    assert info.train_config["target"] == {"path": str(folder)}
    assert info.target["config_sha256"] == target.fingerprint["config"] and "weights_sha256" not in info.target


@pytest.mark.parametrize("base", [False, True])
def test_tokenswift_s_heads_and_their_target(tmp_path, folder, target, merged, base):
    """Without a base the checkpoint is the target."""
    source, heads = merged
    _, info = convert(source, tmp_path / "out", str(folder) if base else None)
    found = load_draft(tmp_path / "out", target)
    assert same_weights(found, heads) and found.config == heads.config
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    own = load_target(info.train_config["target"]["path"], torch.float32)
    assert info.train_config["target"]["path"] == str(folder if base else source)
    assert all(torch.equal(a, b) for a, b in zip(own.model.parameters(), target.model.parameters(), strict=True))
    assert info.tree == {"levels": [3, 3, 3]}


def test_converted_folders_decode_without_further_words(tmp_path, block, merged, folder, capsys):
    """`generate` with the folder alone: the target is found, the tree is the folder's and nothing is warned of."""
    for source, words in ((block[0], ["--target", str(folder)]), (merged[0], [])):
        out = tmp_path / source.name
        assert cli.main(["convert", str(source), "--out", str(out), *words]) == 0
        assert f"to {out}" in capsys.readouterr().out
        given = ["--draft", str(out), "--dtype", "fp32", "--prompt", "the cat sat", "--max-new-tokens", "8"]
        assert cli.run("generate", given) == 0
        shown = capsys.readouterr()
        assert "tokens/step" in shown.err and "warning" not in shown.err


@pytest.mark.parametrize("method", ["longspec", "tokenswift"])
def test_training_begins_with_a_converted_draft(tmp_path, target, block, merged, folder, method):
    """The recipes' own settings, whose noise and initialisation are not the authors'."""
    source, draft = block if method == "longspec" else merged
    convert(source, tmp_path / "out", str(folder))
    recipe = f"configs/{method}/llama3.1-8b.yaml"
    config = load_stages(recipe, [], from_draft=str(tmp_path / "out"))[0].config
    opened = open_draft(config, target, None, None)  # no vocabulary is counted and no run resumed
    assert same_shape(opened.draft.config, draft.config) and same_weights(opened.draft, draft)


def test_by_the_hub_s_name(tmp_path, folder, block, merged, monkeypatch):
    """Of a block's target no weights are fetched."""
    base, heads = "lmsys/vicuna-7b-v1.5-16k", "TokenSwift/TokenSwift-Llama-3.1-8B"
    places, asked = {"sail/block": block[0], base: folder, heads: merged[0]}, {}

    def snapshot(name, allow_patterns, **options):
        asked[name] = allow_patterns
        if name not in places:
            raise OSError("404")
        return str(places[name])

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    for name, target in (("sail/block", base), (heads, None)):
        _, info = convert(name, tmp_path / name, target)
        assert info.train_config["target"]["path"] == info.target["name"] == (target or heads)
    assert "*.safetensors" in asked["sail/block"] and "*.safetensors" not in asked[base]
    with pytest.raises(ValueError, match="source: nobody/nothing"):
        convert("nobody/nothing", tmp_path / "none")


def test_what_does_not_fit_is_named_and_nothing_is_left(tmp_path, folder, block, merged, shared, capsys):
    other = shared("tiny_checkpoint.py").save(tmp_path / "other", TEXT, 290, seed=9)
    shape = json.loads((other / "config.json").read_text())
    wider = shutil.copytree(other, tmp_path / "wider")
    (wider / "config.json").write_text(json.dumps(shape | {"intermediate_size": 96}))
    headless = shutil.copytree(merged[0], tmp_path / "headless")
    shard = headless / "model-00002-of-00003.safetensors"
    kept = {name: tensor for name, tensor in load_file(shard).items() if "medusa" not in name}
    save_file(kept | {"model.medusa_layers.7.linear.weight": torch.zeros(2)}, shard)
    torn = shutil.copytree(merged[0], tmp_path / "torn")
    (torn / "model-00001-of-00003.safetensors").write_bytes(b"no weights")
    cases = [
        ([block[0]], r"target: .* does not say which model it is for; give that model"),
        ([block[0], "--target", wider], r"gate_up\.weight.*\[128, 32\]"),
        ([headless], r"headless: .*proj\.7\.weight"),
        ([torn], r"torn/model-00001-of-00003\.safetensors: .*again"),
    ]
    for words, message in cases:
        assert cli.main(["convert", *map(str, words), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert pytest.RaisesExc(ValueError, match=message).matches(ValueError(error)), error
        assert not (tmp_path / "out").exists()
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    assert cli.main(["convert", str(merged[0]), "--out", str(full)]) == 2
    assert "out:" in capsys.readouterr().err and (full / "thesis.txt").read_text() == "mine"
