"""Reference of kernels/accepted_path.py: all slots together, level by level, any device."""

import torch
from torch import Tensor


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `longdraft.kernels.accepted_path.accepted_path`. Reads nothing on the host."""
    nodes_B, alive_B = torch.zeros_like(tokens_BN[:, 0]), active_B
    path, tokens, counts_B = [], [], torch.zeros_like(nodes_B)
    for _ in range(max_depth + 1):
        chosen_B = choices_BN.gather(1, nodes_B[:, None])[:, 0]
        path.append(nodes_B)
        tokens.append(chosen_B)
        counts_B = counts_B + alive_B
        found_B, child_B = ((parents_BN == nodes_B[:, None]) & (tokens_BN == chosen_B[:, None])).max(dim=1)
        alive_B = alive_B & found_B
        nodes_B = torch.where(found_B, child_B, nodes_B)
    return torch.stack(path, 1), torch.stack(tokens, 1), counts_B
