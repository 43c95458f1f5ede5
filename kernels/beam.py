"""How a draft ranks its candidates: the best tokens of each node, and one level of beam search over a token tree.

A word is an index into a row of logits: a token's id unless the draft has a restricted vocabulary.
Shapes: B slots, T nodes that are extended, V vocabulary of the logits, K tokens or borders, C candidates of each node,
W nodes of the new level, E draft vocabulary; N vocabulary of the noise, in `beam_level` the rows of the tree so far.
"""

from typing import NamedTuple

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

    On a CPU, fp32 and bf16 go through C, which never holds all scores of a row, for up to MOST_TOKENS tokens;
    everything else goes through PyTorch.

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


class Level(NamedTuple):
    """The nodes of the new level, best first."""

    # int64: tokens, parents (indices into the tree) and classes. Siblings carry different tokens. A candidate whose
    # score is -inf is padding: its parent is -2 and its token arbitrary.
    nodes_3BW: Tensor
    scores_BW: Tensor  # fp32, the sum of log-probabilities along each node's path; -inf for padding
    ancestors_BWN: Tensor  # bool [B, W, N + W], a node's ancestors and itself among the tree's rows, the new ones last


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    ancestors_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None = None,
) -> Level:
    """Choose the `width` best children of all T nodes, or all of them if there are fewer.

    On a CPU this is one C call instead of some twenty operations on a few numbers each; elsewhere it is PyTorch.

    Args:
        log_probs_BTC: fp32, of the best candidates after each node, best first; no NaN.
        words_BTC: int64, the candidates as draft-vocabulary ids.
        scores_BT: fp32, the nodes' sums of log-probabilities.
        ancestors_BTN: bool, each node's ancestors and itself among the rows of the tree.
        width: W, the number of new nodes.
        first_node: the index in the tree of the first of the T nodes; the others follow it.
        first_class: the class of a child whose surprise (minus its log-probability) exceeds no border; each border that
            it exceeds adds one.
        borders_K: fp32, ascending, in units of surprise.
        token_ids_E: int64, the target's id of each draft-vocabulary id; None if they are the same.
    """
    width = min(width, log_probs_BTC[0].numel())
    on_cpu = log_probs_BTC.device.type == "cpu" and rows.library() is not None
    level = tokens.beam_level if on_cpu else beam_level_reference
    inputs = log_probs_BTC, words_BTC, scores_BT, ancestors_BTN, width, first_node, first_class, borders_K, token_ids_E
    return Level(*level(*inputs))


def beam_level_reference(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    ancestors_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`beam_level` in plain PyTorch."""
    scores_BW, places_BW = (scores_BT[:, :, None] + log_probs_BTC).flatten(1).topk(width, dim=-1)
    words_BW = words_BTC.flatten(1).gather(1, places_BW)
    surprise_BW = -log_probs_BTC.flatten(1).gather(1, places_BW)
    above_BW, padding_BW = places_BW // log_probs_BTC.shape[2], scores_BW.isneginf()
    tokens_BW = words_BW if token_ids_E is None else token_ids_E[words_BW]
    parents_BW = (first_node + above_BW).masked_fill(padding_BW, -2)
    nodes_3BW = torch.stack((tokens_BW, parents_BW, first_class + torch.bucketize(surprise_BW, borders_K)))
    itself_WW = torch.eye(width, dtype=torch.bool, device=scores_BT.device).expand(len(scores_BT), -1, -1)
    above_BWN = ancestors_BTN.gather(1, above_BW[:, :, None].expand(-1, -1, ancestors_BTN.shape[2]))
    return nodes_3BW, scores_BW, torch.cat((above_BWN, itself_WW), 2)
