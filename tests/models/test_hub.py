"""Folders of the hub: which files are asked for, and what is said where there are none."""

import pytest
from huggingface_hub.utils import filter_repo_objects

from longdraft.models import hub
from longdraft.models.draft_folder import local_folder
from longdraft.models.hf import _locate
from longdraft.models.hub import hub_folder

NEEDED = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.json"]
FILES = [*NEEDED, "original/model--00001-of-00007.safetensors", "consolidated.safetensors", "metal/model.bin"]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What was asked of a hub, call by call. Its repositories have FILES, which come to tmp_path."""
    calls = []

    def snapshot(name, revision=None, allow_patterns=None, ignore_patterns=None):
        calls.append((name, revision, tuple(allow_patterns), tuple(ignore_patterns)))
        for file in filter_repo_objects(FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return calls


def test_the_first_group_of_weights_that_is_there_is_the_last_that_is_asked_for(tmp_path, asked):
    groups = [["*.pt"], ["*.safetensors"], ["*.bin"]]
    assert hub_folder("some/one", ["*.json"], groups, refusal="no", ignored=["x*"]) == tmp_path
    hub_folder("some/one", ["*.json"], refusal="no", revision="v2")
    assert asked == [
        ("some/one", None, ("*.json", "*.pt"), ("x*",)),
        ("some/one", None, ("*.json", "*.safetensors"), ("x*",)),
        ("some/one", "v2", ("*.json",), ()),
    ]


def test_a_target_comes_once(tmp_path, asked, files_of):
    """Its authors' own copies of the weights stay there."""
    assert _locate("some/target") == ("some/target", tmp_path)
    assert sorted(files_of(tmp_path)) == NEEDED


def test_a_gguf_file_in_a_repository_is_named_by_its_path(tmp_path, asked):
    assert _locate("some/target/sub/a.gguf") == ("some/target/sub/a.gguf", tmp_path / "sub" / "a.gguf")
    assert asked == [("some/target", None, ("sub/a.gguf",), ())]


def test_a_path_is_not_looked_for_on_the_hub():
    with pytest.raises(ValueError, match=r"^no/such/folder is not a folder; check the path\Z"):
        hub_folder("no/such/folder", ["*"], refusal="no/such/folder is not a folder")


@pytest.mark.parametrize("error", [OSError(28, "No space left"), ValueError("no name"), EOFError("cut\n\noff")])
def test_what_cannot_be_had_is_named(monkeypatch, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"^it is not a folder, and could not be fetched from the hub: [^\n]+\Z"):
        hub_folder("some/one", ["*"], refusal="it is not a folder")
    with pytest.raises(ValueError, match="draft: nobody/failing-draft is not a folder, and could not be fetched"):
        local_folder("nobody/failing-draft")
