"""The accepted path of each tree: from its root down along the target's choices.

Not here: the choices (kernels/choice.py) and what becomes of the path (infer/accept.py).
Shapes: B slots, N tree nodes, P = max_depth + 1 places of a path.
"""

from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import accepted_path as reference


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow each tree from its root: at a node, go to the child that carries the node's choice, or stop.

    On a GPU this is one Triton launch, elsewhere PyTorch (reference/accepted_path.py).

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
    implementation = backend.triton_kernels("accepted_path", tokens_BN.device.type) or reference
    return implementation.accepted_path(tokens_BN, parents_BN, choices_BN, active_B, max_depth)
