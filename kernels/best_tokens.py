"""The most probable tokens of rows of logits with their log-probabilities, as a draft ranks its candidates.

Shapes: B slots, T rows, V vocabulary, K tokens, N vocabulary of the noise.
"""

import torch
from torch import Tensor

from longdraft.kernels.cpu import rows, tokens

# The C kernel's limit on `count`; above it, sorting is faster.
MOST_TOKENS = 64


def best_tokens(
    logits_BTV: Tensor,
    count: int,
    divisors_B: Tensor | None = None,
    noise_BN: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the `count` largest scores of each row, where a score is logit / divisor + noise; largest first.

    On a CPU, fp32 and bf16 go through C, which never holds all scores of a row, for up to MOST_TOKENS tokens; all else
    through PyTorch.

    Args:
        logits_BTV: fp32, bf16 or fp16; arithmetic is fp32.
        count: K, at most V.
        divisors_B: fp32, above 0; None: 1.
        noise_BN: fp32, the noise of each slot; None: none.
        ids_V: int64 in [0, N), the index in noise_BN of each word; None: the word itself, and N is at least V.
    Returns:
        log_probs_BTK: fp32, of the softmax over the row's scores; -inf for a score of -inf and in a row that has NaN.
        words_BTK: int64, indices into V, all different; arbitrary for a score of -inf.
    """
    in_c = logits_BTV.device.type == "cpu" and logits_BTV.dtype in rows.SUFFIXES and count <= MOST_TOKENS
    if in_c and rows.library() is not None:
        return tokens.best_tokens(logits_BTV, count, divisors_B, noise_BN, ids_V)
    return best_tokens_reference(logits_BTV, count, divisors_B, noise_BN, ids_V)


def best_tokens_reference(
    logits_BTV: Tensor,
    count: int,
    divisors_B: Tensor | None = None,
    noise_BN: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`best_tokens` in plain PyTorch."""
    scores_BTV = logits_BTV.float()
    if divisors_B is not None:
        scores_BTV = scores_BTV / divisors_B[:, None, None]
    if noise_BN is not None:
        scores_BTV = scores_BTV + (noise_BN if ids_V is None else noise_BN[:, ids_V])[:, None, : scores_BTV.shape[2]]
    best_BTK, words_BTK = scores_BTV.topk(count, dim=-1)
    log_probs_BTK = best_BTK - scores_BTV.logsumexp(-1, keepdim=True)
    return log_probs_BTK.nan_to_num(nan=-torch.inf, neginf=-torch.inf), words_BTK
