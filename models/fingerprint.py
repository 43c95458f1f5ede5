"""Hashes that tell whether a draft, a prepared data set and a target belong together.

They cover the configuration and the tokenizer, not the weights: two models of one shape and one tokenizer agree here.
"""

import hashlib
import json
from typing import Any

# Call-time state of a fast tokenizer: it changes with every padded call and says nothing about token ids.
CALL_STATE = ("truncation", "padding")


def _sha256(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 (hex) of a configuration of JSON values, independent of key order."""
    return _sha256(config)


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 (hex) of what turns text into token ids: the fast tokenizer's serialised state, or the vocabulary.

    Left out: truncation and padding (call-time state), and the chat template, which makes text, not ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = {"vocab": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    else:
        state = json.loads(backend.to_str())
        for key in CALL_STATE:
            state.pop(key, None)
    return _sha256({"state": state, "added": {str(i): str(t) for i, t in tokenizer.added_tokens_decoder.items()}})
