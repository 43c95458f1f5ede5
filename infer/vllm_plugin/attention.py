"""A draft's attention within vLLM: over its own cache, and over the cache of the target's last layer.

vLLM drafts one token a pass and counts the passes since the last verification (`draft_index`). Its metadata let each
pass read one position more. The target has not computed these positions, so `TargetAttention` removes them again.
"""

from copy import copy
from functools import cache
from typing import Any, cast

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.utils import extract_layer_index  # pyright: ignore[reportMissingImports]
from vllm.v1.attention.backend import subclass_attention_backend  # pyright: ignore[reportMissingImports]
from vllm.v1.kv_cache_interface import FullAttentionSpec  # pyright: ignore[reportMissingImports]


class TargetAttention(Attention):
    """Attention over the keys and values of the target's last layer, up to the last position that the target computed.

    vLLM's proposer refuses drafts without an attention layer, so heads have one too and read `draft_index` from it.

    Args:
        vllm_config: the engine's, which already has the target's layers.
        prefix: a unique name for the layer.

    Raises ValueError if the target's last layer caches only a window of positions.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str):
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        name = max(layers, key=extract_layer_index)
        target = cast(Any, layers[name])
        if target.sliding_window is not None:
            raise ValueError(f"target: its last layer keeps {target.sliding_window} positions; LongSpec reads all")
        backend = _counting(target.attn_backend)
        super().__init__(
            **_shape(target, vllm_config), prefix=prefix, kv_sharing_target_layer_name=name, attn_backend=backend
        )

    @property
    def draft_index(self) -> int:
        """The number of draft passes since the last verification; 0 in vLLM's dummy passes."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.layer_name].draft_index if isinstance(metadata, dict) else 0


def _shape(target: Any, vllm_config: VllmConfig) -> dict[str, Any]:
    """The arguments of a draft's attention layer that are those of the target's last layer."""
    return {
        "num_heads": target.num_heads,
        "head_size": target.head_size,
        "scale": target.head_size**-0.5,
        "num_kv_heads": target.num_kv_heads,
        "cache_config": vllm_config.cache_config,
    }


@cache
def _counting(backend: Any) -> Any:
    """The backend, with metadata that hold `draft_index` and end where the target's cache ends."""

    class Builder(backend.get_builder_cls()):
        def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
            metadata = super().build_for_drafting(_without(common_attn_metadata, draft_index), draft_index)
            metadata.draft_index = draft_index
            return metadata

    return subclass_attention_backend("Target", backend, Builder)


def _without(common: Any, n: int) -> Any:
    """The batch's metadata with n keys fewer for each request, but at least one."""
    if n == 0:
        return common
    common = copy(common)
    common.seq_lens = (common.seq_lens - n).clamp(min=1)
    common.max_seq_len = max(common.max_seq_len - n, 1)
    if common.seq_lens_cpu_upper_bound is not None:
        common.seq_lens_cpu_upper_bound = (common.seq_lens_cpu_upper_bound - n).clamp(min=1)
    return common


class WindowAttention(Attention):
    """Attention over the last `window` keys of the draft itself, the current position's included.

    All positions stay cached, in blocks like the target's: vLLM requires a draft's layers to share one cache group.
    """

    def __init__(self, target: TargetAttention, window: int, vllm_config: VllmConfig, prefix: str):
        super().__init__(**_shape(target, vllm_config), prefix=prefix, per_layer_sliding_window=window)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=cast(torch.dtype, self.kv_cache_torch_dtype),
        )
