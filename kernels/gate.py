"""The gate of a feed-forward: SwiGLU's and GEGLU's (arXiv 2002.05202), and gpt-oss's.

Shapes: ... any leading shape, M rows, F width, X = 2 F.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend

# From this many elements on, PyTorch splits an elementwise operation among threads, at any element.
_SPLIT_FROM = 32768


def gate(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate, silu(first half) * second half of [..., 2F]: [..., F] in the same dtype, with gradients.

    silu is computed in fp32 and rounded. On a GPU Liger's kernel runs, elsewhere PyTorch.
    """
    liger = None
    if gate_up.numel() and gate_up.shape[-1] <= 2 * backend.LIGER_WIDTH:
        liger = backend.liger_layers(gate_up.device.type)
    return gate_reference(gate_up) if liger is None else liger.gate(gate_up)


def gelu_gate(gate_up: Tensor) -> Tensor:
    """GEGLU's gate, gelu(first half) * second half of [..., 2F], with the tanh formula: [..., F]. No gradient.

    PyTorch runs on every device: Liger's GEGLU takes the halves as two contiguous tensors, which means copies. On a CPU
    a row's result does not depend on the other rows.
    """

    def gate(gate_up_MX: Tensor) -> Tensor:
        first_MF, up_MF = gate_up_MX.chunk(2, -1)
        return F.gelu(first_MF, approximate="tanh").mul_(up_MF)

    return _few_rows_at_once(gate_up, gate)


def clamped_gate(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """gpt-oss's gate (arXiv 2508.10925), x * sigmoid(slope * x) * (y + 1): [..., F]. No gradient.

    x is the first half of [..., 2F], clamped to at most `limit`; y is the second half, clamped to +-limit. PyTorch runs
    on every device. On a CPU a row's result does not depend on the other rows.
    """

    def gate(gate_up_MX: Tensor) -> Tensor:
        clamped_MX = gate_up_MX.clamp(max=limit)
        first_MF, up_MF = clamped_MX.chunk(2, -1)
        opened_MF = torch.sigmoid((clamped_MX * slope).chunk(2, -1)[0])
        return opened_MF.mul_(first_MF).mul_(up_MF.clamp(min=-limit) + 1)

    return _few_rows_at_once(gate_up, gate)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, in x's dtype.

    On a CPU an element's bits do not depend on its place: PyTorch computes the last elements of a run by another
    formula, so the result is rounded from fp64.
    """
    return x.double().sigmoid_().to(x.dtype) if x.device.type == "cpu" else x.sigmoid()


def _few_rows_at_once(gate_up: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `gate`, on a CPU to one block of rows at a time.

    There an element's last bit depends on its distance from the end of the contiguous run that it is computed in.
    `gate` reads halves of rows, so that run is a row, and PyTorch does not split a block this small among threads.
    """
    if gate_up.device.type != "cpu":
        return gate(gate_up)
    rows_MX, width = gate_up.flatten(0, -2), gate_up.shape[-1] // 2
    out_MF, block = gate_up.new_empty(len(rows_MX), width), max(1, (_SPLIT_FROM - 1) // (2 * width))
    for start in range(0, len(rows_MX), block):
        out_MF[start : start + block] = gate(rows_MX[start : start + block])
    return out_MF.view(*gate_up.shape[:-1], width)


def gate_reference(gate_up: Tensor) -> Tensor:
    """`gate` in plain PyTorch."""
    first, up = gate_up.chunk(2, -1)
    opened = F.silu(first)
    return opened * up if opened.requires_grad else opened.mul_(up)


def clamped_gate_reference(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """`clamped_gate` in plain PyTorch."""
    first, up = gate_up.chunk(2, -1)
    first, up = first.clamp(max=limit), up.clamp(-limit, limit)
    return first * torch.sigmoid(slope * first) * (up + 1)
