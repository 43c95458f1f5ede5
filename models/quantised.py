"""Reads quantised checkpoints and dequantises their weights.

| quant_method | a weight W [N, K] is | published by |
|---|---|---|
| fp8 | fp8 numbers times `weight_scale_inv` of their block, or `weight_scale` | DeepSeek, Qwen3; AutoFP8 |
| compressed-tensors | fp8 numbers or packed integers times `weight_scale` of row, group or block | llm-compressor |
| awq | (q - z) s of its group of inputs; int32 [K, N / 8], columns in the order 0 2 4 6 1 3 5 7 | AutoAWQ, `gemm` |
| gptq | (q - z) s; int32 [K / 8, N], groups by `g_idx`; stores z - 1 (`gptq`) or z (`gptq_v2`) | AutoGPTQ, GPTQModel |
| mxfp4 | pairs of FP4 numbers, 32 numbers per exponent (OCP Microscaling 1.0); experts' [E, K, N] | gpt-oss |

Tensors are read one at a time, and a weight is yielded once all of its tensors have been read. Scales of activations
are yielded as they are, and hf_weights.py skips them.
Shapes: N outputs, K inputs, G groups of inputs, W int32 words, E experts, B bytes of a group.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# For each of a word's eight columns, which of AutoAWQ's nibbles holds it.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REMEDY = "use the original checkpoint, or one quantised another way"


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are stored: the names of the tensors that make a weight, in the order of the arguments
    of `value`, which dequantises it."""

    parts: tuple[str, ...]
    value: Callable[..., Tensor]

    def dequantised(self, tensors: Iterable[tuple[str, Tensor]], source: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the original, unquantised checkpoint, by their names there.

        Raises ValueError at the end if some of a weight's tensors are missing.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            weight, part = _split(name)
            if part == "weight_shape":  # of packed integers, whose own shape gives it
                continue
            if part not in self.parts or (part == "weight" and tensor.dtype not in FP8):
                yield name, tensor
                continue
            found = waiting.setdefault(weight, {})
            found[part] = tensor
            if len(found) == len(self.parts):
                del waiting[weight]
                yield weight, self.value(*(found[part] for part in self.parts))
        if waiting:
            weight, found = next(iter(waiting.items()))
            lacking = ", ".join(part for part in self.parts if part not in found)
            raise ValueError(f"{source}: {len(waiting)} quantised weights lack a part, such as {weight}: {lacking}")


def _split(name: str) -> tuple[str, str]:
    """The name of the weight that a tensor belongs to, and which part of it the tensor is."""
    for part in ("blocks", "scales"):
        if name.endswith(f"_{part}"):
            return name.removesuffix(f"_{part}"), part
    module, _, part = name.rpartition(".")
    return f"{module}.weight", "weight_scale" if part == "weight_scale_inv" else part  # both are factors


def read_quantisation(hf_config: Any) -> Quantisation | None:
    """How the weights are quantised, from the configuration's `quantization_config`; None if they are not.

    Raises ValueError, with the field and its supported values, for an unsupported format.
    """
    config = getattr(hf_config, "quantization_config", None)
    if not config:
        return None
    fields = dict(config if isinstance(config, Mapping) else config.to_dict())
    fields["quant_method"] = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    return _READERS[_one_of(fields, "quant_method", *_READERS)](fields)


def _one_of(fields: Mapping[str, Any], name: str, *known: Any) -> Any:
    """The value of a field, which must be one of `known`; the first is the default."""
    value = fields.get(name, known[0])
    if value not in known:
        shown = ", ".join(map(repr, known))
        raise ValueError(f"quantization_config: {name} is {value!r}; supported: {shown}; {REMEDY}")
    return value


def _fp8(fields: Mapping[str, Any]) -> Quantisation:
    _one_of(fields, "fmt", "e4m3")
    block = fields.get("weight_block_size")

    def value(weight_NK: Tensor, scale: Tensor) -> Tensor:
        return weight_NK.float() * _expand_scale(scale, weight_NK, block)

    return Quantisation(("weight", "weight_scale"), value)


def _compressed(fields: Mapping[str, Any]) -> Quantisation | None:
    groups = (fields.get("config_groups") or {}).values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    if not weights:  # only the cache is quantised
        return None
    form = _one_of(fields, "format", "float-quantized", "naive-quantized", "pack-quantized")
    if any(group != weights[0] for group in weights):
        raise ValueError(f"quantization_config: config_groups has {len(weights)} kinds of weights; {REMEDY}")
    if form == "pack-quantized":
        bits = _one_of(weights[0], "num_bits", 4, 8)
        _one_of(weights[0], "symmetric", True)
        _one_of(weights[0], "actorder", None, "weight", "static")

        def packed(words: Tensor, scale: Tensor) -> Tensor:
            numbers = _unpacked(words, bits).flatten(1) - (1 << (bits - 1))
            return numbers * _expand_scale(scale, numbers, None)

        return Quantisation(("weight_packed", "weight_scale"), packed)
    _one_of(weights[0], "type", "float")
    _one_of(weights[0], "num_bits", 8)
    return _fp8({"weight_block_size": weights[0].get("block_structure")})


def _awq(fields: Mapping[str, Any]) -> Quantisation:
    bits = _one_of(fields, "bits", 4)
    _one_of(fields, "version", "gemm")
    _one_of(fields, "zero_point", True)

    def value(words_KW: Tensor, zeros_GW: Tensor, scales_GN: Tensor) -> Tensor:
        order = torch.tensor(AWQ_ORDER, device=words_KW.device)
        q_KN, z_GN = (_unpacked(words, bits)[..., order].flatten(1) for words in (words_KW, zeros_GW))
        group_size = len(q_KN) // len(z_GN)
        return ((q_KN.unflatten(0, (-1, group_size)) - z_GN[:, None]) * scales_GN.float()[:, None]).flatten(0, 1).T

    return Quantisation(("qweight", "qzeros", "scales"), value)


def _gptq(fields: Mapping[str, Any]) -> Quantisation:
    bits = _one_of(fields, "bits", 4, 8, 2)
    _one_of(fields, "dynamic", None, {})
    z_is_less = _one_of(fields, "checkpoint_format", "gptq", "gptq_v2") == "gptq"  # z - 1 is stored

    def value(words_WN: Tensor, zeros_GW: Tensor, scales_GN: Tensor, group_K: Tensor) -> Tensor:
        q_KN = _unpacked(words_WN.T, bits).flatten(1).T
        z_GN = (_unpacked(zeros_GW, bits).flatten(1) + z_is_less) & ((1 << bits) - 1)
        group_K = group_K.long()
        return ((q_KN - z_GN[group_K]) * scales_GN.float()[group_K]).T

    return Quantisation(("qweight", "qzeros", "scales", "g_idx"), value)


def _mxfp4(fields: Mapping[str, Any]) -> Quantisation:
    def value(blocks_ENGB: Tensor, scales_ENG: Tensor) -> Tensor:
        """[E, K, N] in bf16, which holds these numbers exactly."""
        values = torch.tensor(FP4_VALUES, dtype=torch.bfloat16, device=blocks_ENGB.device)
        experts, outputs, groups, half = blocks_ENGB.shape
        out_ENK = values.new_empty(experts, outputs, groups * 2 * half)
        for blocks_NGB, scales_NG, out_NK in zip(blocks_ENGB, scales_ENG, out_ENK, strict=True):
            pairs_NGB2 = torch.stack((blocks_NGB & 15, blocks_NGB >> 4), -1)
            exponents_NG1 = scales_NG.int()[..., None] - 127
            out_NK.copy_(torch.ldexp(values[pairs_NGB2.int()].flatten(2), exponents_NG1).flatten(1))
        return out_ENK.mT

    return Quantisation(("blocks", "scales"), value)


_READERS = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4}


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned `bits`-bit numbers packed into int32 [M, W], lowest bits first: [M, W, 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts) & ((1 << bits) - 1)


def _expand_scale(scale: Tensor, weight_NK: Tensor, block: tuple[int, int] | None) -> Tensor:
    """A weight's scales (one in all, or one per row, per group of a row's inputs or per block), broadcast, in fp32."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(())
    (n_rows, n_inputs), scale = weight_NK.shape, scale.reshape(scale.shape[0], -1)
    if block is not None:
        scale = scale.repeat_interleave(block[0], 0)[:n_rows]
    if scale.shape[1] == 1 and block is None:
        return scale
    group_size = -(-n_inputs // scale.shape[1]) if block is None else block[1]
    return scale.repeat_interleave(group_size, 1)[:, :n_inputs]
