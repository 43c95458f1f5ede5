"""The one place that imports optional packages; everything else asks here and falls back where the answer is None.

Only a missing package counts as absent: a package that is there and fails to load raises.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What flash kernels take on a GPU.
HALF = (torch.float16, torch.bfloat16)


def is_host(device: torch.device) -> bool:
    """Whether the host reads a tensor there without waiting for what is queued: on a CPU. Elsewhere a step is queued
    whole, so that its work can be recorded and replayed (infer/graphs.py); so every such choice asks here."""
    return device.type == "cpu"


class LigerLayers(NamedTuple):
    """Liger's kernels for what a layer does between its products: functions of kernels/rms_norm.py and kernels/gate.py
    by their names, without a look at shapes."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]


@cache
def liger_layers(device_type: str) -> LigerLayers | None:
    """Liger's, for tensors of this type of device; None off CUDA and without liger-kernel and triton."""
    if device_type != "cuda" or find_spec("liger_kernel") is None or find_spec("triton") is None:
        return None
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    # "gemma" computes in fp32 and rounds once, as PyTorch does; "llama" would round before the weight is multiplied.
    # Of its kernels for rmsnorm the one of whole rows, whatever their number: the sums of `add_rms_norm`, in the same
    # order. No backward pass writes into what it is given.
    offset, casting, in_place, by_row = 0.0, "gemma", False, True

    def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Any:
        return LigerRMSNormFunction.apply(x, weight_D, eps, offset, casting, in_place, by_row)

    def add_rms_norm(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> Any:
        return LigerFusedAddRMSNormFunction.apply(added, x, weight_D, eps, offset, casting, in_place)

    def gate(gate_up: Tensor) -> Tensor:
        rows = gate_up.reshape(-1, gate_up.shape[-1])  # its gradient is of two dimensions, whatever it is given
        found: Any = LigerFusedGateUpSiLUMulFunction.apply(rows, in_place)
        return found.view(*gate_up.shape[:-1], -1)

    return LigerLayers(rms_norm, add_rms_norm, gate)


@cache
def triton_kernels(name: str, device_type: str) -> Any | None:
    """kernels/triton_impl/<name>.py for tensors of this type of device; None without triton and off CUDA."""
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    return import_module(f"longdraft.kernels.triton_impl.{name}")


def has_flash_attn() -> bool:
    """Whether flash-attn 2 is installed. Of version 4, another package, there is the folder flash_attn/cute alone."""
    found = find_spec("flash_attn")
    return found is not None and found.origin is not None


@cache
def varlen_attention() -> Callable[..., Any] | None:
    """Causal attention over sequences of several lengths in one kernel: flash-attn's where it is installed, else
    PyTorch's own where that knows windows and grouped heads (`torch.nn.attention.varlen`), else None.

    Called with q [N, H, d], k and v [M, K, d], q_borders and k_borders int32 [S + 1], most_queries, most_keys (at least
    those of the longest sequence), window; gives [N, H, d], with gradients, on CUDA in fp16 and bf16, d a multiple of
    8. A sequence's last query reads its last `window` keys (None: all), each before it one key less. With
    `with_lse=True` it gives the natural log-sum-exps of the scaled scores too, fp32 [H, N]. Where deterministic
    algorithms are asked for, flash-attn's backward is told; PyTorch's own looks itself.
    """
    if has_flash_attn():
        return _flash_attn
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    from torch.nn.attention.varlen import varlen_attn

    return _torch_varlen if {"window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters) else None


def varlen_attention_for(q: Tensor) -> Callable[..., Any] | None:
    """`varlen_attention` where it takes queries like these, [..., d]: on a GPU from 2020 on, in fp16 or bf16, with d a
    multiple of 8 and at most 256."""
    suits = q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return varlen_attention() if suits and torch.cuda.get_device_capability(q.device) >= (8, 0) else None


def _flash_attn(
    q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: int | None, with_lse: bool = False
) -> Any:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    found = flash_attn_varlen_func(
        q, k, v, q_borders, k_borders, most_queries, most_keys,
        causal=True, window_size=(_before(window), 0),
        deterministic=torch.are_deterministic_algorithms_enabled(), return_attn_probs=with_lse,
    )  # fmt: skip
    return found[:2] if with_lse else found  # the third would be the weights, which are there with dropout alone


def _torch_varlen(
    q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: int | None, with_lse: bool = False
) -> Any:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    return varlen_attn(
        q, k, v, q_borders, k_borders, most_queries, most_keys,
        window_size=(_before(window), 0), enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=with_lse),
    )  # fmt: skip


def _before(window: int | None) -> int:
    """Keys before a query's own, as both count; -1 for all."""
    return -1 if window is None else window - 1
