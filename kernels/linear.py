"""The linear layer, y = x W^T + b, with frozen weights in the arithmetic that is fast on the CPU at hand.

Layers that train go through PyTorch. Shapes: M rows, I inputs, N outputs.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend
from longdraft.kernels.cpu import rows
from longdraft.kernels.gate import gate
from longdraft.kernels.rms_norm import rms_norm
from longdraft.kernels.tree import MOST_ROWS

# From this many rows on, fp32 arithmetic beats emulated bf16 although the weight must be converted.
FP32_FROM = 4
# Weights are converted in blocks of this many numbers: 4 MiB in fp32, which stay in the cache until they are used.
BLOCK = 1 << 20


@cache
def emulates_bf16() -> bool:
    """Whether this CPU has no bf16 instructions: PyTorch is then much slower for several rows than in fp32."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def most_rows_in_c() -> int:
    """The most rows of a slot that the C kernels, if available, multiply: as many as their attention takes, so that a
    prompt gives the same bits in one pass and in chunks; more only if PyTorch is slower."""
    return rows.MOST_LINEAR_ROWS if emulates_bf16() else rows.MOST_ATTENTION_ROWS


def prompt_in_c(n_rows: int, dtype: torch.dtype) -> bool:
    """Whether the C kernels, if they are available, multiply a prompt of `n_rows` rows."""
    return dtype == torch.bfloat16 and n_rows <= most_rows_in_c()


def linear(
    x: Tensor,
    weight_NI: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + RMSNorm(x) W^T + b: [..., N]; or the gate of RMSNorm(x) W^T + b: [..., N / 2]. In x's dtype.

    All except the product is optional. Sums are in fp32, and every part is rounded to x's dtype as if computed alone.

    On a CPU, few rows (in bf16, and while decoding in fp32) go through one call of C, whose result for a row does not
    depend on the other rows (cpu/rows.py). Many bf16 rows on a CPU without bf16 instructions are bound by
    arithmetic and run in fp32. On a GPU, LONGDRAFT_EXACT=1 gives up to 128 rows of a slot in half precision to Triton,
    where a row's result does not depend on the others either. PyTorch does the rest.

    Args:
        x: [..., T, I] in the weight's dtype.
        norm: weight [I] and epsilon of an RMSNorm of x.
        gated: return silu(first half of the outputs) * second half.
        residual: of the result's shape, added to it; not with `gated`.
    """
    assert residual is None or not gated
    n_inputs = x.shape[-1]
    n_rows = x.numel() // n_inputs
    # Layers that train take PyTorch's arithmetic while they are validated, too.
    frozen = not (weight_NI.requires_grad or (torch.is_grad_enabled() and x.requires_grad))
    on_cpu = frozen and x.device.type == "cpu"
    # The rows of a slot decide, not those of the batch: a tree needs the same arithmetic as plain decoding.
    few = on_cpu and n_rows > 0 and x.shape[-2] <= most_rows_in_c()
    if few and rows.serves(x.dtype) and rows.can_multiply(weight_NI, gated):
        return rows.linear_rows(x, weight_NI, bias_N, norm, gated, residual)
    if norm is not None:
        x = rms_norm(x, *norm)
    exact = backend.exact_kernels("linear", x) if frozen and x.shape[-2] <= MOST_ROWS else None
    if on_cpu and x.dtype == torch.bfloat16 and n_rows >= FP32_FROM and emulates_bf16():
        y = _through_fp32(x.reshape(n_rows, n_inputs), weight_NI, bias_N).view(*x.shape[:-1], -1)
    elif exact is not None:
        y = exact.linear(x.reshape(n_rows, n_inputs), weight_NI, bias_N).view(*x.shape[:-1], -1)
    else:
        y = F.linear(x, weight_NI, bias_N)
    if gated:
        y = gate(y)
    return y if residual is None else y.add_(residual)


def _through_fp32(x_MI: Tensor, weight_NI: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply bf16 operands in fp32 and round to bf16, without a copy of the whole weight in fp32."""
    n_outputs, n_inputs = weight_NI.shape
    wide_MI = x_MI.float()
    out_MN = x_MI.new_empty(len(x_MI), n_outputs)
    height = max(1, BLOCK // n_inputs)
    for start in range(0, n_outputs, height):
        block = slice(start, start + height)
        bias = None if bias_N is None else bias_N[block].float()
        out_MN[:, block] = F.linear(wide_MI, weight_NI[block].float(), bias)
    return out_MN
