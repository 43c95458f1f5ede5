"""Gumbel noise as a pure function of (seed, position, token): the one source of randomness of decoding.

Not here: how the noise is used (infer/slot_sampling.py). Shapes: B sequences, J positions, V vocabulary.
"""

from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.cpu_impl import rows, tokens
from longdraft.kernels.reference.gumbel import gumbel_from_
from longdraft.kernels.reference.gumbel import gumbel_noise as _reference


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """g(seed, t, v): standard Gumbel noise that depends on its three arguments and on nothing else.

    Philox 4x32-10 with key = seed and counter (v // 4, t, 0, 0); word v % 4 is token v's. So the noise of a token does
    not depend on the vocabulary's size, on the batch, on the device or on what was drawn before. Triton makes it on a
    GPU. On a CPU the words are C's and the logarithms PyTorch's; without the C kernels all is PyTorch's
    (reference/gumbel.py), with the same bits.

    Args:
        seeds_B: int64, any 64-bit pattern.
        positions_BJ: int64 in [0, 2**32), absolute positions t of the tokens to be chosen.
        vocab_size: V.
    Returns:
        fp32 [B, J, V] on the device of `seeds_B`, finite everywhere: within (-3.1, 22.9).

    Source: Philox from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    if (triton := backend.triton_kernels("gumbel", seeds_B.device.type)) is not None:
        return triton.gumbel_noise(seeds_B, positions_BJ, vocab_size)
    if seeds_B.device.type == "cpu" and rows.library() is not None:
        return gumbel_from_(tokens.negated_uniform(seeds_B, positions_BJ, vocab_size))
    return _reference(seeds_B, positions_BJ, vocab_size)
