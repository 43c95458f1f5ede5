"""Reference of kernels/best_tokens.py: plain PyTorch, any device."""

import torch
from torch import Tensor


def best_tokens(
    logits_BTV: Tensor,
    count: int,
    divisors_B: Tensor | None = None,
    noise_BN: Tensor | None = None,
    ids_V: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `longdraft.kernels.best_tokens.best_tokens`."""
    scores_BTV = logits_BTV.float()
    if divisors_B is not None:
        scores_BTV = scores_BTV / divisors_B[:, None, None]
    if noise_BN is not None:
        scores_BTV = scores_BTV + (noise_BN if ids_V is None else noise_BN[:, ids_V])[:, None, : scores_BTV.shape[2]]
    best_BTK, words_BTK = scores_BTV.topk(count, dim=-1)
    log_probs_BTK = best_BTK - scores_BTV.logsumexp(-1, keepdim=True)
    return log_probs_BTK.nan_to_num(nan=-torch.inf, neginf=-torch.inf), words_BTK
