"""Shared by the tests of loading."""

from collections.abc import Callable

import pytest
from torch import Tensor


@pytest.fixture(scope="session")
def sizes() -> dict[str, int]:
    """A tiny model of two layers, in the fields of a Hugging Face configuration."""
    return {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }


@pytest.fixture(scope="session")
def error() -> Callable[[Tensor, Tensor], float]:
    """The largest difference of two tensors, as a share of the largest magnitude."""

    def of(ours: Tensor, other: Tensor) -> float:
        assert ours.shape == other.shape
        return float((ours - other).abs().max() / other.abs().max())

    return of
