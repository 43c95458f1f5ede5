"""Every slot's tokens by absolute position, on the device. Penalties read them.

`accept` writes each choice to the position it has if the path continues, so a node's history is the context and its
ancestors in the tree, and no node is penalised for another branch. Shapes: B slots, S capacity, P positions, C tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.transfer import fill_from_host


class History:
    """int64 [B, S] tokens, valid up to each slot's root, and int64 [B] prompt lengths.

    Tokens beyond the root are leftovers of the last step.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str = "cpu"):
        # One more column receives dropped tokens, so that `write` never reads positions on the host.
        self._with_dropped = torch.zeros(batch, capacity + 1, dtype=torch.int64, device=device)
        self.tokens = self._with_dropped[:, :capacity]
        self.prompt_lengths = torch.zeros(batch, dtype=torch.int64, device=device)

    def of_slots(self, slots: slice) -> "History":
        """The history of these slots alone, in the same storage."""
        some = History.__new__(History)
        some._with_dropped, some.tokens = self._with_dropped[slots], self.tokens[slots]
        some.prompt_lengths = self.prompt_lengths[slots]
        return some

    def start(self, slot: int, prompt: Sequence[int]) -> None:
        """Start a sequence on this slot with this prompt."""
        fill_from_host(self.tokens[slot, : len(prompt)], torch.tensor(prompt))
        self.prompt_lengths[slot].fill_(len(prompt))

    def write(self, positions_BP: Tensor, tokens_BP: Tensor) -> None:
        """Write tokens at these positions, both int64; those beyond the capacity are dropped."""
        self._with_dropped.scatter_(1, positions_BP.clamp(max=self.tokens.shape[1]), tokens_BP)

    def read(self, first_B: Tensor, count: int) -> Tensor:
        """int64 [B, count]: the tokens from position first_B[b] on; positions outside are clamped to the ends."""
        return self.read_at(first_B[:, None] + torch.arange(count, device=first_B.device))

    def read_at(self, positions_BC: Tensor) -> Tensor:
        """int64 [B, C]: the tokens at these positions; positions outside are clamped to the ends."""
        return self.tokens.gather(1, positions_BC.clamp(0, self.tokens.shape[1] - 1))
