"""The accepted path of each tree: from its root down along the target's choices.

Shapes: B slots, N tree nodes, P = max_depth + 1 places of a path.
"""

import torch
from torch import Tensor

from longdraft.kernels import backend


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each tree from its root: at a node, go to the child that carries the node's choice, or stop.

    On a GPU this is one Triton launch, elsewhere PyTorch.

    Args:
        tokens_BN, parents_BN: int64, one trie per slot. Node 0 is the root. A parent is -1 for the root, -2 for
            padding, and otherwise an index smaller than the node's. Siblings carry different tokens.
        choices_BN: int64, the target's token behind each node.
        active_B: bool; the other slots get a count of 0.
        max_depth: limit on the path's nodes below the root, however deep the tree is.
    Returns:
        Nodes [B, P], tokens [B, P] and counts [B], all int64: the path's nodes (the root first), the choice at each,
        and how many nodes there are. Places behind a path repeat its last node and choice, so every place is the index
        of a node. An inactive slot has the path that it would take if it were active.
    """
    triton = backend.triton_kernels("accepted_path", tokens_BN.device.type)
    follow = accepted_path_reference if triton is None else triton.accepted_path
    return follow(tokens_BN, parents_BN, choices_BN, active_B, max_depth)


def accepted_path_reference(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`accepted_path` in plain PyTorch. Reads nothing on the host."""
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
