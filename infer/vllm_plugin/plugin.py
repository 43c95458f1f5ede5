"""vLLM's entry point (`vllm.general_plugins`): makes draft folders known to it, so that its own engine serves them.

    vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "DRAFT_FOLDER", "num_speculative_tokens": 3}'

A folder is read as a model of type `longdraft` and built as one of this folder's networks (networks.py). Nothing of
vLLM is patched: registries, a model's own attention layers and their metadata builders are all that is used.
Not here: the networks themselves (models/drafts/), which vLLM runs as they are.
"""

import logging
from typing import Any

import vllm  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, PretrainedConfig
from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]

from longdraft.models.draft_folder import DRAFTS, MODEL_TYPE

TRIED = "0.32"
# vLLM looks for the name in a folder's `architectures`, then for it behind its speculative method.
METHODS = ("", "Eagle", "Eagle3")


class DraftFolderConfig(PretrainedConfig):
    """config.json of a draft folder, with the fields that vLLM asks of every model.

    `draft` holds the network's own (models/drafts/). `n_predict` is what `num_speculative_tokens` is where it is not
    given, and vLLM takes no larger one that is not a multiple of it.
    """

    model_type = MODEL_TYPE

    def __init__(self, draft: dict[str, Any] | None = None, method: str = "", **kwargs: Any):
        self.draft, block = dict(draft or {}), method == "longspec"
        self.hidden_size = self.draft.get("hidden_size", 1)
        self.num_hidden_layers = 1
        # Heads have neither; vLLM asks before it knows that, and reads the target's vocabulary from the target.
        self.num_attention_heads = self.draft.get("n_heads", 1) if block else 1
        self.num_key_value_heads = self.draft.get("n_kv_heads", 1) if block else 1
        self.head_dim = self.draft.get("head_dim", self.hidden_size)
        self.vocab_size = self.draft.get("vocab_size", 1)
        self.n_predict = self.draft.get("noise" if block else "n_heads", 1)
        super().__init__(**kwargs)


def register() -> None:
    """Registers the folders' config and networks; warns where vLLM is another than was tried."""
    if not vllm.__version__.startswith(f"{TRIED}."):
        logging.getLogger(__name__).warning(
            "longdraft: vLLM %s, and its drafts were tried with %s alone. The text is the target's with any draft, but "
            "drafts may not load, or guess badly; install vllm==%s.*",
            *(vllm.__version__, TRIED, TRIED),
        )
    AutoConfig.register(MODEL_TYPE, DraftFolderConfig, exist_ok=True)
    for method in METHODS:
        for name, (_, network) in DRAFTS.items():
            kind = "Block" if name == "longspec" else "Heads"
            ModelRegistry.register_model(f"{method}{network.__name__}", f"longdraft.infer.vllm_plugin.networks:{kind}")
