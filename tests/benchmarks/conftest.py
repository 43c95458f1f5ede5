"""A run of the kernels' benchmarks on a machine of round numbers, and a prompt for `longdraft bench`."""

from pathlib import Path

import pytest
import torch

from longdraft.benchmarks.kernels.race import Bench


@pytest.fixture
def bench() -> Bench:
    """A short run in bf16 on the CPU, on a machine of round numbers."""
    made = Bench(torch.device("cpu"), torch.bfloat16, turns=2)
    made.ceilings = {"copy": 2e9, "products": 8e9}
    return made


@pytest.fixture
def text_file(tmp_path) -> Path:
    """A text of more than 24 tokens of the target `tiny`."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 4)
    return tmp_path / "a.txt"
