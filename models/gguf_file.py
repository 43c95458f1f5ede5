"""Reads a GGUF file as a Hugging Face configuration and tensors, which are dequantised one by one.

The gguf library reads it, not transformers' `from_pretrained(gguf_file=...)`, which needs accelerate and reads the
metadata three times. What a file can contain and we do not support is refused by name.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from longdraft.models.files import damage_named
from longdraft.models.hf_config import decoder_config
from longdraft.models.hf_weights import places

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# The tensor of llama.cpp's divisors of RoPE's frequencies. LLAMA3: the RoPE parameters that Llama 3.1 to 3.3 share.
ROPE_DIVISORS = "rope_freqs.weight"
LENGTH = struct.Struct("=Q")  # the size of a string in bytes, stored before it
ROW = 2**15  # how many numbers to dequantise as one row
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _open(path: Path) -> Any:
    """Open with gguf's reader, except that a numeric array becomes one part (gguf makes two to five objects per
    element) and the strings of the vocabulary, which are not needed here, are skipped.
    """
    from gguf import GGUFReader, GGUFValueType  # imported here: only GGUF files need the package

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, length, start = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64), orig_offs + 12
            types, head, count = [GGUFValueType.ARRAY, GGUFValueType(int(kind[0]))], [kind, length], int(length[0])
            if types[1] in self.gguf_scalar_to_np:
                values = self._get(start, self.gguf_scalar_to_np[types[1]], count)
                return start - orig_offs + values.nbytes, [*head, values], [2], types
            if types[1] != GGUFValueType.STRING:
                raise ValueError(f"an array of {types[1].name}")
            file, end = np.asarray(self.data).data, start
            for _ in range(count):
                end += 8 + LENGTH.unpack_from(file, end)[0]
            return end - orig_offs, head, [], types

    with damage_named(path):
        return Reader(path)


class GGUFFile:
    """An open GGUF file. Raises ValueError if it is damaged, or its architecture or RoPE scaling is not supported."""

    def __init__(self, path: Path):
        self.path = path
        self._reader = _open(path)
        self.architecture: str = self._value("general.architecture")
        # llama.cpp reads a factor without a type as linear scaling; files of 2023 call it `scale_linear`.
        factors = [self._value(f"{self.architecture}.rope.{key}") for key in ("scaling.factor", "scale_linear")]
        otherwise = "linear" if any(factor not in (None, 0.0, 1.0) for factor in factors) else "none"
        scaling = self._value(f"{self.architecture}.rope.scaling.type", otherwise)
        if self.architecture not in ARCHITECTURES or scaling != "none":
            raise ValueError(
                f"{path}: GGUF architecture {self.architecture!r} with RoPE scaling {scaling!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)} without scaling; use the Hugging Face folder"
            )

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration that the metadata describe, as a plain PretrainedConfig. The family's own
        class takes a second to import, and only transformers' own model needs it (`family_config`).
        """
        return type("GGUFConfig", (PretrainedConfig,), {"model_type": self.architecture})(**self._fields())

    def family_config(self) -> PretrainedConfig:
        """The same configuration in its family's class."""
        return AutoConfig.for_model(self.architecture, **self._fields())

    def _fields(self) -> dict[str, Any]:
        arch = self.architecture
        tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        heads = self._value(f"{arch}.attention.head_count")
        hidden = self._value(f"{arch}.embedding_length")
        head_dim = self._value(f"{arch}.attention.key_length", hidden // heads)
        values: dict[str, Any] = {
            "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._value(f"{arch}.feed_forward_length"),
            "num_hidden_layers": self._value(f"{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value(f"{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._value(f"{arch}.attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._value(f"{arch}.context_length"),
            "rope_parameters": self._rope(head_dim, tensors.get(ROPE_DIVISORS)),
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
        }
        if arch != "qwen2":  # Qwen2 always has biases on q, k and v, and no field for them
            values["attention_bias"] = "blk.0.attn_q.bias" in tensors
        return values

    def _rope(self, head_dim: int, stored: Any) -> dict[str, Any]:
        """RoPE's parameters: the default ones or, with stored divisors of the frequencies, Llama 3's scaling. Divisors
        that do not follow from that scaling (llama.cpp, convert_hf_to_gguf.py) are refused.
        """
        theta = self._value(f"{self.architecture}.rope.freq_base", 10000.0)
        if stored is None:
            return {"rope_type": "default", "rope_theta": theta}
        divisors_F = torch.from_numpy(stored.data.copy())
        factor, (low, high, original) = divisors_F.max().item(), LLAMA3.values()
        turns_F = original / (2 * math.pi) / theta ** (torch.arange(0, head_dim, 2) / head_dim)
        kept_F = ((turns_F - low) / (high - low)).clamp(0, 1)
        expected_F = 1 / ((1 - kept_F) / factor + kept_F)
        if divisors_F.shape != expected_F.shape or not torch.allclose(divisors_F, expected_F, rtol=1e-4):
            raise ValueError(f"{self.path}: {ROPE_DIVISORS} is not Llama 3's RoPE scaling; use the Hugging Face folder")
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors under their Hugging Face names, in fp32, q and k in Hugging Face's row order."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        config = decoder_config(self.config())
        (arch,) = (arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = get_tensor_name_map(arch, config.n_layers)
        names: dict[str | None, str] = {table.get_name(name, (".weight", ".bias")): name for name in places(config)}
        heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}
        for entry in self._reader.tensors:
            if entry.name == ROPE_DIVISORS:  # already in the configuration
                continue
            tensor = torch.from_numpy(_dequantised(entry))
            module = entry.name.split(".")[-2]
            if self.architecture == "llama" and module in heads:
                tensor = halves_from_pairs(tensor, heads[module])
            yield names.get(entry.name) or entry.name, tensor  # `fill` reports an unknown name as unexpected


def _dequantised(entry: Any) -> np.ndarray:
    """A tensor's values in fp32. gguf converts 16 rows at a time, so several short rows are passed to it as one."""
    from gguf import dequantize

    data, shape = np.asarray(entry.data), tuple(int(size) for size in reversed(entry.shape))  # not as a memmap: slow
    together = math.gcd(shape[0], 1 << max(0, (ROW // shape[-1]).bit_length() - 1)) if len(shape) == 2 else 1
    values = dequantize(data.reshape(len(data) // together, -1) if together > 1 else data, entry.tensor_type)
    return (values if values.flags.writeable else values.copy()).reshape(shape)  # not a view of the file


def halves_from_pairs(tensor: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of q and k (llama architecture): it rotates neighbours, we rotate halves."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(n_heads, rows // n_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
