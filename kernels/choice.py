"""The choice rule and its noise, decoding's only source of randomness: a pure function of (seed, position, token).

If no logits processor is used, choice(t) = argmax_v( logits_v / T + g(seed, t, v) ); at T = 0 it is the argmax of the
logits. Temperature, noise and argmax of all nodes are one operation. Of the filters, only top-p has an operation here.
Shapes: B slots, N nodes, J positions, V vocabulary.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.cpu import rows, tokens

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
BELOW_ONE = 1 - 2.0**-24  # the largest fp32 below 1
# Top-p looks at the sum over this many most probable tokens before it sorts the whole vocabulary.
LIKELIEST = 256


def gumbel_noise(seeds_B: Tensor, positions_BJ: Tensor, vocab_size: int) -> Tensor:
    """g(seed, t, v): standard Gumbel noise that depends on its three arguments and on nothing else.

    Philox 4x32-10 with key = seed and counter (v // 4, t, 0, 0); word v % 4 is token v's. So the noise of a token does
    not depend on the vocabulary's size, on the batch, on the device or on what was drawn before. On a GPU Triton
    computes it. On a CPU C computes the words and PyTorch the logarithms; without the C kernels PyTorch computes both,
    with the same bits.

    Args:
        seeds_B: int64, any 64-bit pattern.
        positions_BJ: int64 in [0, 2**32), absolute positions t of the tokens to be chosen.
        vocab_size: V.
    Returns:
        fp32 [B, J, V] on the device of `seeds_B`, finite everywhere: within (-3.1, 22.9).

    Source: Philox from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    if (triton := backend.triton_kernels("choice", seeds_B.device.type)) is not None:
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


def choose(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """Choose the target's token after each node: int64 [B, N].

    Arithmetic is fp32. Of equal scores the lowest id is chosen. NaN counts as the largest score, as in `torch.argmax`,
    so a broken row is not hidden. A row's choice does not depend on the other rows.

    On a GPU Triton computes the noise inside the argmax and stores none of it; elsewhere PyTorch goes node by node.

    Args:
        logits_BNV: fp32, bf16 or fp16, of any strides but the last, which is 1.
        seeds_B: int64, any 64-bit pattern.
        positions_BN: int64 in [0, 2**32), the absolute position of the token to be chosen: the node's plus 1.
        temperatures_B: fp32; 0 is greedy, without noise.

    Source: Gumbel-max. The noise is `gumbel_noise`'s, from the same Philox words; on a GPU its logarithms may
    differ from PyTorch's in their last bits.
    """
    if (triton := backend.triton_kernels("choice", logits_BNV.device.type)) is not None:
        return triton.choose(logits_BNV, seeds_B, positions_BN, temperatures_B)
    # Node by node: the noise of all nodes at once would take far more memory than the logits.
    nodes = zip(logits_BNV.split(1, dim=1), positions_BN.split(1, dim=1), strict=True)
    return torch.cat([choose_reference(logits, seeds_B, here, temperatures_B) for logits, here in nodes], dim=1)


def choose_reference(logits_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, temperatures_B: Tensor) -> Tensor:
    """`choose` by the formula, with all noise at once: several tensors of B x N x V."""
    sampled_B11 = (temperatures_B > 0)[:, None, None]
    scaled_BNV = logits_BNV.float() / torch.where(sampled_B11, temperatures_B[:, None, None], 1.0)
    noisy_BNV = scaled_BNV + gumbel_noise_reference(seeds_B, positions_BN, logits_BNV.shape[-1])
    return torch.where(sampled_B11, noisy_BNV, scaled_BNV).argmax(-1)


def top_p_border(scores_BNV: Tensor, top_p_B11: Tensor) -> Tensor:
    """The least score that top-p keeps in each row, fp32 [B, N, 1]; -inf where top_p is 1.

    Tokens are kept from the most probable one on until their sum reaches top_p, with all that tie with the
    last. A row's border does not depend on the other rows. On a GPU Triton searches for it without sorting.

    Args:
        scores_BNV: fp32, contiguous; -inf for tokens that are dropped already. Probabilities are their softmax.
        top_p_B11: fp32, above 0.

    Source: Holtzman et al., "The curious case of neural text degeneration" (arXiv 1904.09751).
    """
    if (triton := backend.triton_kernels("choice", scores_BNV.device.type)) is not None:
        return triton.top_p_border(scores_BNV, top_p_B11)
    return top_p_border_reference(scores_BNV, top_p_B11)


def top_p_border_reference(scores_BNV: Tensor, top_p_B11: Tensor) -> Tensor:
    """`top_p_border` by sorting. The sum is mostly reached within a few hundred tokens, so a CPU sorts the others only
    if it is not. Elsewhere the host would have to wait to find out."""
    vocab, probs_BNV = scores_BNV.shape[-1], scores_BNV.softmax(-1)
    for most in (min(LIKELIEST, vocab), vocab) if backend.is_host(scores_BNV.device) else (vocab,):
        values_BNK, order_BNK = scores_BNV.topk(most, dim=-1)
        short_BNK = probs_BNV.gather(-1, order_BNK).cumsum(-1) < top_p_B11
        if most == vocab or not bool((short_BNK[..., -1:] & (top_p_B11 < 1)).any()):
            break
    # The token with which the sum reaches top_p is the last one to stay.
    last_BN1 = short_BNK.sum(-1, keepdim=True).clamp(max=values_BNK.shape[-1] - 1)
    return values_BNK.gather(-1, last_BN1).masked_fill(top_p_B11 >= 1, float("-inf"))
