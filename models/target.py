"""A loaded target. Not here: loading it (models/hf.py)."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from longdraft.models.decoder import Decoder


@dataclass
class Target:
    """A frozen model with all that drafting against it needs.

    tokenizer is None for a folder without tokenizer files (its fingerprint is then "none"). fingerprint holds
    SHA-256 hex strings under "config" and "tokenizer", and in training under "weights" (models/fingerprint.py).
    loader: whose classes compute it, "longdraft" or "transformers".
    """

    model: Decoder
    tokenizer: Any
    name: str
    hf_config: PretrainedConfig
    fingerprint: dict[str, str]
    eos_token_ids: tuple[int, ...]
    loader: str = "longdraft"
