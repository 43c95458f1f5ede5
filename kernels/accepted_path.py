"""The accepted path of each tree: from its root down along the target's choices.

Not here: the choices (kernels/choice.py) and what becomes of the path (infer/accept.py). The plain reference is
reference/accepted_path.py. Shapes: B slots, N tree nodes, P = max_depth + 1 places of a path.
"""

from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.reference import accepted_path as reference


def accepted_path(
    tokens_BN: Tensor, parents_BN: Tensor, choices_BN: Tensor, active_B: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes that the choices confirm: at each node go to the child that carries the node's choice, or stop.

    Args:
        tokens_BN, parents_BN: int64 [B, N], a trie a slot: node 0 is the root, parents are -1 for it, -2 for padding,
            else smaller than the node; siblings carry different tokens.
        choices_BN: int64 [B, N], the target's token behind each node.
        active_B: bool [B]; other slots get count 0.
        max_depth: the path has at most so many nodes below the root, however deep the tree is.

    Returns: nodes [B, P], tokens [B, P] and counts [B], all int64: the path's nodes, the root first, the choice at
        each, and how many there are. Places behind a path repeat its last node and choice, so every place is a node's
        index; an inactive slot's path is the one that it would take.
    """
    implementation = backend.triton_kernels("accepted_path", tokens_BN.device.type) or reference
    return implementation.accepted_path(tokens_BN, parents_BN, choices_BN, active_B, max_depth)
