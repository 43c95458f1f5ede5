"""One level of a beam: of the best tokens behind each node of a level the best of all, as nodes of a tree.

Not here: what scores a token (kernels/best_tokens.py), how wide and deep a tree is (infer/drafters/longspec.py). The
plain reference is reference/beam.py; in C it is one call in place of some twenty operations on a few numbers each.
Shapes: B slots, T nodes that are extended, C candidates behind each, W nodes of the new level, N rows of the tree so
far, E draft vocabulary, K borders.
"""

from typing import NamedTuple

from torch import Tensor

from longdraft.kernels.cpu_impl import rows
from longdraft.kernels.reference.beam import beam_level as _reference


class Level(NamedTuple):
    """The new nodes, the best first.

    Attributes:
        nodes_3BW: int64, their tokens, their parents among the tree's nodes, and their classes. Siblings carry
            different tokens. A candidate at -inf is padding: its parent is -2, its token any.
        scores_BW: fp32, the sum of log-probabilities along their paths; -inf for padding.
        open_BWN: bool, which rows of the tree each reads: its parent's, and behind them of the level its own.
    """

    nodes_3BW: Tensor
    scores_BW: Tensor
    open_BWN: Tensor


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    open_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None = None,
) -> Level:
    """The `width` best children of all T nodes, or all where there are fewer.

    Args:
        log_probs_BTC: fp32, of the best candidates behind each node, the best first; no NaN. words_BTC: int64.
        scores_BT: fp32, of the nodes. open_BTN: bool, rows that they read.
        first_node: the tree's number of the first of the T nodes; the others follow.
        first_class: of a child whose log-probability is above all borders; each border that it lies below adds one.
        borders_K: fp32, ascending, of minus the log-probability.
        token_ids_E: int64, the target's ids of the words; None: they are ids.
    """
    width = min(width, log_probs_BTC[0].numel())
    way = rows.beam_level if log_probs_BTC.device.type == "cpu" and rows.library() is not None else _reference
    found = way(log_probs_BTC, words_BTC, scores_BT, open_BTN, width, first_node, first_class, borders_K, token_ids_E)
    return Level(*found)
