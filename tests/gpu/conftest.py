"""The device of these tests: CUDA, or the one in LONGDRAFT_TEST_DEVICE. Without either, each file skips itself.

LONGDRAFT_TEST_DEVICE=cpu runs the same tests on the CPU, which shows that the tests themselves work. Builders that they
share with tests/infer and tests/kernels are loaded from there.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path

import pytest
import torch

_infer = run_path(str(Path(__file__).parents[1] / "infer" / "conftest.py"))
plain_tokens, seeded = _infer["plain_tokens"], _infer["seeded"]


@pytest.fixture
def margins() -> type:
    """`smallest`: the closest decision of the last `plain_tokens`, in logits."""
    return _infer["Margins"]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device where the tests run, with TF32 off."""
    name = os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield torch.device(name)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
