"""A run of the kernels' benchmarks on a machine of round numbers, and a tiny target that chats."""

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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, shared) -> Path:
    """A random model with a chat template, in Hugging Face's form."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    text = "the cat sat on the mat and the dog sat on the log. " * 40
    return shared("tiny_checkpoint.py").save(tmp_path_factory.mktemp("tiny"), text, 290, seed=3, chat_template=template)
