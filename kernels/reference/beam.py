"""Reference of kernels/beam.py: plain PyTorch, any device. Shapes as there."""

import torch
from torch import Tensor


def beam_level(
    log_probs_BTC: Tensor,
    words_BTC: Tensor,
    scores_BT: Tensor,
    open_BTN: Tensor,
    width: int,
    first_node: int,
    first_class: int,
    borders_K: Tensor,
    token_ids_E: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.beam.beam_level`."""
    scores_BW, places_BW = (scores_BT[:, :, None] + log_probs_BTC).flatten(1).topk(width, dim=-1)
    words_BW = words_BTC.flatten(1).gather(1, places_BW)
    surprise_BW = -log_probs_BTC.flatten(1).gather(1, places_BW)
    above_BW, padding_BW = places_BW // log_probs_BTC.shape[2], scores_BW.isneginf()
    tokens_BW = words_BW if token_ids_E is None else token_ids_E[words_BW]
    parents_BW = (first_node + above_BW).masked_fill(padding_BW, -2)
    nodes_3BW = torch.stack((tokens_BW, parents_BW, first_class + torch.bucketize(surprise_BW, borders_K)))
    own_WW = torch.eye(width, dtype=torch.bool, device=scores_BT.device).expand(len(scores_BT), -1, -1)
    above_BWN = open_BTN.gather(1, above_BW[:, :, None].expand(-1, -1, open_BTN.shape[2]))
    return nodes_3BW, scores_BW, torch.cat((above_BWN, own_WW), 2)
