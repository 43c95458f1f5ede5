"""A GGUF file as a Hugging Face configuration and tensors: metadata is read once, tensors are dequantised one by one.

Read with the gguf library and not with transformers' `from_pretrained(gguf_file=...)`: that needs accelerate and reads
the metadata three times. What the file can say and we do not support is refused by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from longdraft.models.checkpoint import gguf_to_hf_name, halves_from_pairs

CONFIG_CLASSES: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


class GGUFFile:
    """An opened GGUF file. Raises ValueError for an architecture or RoPE scaling that is not supported."""

    def __init__(self, path: Path):
        from gguf import GGUFReader  # only who opens such a file needs the package

        self.path = path
        self._reader = GGUFReader(path)
        self.architecture: str = self._value("general.architecture")
        if self.architecture not in CONFIG_CLASSES:
            raise ValueError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported: "
                + ", ".join(CONFIG_CLASSES)
            )
        scaling = self._value(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"{path}: GGUF RoPE scaling {scaling!r} is not supported; use the Hugging Face folder")

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration that the metadata describe."""
        arch = self.architecture
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        heads = self._value(f"{arch}.attention.head_count")
        hidden = self._value(f"{arch}.embedding_length")
        values: dict[str, Any] = {
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._value(f"{arch}.feed_forward_length"),
            "num_hidden_layers": self._value(f"{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value(f"{arch}.attention.head_count_kv", heads),
            "head_dim": self._value(f"{arch}.attention.key_length", hidden // heads),
            "rms_norm_eps": self._value(f"{arch}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._value(f"{arch}.context_length"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self._value(f"{arch}.rope.freq_base", 10000.0),
            },
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }
        if arch != "qwen2":  # Qwen2 always has q, k and v biases and no field for them
            values["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return CONFIG_CLASSES[arch](**values)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors under their Hugging Face names, in fp32, q and k in Hugging Face's row order."""
        from gguf import dequantize

        heads = {"attn_q": self._value(f"{self.architecture}.attention.head_count")}
        heads["attn_k"] = self._value(f"{self.architecture}.attention.head_count_kv", heads["attn_q"])
        for entry in self._reader.tensors:
            # A copy: unquantised entries are read-only views of the mapped file.
            tensor = torch.tensor(dequantize(entry.data, entry.tensor_type))
            part = entry.name.split(".")[-2]
            if self.architecture == "llama" and part in heads:
                tensor = halves_from_pairs(tensor, heads[part])
            yield gguf_to_hf_name(entry.name), tensor
