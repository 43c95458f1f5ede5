"""benchmarks/ is not installed: its command is loaded from its file, and with it the checkout joins the namespace."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

_spec = spec_from_file_location("benchmarks_run", Path(__file__).resolve().parents[2] / "benchmarks" / "run.py")
assert _spec is not None and _spec.loader is not None
_run = module_from_spec(_spec)
_spec.loader.exec_module(_run)

# ruff: isort: split
from longdraft.benchmarks.timing import Bench, Ceilings  # noqa: E402 (only now importable)


@pytest.fixture
def command() -> ModuleType:
    """benchmarks/run.py."""
    return _run


@pytest.fixture
def bench() -> Bench:
    """A short run in bf16 on the CPU, on a machine of round numbers."""
    made = Bench(torch.device("cpu"), torch.bfloat16, repeats=2, budget=600.0, quick=True, say=lambda _: None)
    made.ceilings = Ceilings(copy=2e9, read=4e9, bf16=1e9, fp32=8e9)
    return made
