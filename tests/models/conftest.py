"""What the tests of loading share."""

import pytest


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
