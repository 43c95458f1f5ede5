"""The gate of a feed-forward (SwiGLU, arXiv 2002.05202): on a GPU one kernel, Liger's. Shapes: ... any, F width."""

from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import gate as reference

# Outputs of one row in Liger's kernel, which takes it whole.
MOST_WIDTH = 65536


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of [..., 2F]: [..., F], with gradients. silu is computed in fp32 and rounded."""
    liger = None
    if gate_up.numel() and gate_up.shape[-1] <= 2 * MOST_WIDTH:
        liger = backend.liger_layers(gate_up.device.type)
    return (liger or reference).gate(gate_up)
