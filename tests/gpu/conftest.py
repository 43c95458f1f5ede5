"""The device of these tests: CUDA, or the one in LONGDRAFT_TEST_DEVICE. Without either, each file skips itself.

LONGDRAFT_TEST_DEVICE=cpu runs the same tests on the CPU, which shows that the tests themselves work. Builders that they
share with tests/infer and tests/kernels are loaded from there.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

TESTS = Path(__file__).parent.parent


def load(file: str) -> ModuleType:
    """A file of tests/ as a module of its own."""
    path = TESTS / file
    spec = importlib.util.spec_from_file_location(f"shared_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_infer = load("infer/conftest.py")
plain_tokens, seeded = _infer.plain_tokens, _infer.seeded


@pytest.fixture
def margins() -> type:
    """`smallest`: the closest decision of the last `plain_tokens`, in logits."""
    return _infer.Margins


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device where the tests run, with TF32 off."""
    name = os.environ.get("LONGDRAFT_TEST_DEVICE", "cuda")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield torch.device(name)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
