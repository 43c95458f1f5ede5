"""Published sampling settings by name, as keywords of SamplingParams.

Source: TokenSwift (arXiv 2502.18890), Table 10. What the table leaves out is from the authors' program: min-p and eta
always keep 20 tokens, and with Llama-3.1 two tokens are banned.
"""

import re
from collections.abc import Mapping
from typing import Any

_TOKENSWIFT = {"temperature": 1.0, "contextual_window": 1024}
_MIN_P = _TOKENSWIFT | {"min_tokens_to_keep": 20}
PRESETS: dict[str, Mapping[str, Any]] = {
    "tokenswift-llama3.1-8b": _MIN_P | {"min_p": 0.1, "contextual_penalty": 1.2, "banned_token_ids": (18328, 78191)},
    "tokenswift-yarn-llama2-7b-128k": _TOKENSWIFT | {"top_p": 0.9, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-1.5b": _TOKENSWIFT | {"top_p": 0.9, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-7b": _MIN_P | {"min_p": 0.05, "contextual_penalty": 1.15},
    "tokenswift-qwen2.5-14b": _MIN_P | {"min_p": 0.05, "contextual_penalty": 1.13},
}


def preset(name: str) -> Mapping[str, Any]:
    """The keywords of a preset. Raises ValueError, which lists the known names, for an unknown one."""
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is unknown; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_for(target: str, family: str = "tokenswift") -> str | None:
    """The family's preset for a target's name, such as "meta-llama/Llama-3.1-8B"; None if there is none."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.]", "", text.lower())

    models = {name: plain(name.removeprefix(f"{family}-")) for name in PRESETS if name.startswith(f"{family}-")}
    return next((name for name, model in models.items() if model in plain(target)), None)
