"""The choice rule where no processor changes the logits: temperature, noise and argmax of all nodes at once.

choice(t) = argmax_v( logits_v / T + g(seed, t, v) ), at T = 0 the argmax of the logits. Not here: penalties and filters
(infer/penalties.py, infer/sampling.py). The plain reference is reference/choice.py; Triton makes the noise where it
takes the argmax and holds none of it. Shapes: B slots, N nodes, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.gumbel import gumbel_noise
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
    if backend.reads_are_free(logits_BNV.device):
        return _by_row(logits_BNV, seeds_B, positions_BN, temperatures_B)
    # Node by node: the noise of all of them would take far more memory than the logits.
    parts = zip(logits_BNV.split(1, dim=1), positions_BN.split(1, dim=1), strict=True)
    return torch.cat([_reference(logits, seeds_B, positions, temperatures_B) for logits, positions in parts], dim=1)


def _by_row(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """One row of the vocabulary at a time stays in the cache of a CPU, and greedy slots make no noise."""
    n_slots, n_nodes, vocab = logits_BNV.shape
    rows = []
    for slot, sampled in enumerate((temperatures_B > 0).tolist()):
        seed_1 = seeds_B[slot : slot + 1]
        for node in range(n_nodes):
            scores_V = logits_BNV[slot, node].float()  # the argmax of bf16 costs four times fp32's with the conversion
            if sampled:
                noise_V = gumbel_noise(seed_1, positions_BN[slot : slot + 1, node : node + 1], vocab)[0, 0]
                scores_V = noise_V.add_(scores_V / temperatures_B[slot])
            rows.append(scores_V.argmax())
    return torch.stack(rows).view(n_slots, n_nodes)
