"""Target: a frozen model with its tokenizer and fingerprint.

hf.py makes one from files or from a loaded transformers model. hf_config.py reads its configuration, hf_weights.py its
tensors (gguf_file.py from GGUF; quantised.py dequantises), and fingerprint.py computes its hashes.
transformers_model.py runs transformers' own classes.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from longdraft.models.decoder import Decoder


@dataclass
class Target:
    """A frozen model with everything that drafting for it needs.

    tokenizer is None for a folder without tokenizer files. fingerprint holds SHA-256 hex strings under "config" and
    "tokenizer" ("none" without one), and in training under "weights" (models/fingerprint.py). eos_token_ids: the ids
    that end a text (models/special_tokens.py). loader: whose classes compute the passes, "longdraft" or "transformers".
    """

    model: Decoder
    tokenizer: Any
    name: str
    hf_config: PretrainedConfig
    fingerprint: dict[str, str]
    eos_token_ids: tuple[int, ...]
    loader: str = "longdraft"
