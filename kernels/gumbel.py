"""Gumbel noise as a pure function of (seed, position, token): the one source of randomness of decoding.

Shapes: B sequences, J positions, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.cpu import rows, tokens

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 below 1


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """g(seed, t, v): standard Gumbel noise that depends on its three arguments and on nothing else.

    Philox 4x32-10 with key = seed and counter (v // 4, t, 0, 0); word v % 4 is token v's. So the noise of a token does
    not depend on the vocabulary's size, on the batch, on the device or on what was drawn before. Triton makes it on a
    GPU. On a CPU the words are C's and the logarithms PyTorch's; without the C kernels all is PyTorch's,
    with the same bits.

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
    return gumbel_noise_reference(seeds_B, positions_BJ, vocab_size)


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]):
    """The Philox bijection in 10 rounds. Words are 32-bit values in int64 tensors, which broadcast; returns four.

    A product of two words fits 64 bits unsigned. int64 wraps to the same bits, and the mask after the arithmetic shift
    removes the sign bits again.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + KEY_STEPS[0] & MASK, k1 + KEY_STEPS[1] & MASK
    return c0, c1, c2, c3


def gumbel_noise_reference(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_noise` in PyTorch's integer arithmetic."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds_B.device)
    zero = torch.zeros((), dtype=torch.int64, device=seeds_B.device)
    key = (seeds_B & MASK)[:, None, None], (seeds_B >> 32 & MASK)[:, None, None]
    words = philox_4x32((blocks, positions_BJ[:, :, None] & MASK, zero, zero), key)
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(2)[..., :vocab_size]
    return gumbel_of(bits)


def gumbel_of(words: Tensor) -> Tensor:
    """Turn 32-bit words into standard Gumbel noise, fp32: -log(-log(1 - w)) with w = (word + 1/2) / 2**32.

    w lies in (0, 1). Small values, which give large noise, keep 24 significant bits; the clamp catches the words that
    would round to 1.
    """
    return gumbel_from_(words.float().add_(0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE).neg_())


def gumbel_from_(negated: Tensor) -> Tensor:
    """`gumbel_of` from -w, in place."""
    return negated.log1p_().neg_().log_().neg_()
