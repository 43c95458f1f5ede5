"""A prompt for `longdraft bench`."""

from pathlib import Path

import pytest


@pytest.fixture
def text_file(tmp_path) -> Path:
    """A text of more than 24 tokens of the target `tiny`."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 4)
    return tmp_path / "a.txt"
