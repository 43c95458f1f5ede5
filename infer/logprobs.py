"""Log-probabilities of tokens under the target's own distribution: the softmax of its logits, before a request's
penalties, biases, temperature and filters (infer/choice/slots.py). They are computed only if a request asks for them.

Shapes: B slots, N tree nodes, P places of a path, R rows, V vocabulary, k alternatives.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.infer.sampling import MOST_LOGPROBS


class TokenLogprob(NamedTuple):
    """A token's log-probability, and the ids and log-probabilities of the most probable tokens at its position, the
    most probable one first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits_RV: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's log-probability of its token, fp32 [R]; the k = MOST_LOGPROBS greatest ones, fp32 [R, k]; and their
    ids, int64. k is fixed, because the order of equal ones must not depend on what other requests ask for."""
    logprobs_RV = logits_RV.float().log_softmax(-1)
    top = logprobs_RV.topk(min(MOST_LOGPROBS, logits_RV.shape[-1]), dim=-1)
    return logprobs_RV.gather(-1, tokens_R[:, None])[:, 0], top.values, top.indices


def path_logprobs(logits_BNV: Tensor, nodes_BP: Tensor, tokens_BP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs_of` the tokens that were chosen at a path's nodes: [B, P], [B, P, k] twice.

    It goes place by place, so that no more than [B, V] is alive in fp32. Entries after the path's end are arbitrary.
    """
    slots_B = torch.arange(len(nodes_BP), device=nodes_BP.device)
    places = zip(nodes_BP.unbind(1), tokens_BP.unbind(1), strict=True)
    found = [logprobs_of(logits_BNV[slots_B, nodes_B], tokens_B) for nodes_B, tokens_B in places]
    chosen, values, ids = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    return chosen, values, ids


def read_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], values: Sequence[list[float]], ids: Sequence[list[int]]
) -> list[TokenLogprob]:
    """One entry a token, from lists that may have more entries. Of equally probable tokens the lowest id comes first,
    as in the greedy choice."""
    found = []
    for token, logprob, *top in zip(tokens, logprobs, ids, values, strict=False):
        pairs = sorted(zip(*top, strict=True), key=lambda pair: (-pair[1], pair[0]))
        found.append(TokenLogprob(token, logprob, tuple(pairs)))
    return found
