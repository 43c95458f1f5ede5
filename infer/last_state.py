"""The target's state before each slot's root, which heads that are chained or parallel propose from.

Shapes: B slots, T tokens of a chunk, N tree nodes, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.infer.accept import AcceptResult
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, TokenTree
from longdraft.kernels.transfer import integers

NOWHERE = -2  # so that no position stands right behind it


class LastState:
    """Follows the hidden state at the last committed position before the root.

    Attributes:
        hidden_BD: the states.
        at_B: int64, which position's each is; NOWHERE where there is none: after a prompt of one token, or where an
            outer engine took tokens back.
    """

    def __init__(self, batch: int, width: int, dtype: torch.dtype, device: torch.device):
        self.hidden_BD = torch.zeros(batch, width, dtype=dtype, device=device)
        self.at_B = torch.full((batch,), NOWHERE, dtype=torch.int64, device=device)

    @property
    def batch(self) -> int:
        return len(self.at_B)

    def on_start(self, slots: Sequence[int]) -> None:
        self.at_B.index_fill_(0, integers(slots, self.at_B.device), NOWHERE)

    def on_prefill(self, slots: Sequence[int], hidden_BTD: Tensor) -> None:
        """These slots' next tokens have these states."""
        where = integers(slots, self.at_B.device)
        self.hidden_BD[where] = hidden_BTD[:, -1].to(self.hidden_BD.dtype)
        self.at_B[where] = self.at_B[where].clamp(min=-1) + hidden_BTD.shape[1]

    def on_taken_over(self, slots: Sequence[int], count: int) -> None:
        """The states of the first tokens, so many, are not known; `on_prefill` tells of those behind them."""
        self.at_B.index_fill_(0, integers(slots, self.at_B.device), count - 1)

    def update(self, state: SlotState, accepted: AcceptResult, hidden_BND: Tensor) -> None:
        """The state at the last accepted node, in place; `state` stands behind the step."""
        nodes_B, took_part_B = accepted.last(accepted.nodes), accepted.counts > 0
        last_BD = hidden_BND[torch.arange(len(nodes_B), device=nodes_B.device), nodes_B].to(self.hidden_BD.dtype)
        self.hidden_BD.copy_(torch.where(took_part_B[:, None], last_BD, self.hidden_BD))
        self.at_B.copy_(torch.where(took_part_B, state.positions - 1, self.at_B))

    def rewind(self, lengths_B: Tensor) -> None:
        self.at_B.masked_fill_(self.at_B >= lengths_B, NOWHERE)

    def known_only(self, tree: TokenTree, state: SlotState) -> TokenTree:
        """The tree, without its nodes on slots whose state before the root is not known."""
        unknown_B = (self.at_B != state.positions - 1) | ~state.active
        return tree.with_tokens(tree.tokens, tree.parents.masked_fill(unknown_B[:, None] & (tree.parents >= 0), PAD))
