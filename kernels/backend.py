"""The one place that imports optional packages. Everything else asks here, and falls back if the answer is None.

Only a package that is not installed counts as absent; one that is installed but fails to load raises.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The dtypes that flash kernels take on a GPU.
HALF = (torch.float16, torch.bfloat16)
# The widest row that Liger's kernels take, since they load whole rows; of a gate, the most outputs.
LIGER_WIDTH = 65536


def is_host(device: torch.device) -> bool:
    """Whether the host can read a tensor on this device without waiting for queued work, as on a CPU.

    Elsewhere a whole step is queued without a read, so that it can be recorded and replayed (infer/graphs.py). All code
    that depends on this asks here.
    """
    return device.type == "cpu"


class LigerLayers(NamedTuple):
    """Liger's kernels for the parts of a layer between its matrix products, as functions with the names and arguments
    of those in kernels/rms_norm.py and kernels/gate.py. They do not check whether the shapes suit Liger."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]


@cache
def liger_layers(device_type: str) -> LigerLayers | None:
    """Liger's kernels for this device type; None unless it is CUDA and liger-kernel and triton are installed."""
    if device_type != "cuda" or find_spec("liger_kernel") is None or find_spec("triton") is None:
        return None
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    # "gemma" computes in fp32 and rounds once, as PyTorch does; "llama" would round before it multiplies the weight.
    # by_row: always use Liger's RMSNorm kernel for whole rows, which sums in the same order as `add_rms_norm`.
    # in_place: no backward pass overwrites the gradient that it is given.
    offset, casting, in_place, by_row = 0.0, "gemma", False, True

    def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Any:
        return LigerRMSNormFunction.apply(x, weight_D, eps, offset, casting, in_place, by_row)

    def add_rms_norm(x: Tensor, added: Tensor, weight_D: Tensor, eps: float) -> Any:
        return LigerFusedAddRMSNormFunction.apply(added, x, weight_D, eps, offset, casting, in_place)

    def gate(gate_up: Tensor) -> Tensor:
        rows = gate_up.reshape(-1, gate_up.shape[-1])  # Liger's gradient has two dimensions for any input
        gated: Any = LigerFusedGateUpSiLUMulFunction.apply(rows, in_place)
        return gated.view(*gate_up.shape[:-1], -1)

    return LigerLayers(rms_norm, add_rms_norm, gate)


@cache
def triton_kernels(name: str, device_type: str) -> Any | None:
    """The module triton/<name>.py for tensors of this device type; None unless it is CUDA and triton is installed."""
    if device_type != "cuda" or find_spec("triton") is None:
        return None
    return import_module(f"longdraft.kernels.triton.{name}")


def exact_kernels(name: str, x: Tensor) -> Any | None:
    """The `triton_kernels` whose rows have plain decoding's bits, if LONGDRAFT_EXACT=1 asks for them and x is in half
    precision, else None. Raises ValueError if a package that they need on a GPU is missing."""
    if os.environ.get("LONGDRAFT_EXACT") != "1" or x.dtype not in HALF:
        return None
    if x.is_cuda and liger_layers(x.device.type) is None:
        raise ValueError("LONGDRAFT_EXACT=1: needs triton and liger-kernel; install them, or omit the variable")
    return triton_kernels(name, x.device.type)


def has_flash_attn() -> bool:
    """Whether flash-attn 2 is installed. Version 4 is another package, which has only the folder flash_attn/cute."""
    found = find_spec("flash_attn")
    return found is not None and found.origin is not None


@cache
def varlen_attention() -> Callable[..., Any]:
    """Causal attention over sequences of different lengths in one kernel, as a function: flash-attn's if that is
    installed, else PyTorch's own (`torch.nn.attention.varlen`).

    The function takes q [N, H, d], k and v [M, K, d], all sequences end to end; q_borders and k_borders int32 [S + 1],
    where each sequence starts, and the ends; most_queries and most_keys, at least those of the longest sequence; and
    window. It returns [N, H, d], with gradients, on CUDA in fp16 and bf16 with d a multiple of 8. A sequence's last
    query reads its last `window` keys (None: all), and each query before it stops one key earlier. With `with_lse=True`
    it also returns the natural log-sum-exps of the scaled scores, fp32 [H, N]. If deterministic algorithms are
    required, flash-attn's backward gets an argument; PyTorch's kernel checks by itself.
    """
    return _flash_attn if has_flash_attn() else torch_varlen()


@cache
def torch_varlen() -> Callable[..., Any]:
    """PyTorch's own, like `varlen_attention`."""
    from torch.nn.attention.varlen import varlen_attn

    return partial(_torch_varlen, "enable_gqa" in inspect.signature(varlen_attn).parameters)


def varlen_attention_for(q: Tensor) -> Callable[..., Any] | None:
    """`varlen_attention` if it takes queries like these, [..., d], else None.

    It takes fp16 and bf16 on a GPU of 2020 or later, with d a multiple of 8 up to 256.
    """
    suits = q.is_cuda and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return varlen_attention() if suits and torch.cuda.get_device_capability(q.device) >= (8, 0) else None


def prompt_attention_for(q: Tensor, window: int | None) -> Callable[..., Any] | None:
    """The fastest function that is installed, like `varlen_attention`, for queries like these. With gradients enabled
    it is `varlen_attention_for`.

    On an H100 it is FlashAttention-3's (arXiv 2407.08608; fa3-fwd: bf16, no windows), which is nearly twice as fast as
    version 2; on GPUs of compute capability 9 and 10 it is FlashAttention-4's (flash-attn-4), else
    `varlen_attention_for`. PyTorch's `activate_flash_attention_impl` supports neither: fa3-fwd has no backward pass,
    and what version 4 returns has changed since. Versions 3 and 4 multiply values after a sequence's last key by 0, so
    these must be finite.

    q: [..., d].
    """
    flash, width = varlen_attention_for(q), q.shape[-1]
    three, four = _is_installed("fa3_fwd", "fa3_fwd_interface"), _is_installed("flash_attn", "flash_attn.cute")
    if flash is None or not (three or four) or torch.is_grad_enabled():
        return flash
    major = torch.cuda.get_device_capability(q.device)[0]
    if three and major == 9 and q.dtype == torch.bfloat16 and window is None:
        return _flash_attn_3
    return _flash_attn_4 if four and major in (9, 10) and width <= 128 else flash


@cache
def _is_installed(package: str, module: str) -> bool:
    """Whether the module of an optional package is installed."""
    return find_spec(package) is not None and find_spec(module) is not None


def _flash_attn_3(
    q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: None, with_lse: bool = False
) -> Any:
    from fa3_fwd_interface import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        q, k, v, q_borders, k_borders, most_queries, most_keys, causal=True, return_attn_probs=with_lse
    )


def _flash_attn_4(
    q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: int | None, with_lse: bool = False
) -> Any:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    out, lse = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=q_borders, cu_seqlens_k=k_borders, max_seqlen_q=most_queries, max_seqlen_k=most_keys,
        causal=window is None, window_size=(None, None) if window is None else (window - 1, 0), return_lse=with_lse,
    )  # fmt: skip
    return (out, lse) if with_lse else out


def _flash_attn(
    q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: int | None, with_lse: bool = False
) -> Any:
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    outputs = flash_attn_varlen_func(
        q, k, v, q_borders, k_borders, most_queries, most_keys,
        causal=True, window_size=(_before(window), 0),
        deterministic=torch.are_deterministic_algorithms_enabled(), return_attn_probs=with_lse,
    )  # fmt: skip
    return outputs[:2] if with_lse else outputs  # the third, the attention weights, is set only with dropout


def _torch_varlen(
    says_grouped: bool, q, k, v, q_borders, k_borders, most_queries: int, most_keys: int, window: int | None,
    with_lse: bool = False,
) -> Any:  # fmt: skip
    """says_grouped: whether this PyTorch needs `enable_gqa` for grouped heads; before 2.13 it does not."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if says_grouped else {}
    return varlen_attn(
        q, k, v, q_borders, k_borders, most_queries, most_keys,
        window_size=(_before(window), 0), return_aux=AuxRequest(lse=with_lse), **grouped,
    )  # fmt: skip


def _before(window: int | None) -> int:
    """The window as both functions count it, in keys before a query's own; -1 for all."""
    return -1 if window is None else window - 1
