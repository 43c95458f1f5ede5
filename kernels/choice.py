"""The choice rule where no processor changes the logits: temperature, noise and argmax of all nodes at once.

choice(t) = argmax_v( logits_v / T + g(seed, t, v) ), at T = 0 the argmax of the logits. Not here: penalties and filters
(infer/penalties.py, infer/sampling.py). The plain reference is reference/choice.py; Triton makes the noise where it
takes the argmax and holds none of it. Shapes: B slots, N nodes, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference.choice import choose as _reference


def choose(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """The target's token behind each node: int64 [B, N].

    Arithmetic is fp32. Of equal scores the lowest id is chosen; a NaN counts as above all, as in `torch.argmax`, so a
    broken row is not hidden. A row's choice does not depend on the other rows.

    Args:
        logits_BNV: fp32, bf16 or fp16, of any strides but the last, which is 1.
        seeds_B: int64 [B], any 64-bit pattern.
        positions_BN: int64 [B, N], the absolute position of the token to be chosen (a node's own and one), in
            [0, 2**32).
        temperatures_B: fp32 [B]; 0 is greedy, without noise.

    Source: Gumbel-max; the noise is kernels/gumbel.py's, the same Philox words. On a GPU its logarithms may differ from
    PyTorch's in their last bits.
    """
    if (triton := backend.triton_kernels("choice", logits_BNV.device.type)) is not None:
        return triton.choose(logits_BNV, seeds_B, positions_BN, temperatures_B)
    # Node by node: the noise of all of them would take far more memory than the logits.
    parts = zip(logits_BNV.split(1, dim=1), positions_BN.split(1, dim=1), strict=True)
    return torch.cat([_reference(logits, seeds_B, positions, temperatures_B) for logits, positions in parts], dim=1)
