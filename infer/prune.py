"""Of a proposal the nodes that are worth verifying, best first, at the width that the policy chooses.

A node is worth the chance that verification reaches it: the product, along its path, of its classes' rates
(infer/policy.py, which decides by the expected tokens of each width). Shapes: B slots, N nodes, W nodes kept.
"""

from itertools import accumulate

import torch
from torch import Tensor

from longdraft.infer.depth import worth_of
from longdraft.infer.policy import Policy
from longdraft.infer.tree import PAD, Lists, SlotLists, TokenTree
from longdraft.kernels import backend
from longdraft.kernels.transfer import HostCopy, from_host


def prune(tree: TokenTree, policy: Policy, active_B: Tensor) -> tuple[TokenTree, HostCopy | None]:
    """The nodes of `tree` that are worth a step, padded to one of the policy's widths.

    Returns: them, and on their way to the host the expected tokens by width, for `Policy.decide`; None where the policy
        has decided already.
    """
    if not policy.automatic or tree.width == 1:
        return tree.pad_to(policy.fitting(tree.width)), None
    if backend.is_host(tree.tokens.device):
        return _on_host(tree, policy, active_B), None
    return on_device(tree, policy, active_B)


def _on_host(tree: TokenTree, policy: Policy, active_B: Tensor) -> TokenTree:
    """With lists: of so few nodes they are several times faster than tensors, and the width is this step's own."""
    lists = tree.lists
    expected, orders = [0.0] * tree.width, []
    for slot, (parents, active) in enumerate(zip(lists.parents, active_B.tolist(), strict=True)):
        rates = policy.rates[slot]
        classes = range(tree.width) if lists.classes is None else lists.classes[slot]
        worth = worth_of(parents, classes, rates)
        order = sorted(range(tree.width), key=worth.__getitem__, reverse=True)  # stable: parents first
        orders.append(order)
        if active:
            for place, total in enumerate(accumulate(worth[node] for node in order)):
                expected[place] += total
    policy.decide(expected)
    width = min(policy.width, tree.width)
    nodes = [_picked(lists, slot, order[:width]) for slot, order in enumerate(orders)]
    return TokenTree.from_lists(nodes, tree.tokens.device, policy.fitting(width))


def on_device(tree: TokenTree, policy: Policy, active_B: Tensor) -> tuple[TokenTree, HostCopy]:
    """The same with tensors, at the width that the last step's proposal was worth."""
    device = tree.tokens.device
    classes_BN = tree.classes
    if classes_BN is None:
        classes_BN = torch.arange(tree.width, device=device).expand(tree.tokens.shape)
    log_rates_BN = from_host(torch.tensor(policy.rates), device).log().gather(1, classes_BN)
    log_rates_BN[:, 0] = 0.0
    worth_BN = tree.ancestors.float().bmm(log_rates_BN[:, :, None])[:, :, 0].exp()
    worth_BN = worth_BN.masked_fill(tree.parents == PAD, 0.0)
    worth_BN, order_BN = worth_BN.sort(dim=1, descending=True, stable=True)
    expected = HostCopy((worth_BN * active_B[:, None]).sum(0).cumsum(0))
    width = min(policy.width, tree.width)
    return tree.take(order_BN[:, :width]).pad_to(policy.fitting(width)), expected


def _picked(lists: Lists, slot: int, order: list[int]) -> SlotLists:
    """Tokens, parents and classes of these nodes in this order, parents before children."""
    tokens, parents = lists.tokens[slot], lists.parents[slot]
    places = {node: place for place, node in enumerate(order)}
    moved = [places[parents[node]] if parents[node] >= 0 else parents[node] for node in order]
    classes = order if lists.classes is None else [lists.classes[slot][node] for node in order]
    return [tokens[node] for node in order], moved, classes
