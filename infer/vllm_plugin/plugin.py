"""The plugin with which vLLM's own engine serves draft folders (entry point `vllm.general_plugins`).

    vllm serve TARGET --speculative-config '{"method": "eagle3", "model": "DRAFT_FOLDER", "num_speculative_tokens": 3}'

A draft folder is read as a model of type `longdraft` and built as one of the networks in networks.py. vLLM is not
patched: the plugin uses only its registries, a model's own attention layers and their metadata builders. The networks
themselves are those of models/drafts/.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from vllm.model_executor.models import ModelRegistry  # pyright: ignore[reportMissingImports]

from longdraft.models.draft_folder import DRAFTS, MODEL_TYPE

# vLLM looks up a folder's `architectures` under their own names, then with its speculative method as a prefix.
METHODS = ("", "Eagle", "Eagle3")


class DraftFolderConfig(PretrainedConfig):
    """config.json of a draft folder, with the fields that vLLM expects of every model.

    `draft` is the network's own config (models/drafts/). `n_predict` is the default of `num_speculative_tokens`; vLLM
    accepts larger numbers only if they are multiples of it.
    """

    model_type = MODEL_TYPE

    def __init__(self, draft: dict[str, Any] | None = None, method: str = "", **kwargs: Any):
        self.draft, block = dict(draft or {}), method == "longspec"
        self.hidden_size = self.draft.get("hidden_size", 1)
        self.num_hidden_layers = 1
        # Heads have no attention, but vLLM expects these fields. vLLM takes the vocabulary size from the target.
        self.num_attention_heads = self.draft.get("n_heads", 1) if block else 1
        self.num_key_value_heads = self.draft.get("n_kv_heads", 1) if block else 1
        self.head_dim = self.draft.get("head_dim", self.hidden_size)
        self.vocab_size = self.draft.get("vocab_size", 1)
        self.n_predict = self.draft.get("noise" if block else "n_heads", 1)
        super().__init__(**kwargs)


def register() -> None:
    """Register the folders' config and networks. Tested with vLLM 0.32."""
    AutoConfig.register(MODEL_TYPE, DraftFolderConfig, exist_ok=True)
    for method in METHODS:
        for name, (_, network) in DRAFTS.items():
            model = "Block" if name == "longspec" else "Heads"
            ModelRegistry.register_model(f"{method}{network.__name__}", f"longdraft.infer.vllm_plugin.networks:{model}")
