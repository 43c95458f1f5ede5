"""Of rows of logits the most probable tokens with their log-probabilities, as a draft ranks its candidates.

Not here: which noise and which penalties (infer/sampling.py). The plain reference is reference/best_tokens.py; in C the
scores of a row are never in memory as a whole.
Shapes: B slots, T rows, V vocabulary, K tokens, N vocabulary of the noise.
"""

from torch import Tensor

from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.reference.best_tokens import best_tokens as _reference

# In C; beyond, sorting is faster.
MOST_TOKENS = 64


def best_tokens(
    logits_BTV: Tensor,
    count: int,
    divisors_B: Tensor | None = None,
    noise_BN: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row, logits / divisor + noise, the largest first.

    Args:
        logits_BTV: fp32, bf16 or fp16; arithmetic is fp32.
        count: K, at most V.
        divisors_B: fp32, above 0; None: 1.
        noise_BN: fp32, of each slot; None: none.
        ids_V: int64, the place in noise_BN of each word, below N; None: its own, N at least V.

    Returns:
        log_probs_BTK: fp32, of the softmax over the row's scores; -inf for a score of -inf and where a row has NaN.
        words_BTK: int64, indices into V, all different; those at -inf are any.
    """
    here = logits_BTV.device.type == "cpu" and logits_BTV.dtype in rows.SUFFIXES and count <= MOST_TOKENS
    if here and rows.library() is not None:
        return rows.best_tokens(logits_BTV, count, divisors_B, noise_BN, ids_V)
    return _reference(logits_BTV, count, divisors_B, noise_BN, ids_V)
