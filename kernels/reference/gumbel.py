"""Philox 4x32-10 and the Gumbel noise made of it, in PyTorch integer arithmetic (any device)."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 below 1


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10):
    """The Philox bijection. Words are 32-bit values held in int64 tensors that broadcast; returns four such tensors.

    A product of two words fits 64 bits unsigned; int64 wraps to the same bits, and the mask after the arithmetic shift
    takes the sign bits off again.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK, (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = k0 + KEY_STEPS[0] & MASK, k1 + KEY_STEPS[1] & MASK
    return c0, c1, c2, c3


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """See kernels/gumbel.py."""
    blocks = torch.arange((vocab_size + 3) // 4, device=seeds_B.device)
    zero = torch.zeros((), dtype=torch.int64, device=seeds_B.device)
    key = (seeds_B & MASK)[:, None, None], (seeds_B >> 32 & MASK)[:, None, None]
    words = philox_4x32((blocks, positions_BJ[:, :, None] & MASK, zero, zero), key)
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).flatten(2)[..., :vocab_size]
    return gumbel_of(bits)


def gumbel_of(words: Tensor) -> Tensor:
    """32-bit words to standard Gumbel noise, fp32: -log(-log(1 - w)) of w = (word + 1/2) / 2**32.

    w lies in (0, 1): small values keep 24 bits of their own, which is where large noise comes from, and the clamp takes
    the words that would round to 1.
    """
    return gumbel_from_(words.float().add_(0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE).neg_())


def gumbel_from_(negated: Tensor) -> Tensor:
    """The same from -w, in place."""
    return negated.log1p_().neg_().log_().neg_()
