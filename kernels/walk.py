"""The walk on the device: from each tree's root down along the target's choices.

Not here: the choices (kernels/choice.py) and what becomes of the path (infer/accept.py). The plain reference is
reference/walk.py, which also serves on a CPU. Shapes: B slots, N tree nodes, P = max_depth + 1 steps.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference.walk import walk as _reference


def walk(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that the choices confirm: at each node go to the child that carries the node's choice, or stop.

    Args:
        tokens_BN, parents_BN: int64 [B, N], a trie a slot: node 0 is the root, parents are -1 for it, -2 for padding,
            else smaller than the node; siblings carry different tokens.
        choices_BN: int64 [B, N], the target's token behind each node.
        active_B: bool [B]; other slots get count 0.
        max_depth: the path has at most so many nodes below the root, however deep the tree is.

    Returns: rows [B, P], tokens [B, P] and counts [B], all int64: the path's nodes, the root first, the choice at each,
        and how many there are. Places behind a path repeat its last node and choice, so every row is a node's index; an
        inactive slot's path is the one that it would take.
    """
    if (triton := backend.triton_kernels("walk", tokens_BN.device.type)) is not None:
        return triton.walk(tokens_BN, parents_BN, choices_BN, active_B, max_depth)
    if backend.is_host(tokens_BN.device):
        return _reference(tokens_BN, parents_BN, choices_BN, active_B, max_depth)
    return _walk_together(tokens_BN, parents_BN, choices_BN, active_B, max_depth)


def _walk_together(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """All slots together, level by level, with nothing read on the host."""
    nodes_B, alive_B = torch.zeros_like(tokens_BN[:, 0]), active_B
    rows, tokens, counts_B = [], [], torch.zeros_like(nodes_B)
    for _ in range(max_depth + 1):
        chosen_B = choices_BN.gather(1, nodes_B[:, None])[:, 0]
        rows.append(nodes_B)
        tokens.append(chosen_B)
        counts_B = counts_B + alive_B
        found_B, child_B = ((parents_BN == nodes_B[:, None]) & (tokens_BN == chosen_B[:, None])).max(dim=1)
        alive_B = alive_B & found_B
        nodes_B = torch.where(found_B, child_B, nodes_B)
    return torch.stack(rows, 1), torch.stack(tokens, 1), counts_B
