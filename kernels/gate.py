"""The gate of a feed-forward (SwiGLU and GEGLU, arXiv 2002.05202): SwiGLU's on a GPU is one kernel, Liger's.

Shapes: ... any, F width.
"""

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

    On a CPU a row's numbers do not depend on the others: an element's last bit depends on how far it lies from the end
    of what is computed at once, so that is a row, of few rows at a time.
    """
    rows_MX = gate_up.flatten(0, -2)
    width = rows_MX.shape[1] // 2
    block = len(rows_MX) if gate_up.device.type != "cpu" else (_SHARED_OUT_FROM - 1) // width
    out_MF = gate_up.new_empty(len(rows_MX), width)
    for start in range(0, len(rows_MX), max(1, block)):
        first, up = rows_MX[start : start + max(1, block)].chunk(2, -1)
        out_MF[start : start + max(1, block)] = F.gelu(first, approximate="tanh").mul_(up)
    return out_MF.view(*gate_up.shape[:-1], width)
