"""A run of the kernels' benchmarks on a machine of round numbers, and a tiny chat target."""

import pytest
import torch

from longdraft.benchmarks.kernels.race import Bench


@pytest.fixture
def bench() -> Bench:
    """A short run in bf16 on the CPU, on a machine of round numbers."""
    made = Bench(torch.device("cpu"), torch.bfloat16, turns=2)
    made.ceilings = {"copy": 2e9, "products": 8e9}
    return made
