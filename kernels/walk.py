"""The walk on the device: from each tree's root down along the target's choices.

Not here: the choices (kernels/choice.py) and what becomes of the path (infer/accept.py). The plain reference is
reference/walk.py, which also serves on a CPU. Shapes: B slots, N tree nodes, P = max_depth + 1 steps.
"""

from collections.abc import Callable

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
    return walk_along(
        lambda nodes_B, _: choices_BN.gather(1, nodes_B[:, None])[:, 0], tokens_BN, parents_BN, active_B, max_depth
    )


def walk_along(
    choose: Callable[[Tensor, int], Tensor], tokens_BN: Tensor, parents_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`walk` where a node's choice is made when the walk gets there: all slots together, level by level.

    Args:
        choose: (nodes int64 [B], depth) -> int64 [B], the target's token behind each slot's node; called for the nodes
            of the path only, at most max_depth + 1 times.

    Returns: as `walk`, but that behind a path nothing is said of `tokens`, and that P ends with the longest path where
        reading on the host is free. Elsewhere nothing is read: P = max_depth + 1.
    """
    nodes_B, alive_B = torch.zeros_like(tokens_BN[:, 0]), active_B
    rows, tokens, counts_B = [], [], torch.zeros_like(nodes_B)
    for depth in range(max_depth + 1):
        chosen_B = choose(nodes_B, depth)
        rows.append(nodes_B)
        tokens.append(chosen_B)
        counts_B = counts_B + alive_B
        if depth == max_depth:
            break
        match_BN = (parents_BN == nodes_B[:, None]) & (tokens_BN == chosen_B[:, None])
        found_B, child_B = match_BN.max(dim=1)
        alive_B = alive_B & found_B
        if backend.is_host(alive_B.device) and not alive_B.any():
            break
        nodes_B = torch.where(found_B, child_B, nodes_B)
    return torch.stack(rows, 1), torch.stack(tokens, 1), counts_B
