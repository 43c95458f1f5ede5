"""The labels that drafts train on.

The loss (kernels/linear_loss.py) has parts that are summed and counted separately: the heads of TokenSwift or Medusa,
the noise shifts of LongSpec. N tokens of several document pieces are packed end to end; a label is always in the same
piece as its token. Shapes: N tokens, M labels of a part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.linear_loss import LossPart

TOP_K = 3  # ranks that are counted


def ahead(tokens_N: Tensor, supervised_N: Tensor, borders: Sequence[int], distance: int) -> LossPart:
    """The part in which token t proposes token t + `distance`: all such pairs within a piece whose second token is
    supervised.

    Args:
        tokens_N: token ids. supervised_N: bool; tokens that may be a label.
        borders: where each piece starts, then N.
    """
    device, sizes_P = tokens_N.device, torch.tensor(borders).diff()
    piece_ends_N = torch.tensor(borders[1:]).repeat_interleave(sizes_P).to(device)
    t_N = torch.arange(len(tokens_N), device=device)
    rows = t_N[t_N + distance < piece_ends_N]
    rows = rows[supervised_N[rows + distance]]
    return LossPart(rows, tokens_N[rows + distance].long())
