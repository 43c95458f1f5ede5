"""Log-probabilities of tokens under the target's own distribution: the softmax of its logits, before a request's
penalties, biases, temperature and filters (infer/choice/slots.py). They are computed only if a request asks for them.

Shapes: B slots, N tree nodes, P places of a path, V vocabulary, k alternatives.
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


def path_logprobs(logits_BNV: Tensor, nodes_BP: Tensor, tokens_BP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For the tokens that were chosen at a path's nodes, their log-probabilities, fp32 [B, P]; the k = MOST_LOGPROBS
    greatest ones at each node, fp32 [B, P, k]; and their ids, int64. Entries after the path's end are arbitrary.

    k is fixed, because the order of equal ones must not depend on what other requests ask for. The loop goes place by
    place, so that no more than [B, V] is alive in fp32.
    """
    slots_B, found = torch.arange(len(nodes_BP), device=nodes_BP.device), []
    for nodes_B, tokens_B in zip(nodes_BP.unbind(1), tokens_BP.unbind(1), strict=True):
        logprobs_BV = logits_BNV[slots_B, nodes_B].float().log_softmax(-1)
        top = logprobs_BV.topk(min(MOST_LOGPROBS, logprobs_BV.shape[1]), dim=1)
        found.append((logprobs_BV.gather(1, tokens_B[:, None])[:, 0], top.values, top.indices))
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
