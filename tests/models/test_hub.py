"""Folders of the hub: which files are asked for, and what is said where there are none."""

import pytest

from longdraft.models import hub
from longdraft.models.draft_folder import local_folder
from longdraft.models.hub import hub_folder


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A hub with one repository, whose files a test names: what was asked of it, call by call."""
    asked = []

    def snapshot(name, revision=None, allow_patterns=None, ignore_patterns=None):
        asked.append((name, revision, tuple(allow_patterns), tuple(ignore_patterns)))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return asked


def test_the_first_group_of_weights_that_is_there_is_the_last_that_is_asked_for(tmp_path, repository):
    groups = [["*.safetensors"], ["*.bin", "*.pth"]]
    (tmp_path / "b.pth").touch()
    assert hub_folder("some/one", ["*.json"], groups, refusal="no", ignored=["x*"]) == tmp_path
    assert repository == [
        ("some/one", None, ("*.json", "*.safetensors"), ("x*",)),
        ("some/one", None, ("*.json", "*.bin", "*.pth"), ("x*",)),
    ]
    repository.clear()
    (tmp_path / "a.safetensors").touch()
    hub_folder("some/one", ["*.json"], groups, refusal="no")
    assert [patterns for _, _, patterns, _ in repository] == [("*.json", "*.safetensors")]
    repository.clear()
    hub_folder("some/one", ["*.json"], refusal="no", revision="v2")
    assert repository == [("some/one", "v2", ("*.json",), ())]


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
