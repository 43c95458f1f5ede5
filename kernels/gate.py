"""The gate of a feed-forward (SwiGLU and GEGLU, arXiv 2002.05202): SwiGLU's on a GPU is one kernel, Liger's.

Shapes: ... any, F width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend
from longdraft.kernels.reference import gate as reference

# Outputs of one row in Liger's kernel, which takes it whole.
MOST_WIDTH = 65536
# From so many numbers on PyTorch cuts what it computes element by element among threads, wherever a share ends.
_SHARED_OUT_FROM = 32768


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of [..., 2F]: [..., F], with gradients. silu is computed in fp32 and rounded."""
    liger = None
    if gate_up.numel() and gate_up.shape[-1] <= 2 * MOST_WIDTH:
        liger = backend.liger_layers(gate_up.device.type)
    return (liger or reference).gate(gate_up)


def gelu_gate(gate_up: Tensor) -> Tensor:
    """gelu(first half) * second half of [..., 2F], gelu by its tanh formula: [..., F], for frozen weights.

    On a CPU a row's numbers do not depend on the others.
    """

    def gate(gate_up_MX: Tensor) -> Tensor:
        first_MF, up_MF = gate_up_MX.chunk(2, -1)
        return F.gelu(first_MF, approximate="tanh").mul_(up_MF)

    return _few_rows_at_once(gate_up, gate)


def clamped_gate(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """gpt-oss's gate (arXiv 2508.10925): x sigmoid(slope x) (y + 1), x the first half of [..., 2F] but at most `limit`,
    y the second but within +-limit: [..., F], for frozen weights.

    On a CPU a row's numbers do not depend on the others.
    """

    def gate(gate_up_MX: Tensor) -> Tensor:
        clamped_MX = gate_up_MX.clamp(max=limit)
        first_MF, up_MF = clamped_MX.chunk(2, -1)
        opened_MF = torch.sigmoid((clamped_MX * slope).chunk(2, -1)[0])
        return opened_MF.mul_(first_MF).mul_(up_MF.clamp(min=-limit) + 1)

    return _few_rows_at_once(gate_up, gate)


def _few_rows_at_once(gate_up: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """`gate`, which computes its functions of rows that do not lie end to end, as halves of rows do not.

    On a CPU an element's last bit depends on how far it lies from the end of what is computed at once: so that is a
    row, and there are so few rows that no thread's share ends within one.
    """
    rows_MX = gate_up.flatten(0, -2)
    width = rows_MX.shape[1] // 2
    block = len(rows_MX) if gate_up.device.type != "cpu" else (_SHARED_OUT_FROM - 1) // (2 * width)
    out_MF = gate_up.new_empty(len(rows_MX), width)
    for start in range(0, len(rows_MX), max(1, block)):
        out_MF[start : start + max(1, block)] = gate(rows_MX[start : start + max(1, block)])
    return out_MF.view(*gate_up.shape[:-1], width)
