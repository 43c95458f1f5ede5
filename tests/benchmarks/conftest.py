"""A run of the kernels' benchmarks on a machine of round numbers."""

import pytest
import torch

from longdraft.benchmarks.timing import Bench, Ceilings


@pytest.fixture
def bench() -> Bench:
    """A short run in bf16 on the CPU, on a machine of round numbers."""
    made = Bench(torch.device("cpu"), torch.bfloat16, repeats=2, budget=600.0, quick=True, log=lambda _: None)
    made.ceilings = Ceilings(copy=2e9, read=4e9, bf16=1e9, fp32=8e9)
    return made
