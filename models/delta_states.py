"""What the linear attention layers of a KVCache remember of each slot, in place of keys and values.

Shapes: L linear layers, B slots, T tokens of a pass, R rows to keep, V heads of the values, k key width, v value width,
C channels of the convolution, W its width.
"""

import torch
from torch import Tensor

from longdraft.kernels.gated_delta import DeltaTokens, advance
from longdraft.models.decoder_config import DeltaConfig


class DeltaStates:
    """Of each slot and layer: the memory after its committed tokens, fp32 [L, B, V, k, v], and the convolution's last
    inputs, [L, B, W - 1, C]. Both change in place.

    A pass that does not know what will be committed leaves its tokens in `pending`, by layer; `commit` follows the
    accepted ones.
    """

    def __init__(self, config: DeltaConfig, batch: int, dtype: torch.dtype, device: torch.device | str):
        of_slots = len(config.layers), batch
        self.memory = torch.zeros(*of_slots, *config.memory_shape, dtype=torch.float32, device=device)
        self.inputs = torch.zeros(*of_slots, config.kernel - 1, config.channels, dtype=dtype, device=device)
        self.pending: list[tuple[Tensor, DeltaTokens]] = []

    def slot(self, slots: slice) -> "DeltaStates":
        """A view of these slots, which shares their memory with this one."""
        view = DeltaStates.__new__(DeltaStates)
        view.memory, view.inputs, view.pending = self.memory[:, slots], self.inputs[:, slots], []
        return view

    def commit(self, rows_BR: Tensor | None, counts_B: Tensor) -> None:
        """As `KVCache.commit`. Nothing is left to do after a pass that was told the counts (`Pass.commits_B`)."""
        if not self.pending:
            return
        slots_B1 = torch.arange(len(counts_B), device=counts_B.device)[:, None]
        rows: tuple = (slice(None),) if rows_BR is None else (slots_B1, rows_BR)
        of_layers = [(inputs_BTC[rows], tokens.at(rows)) for inputs_BTC, tokens in self.pending]
        self.pending = []
        inputs_LBRC = torch.stack([inputs for inputs, _ in of_layers])
        self.inputs.copy_(last_inputs(self.inputs, inputs_LBRC, counts_B))
        together = DeltaTokens(*(torch.cat(x) for x in zip(*(tokens for _, tokens in of_layers), strict=True)))
        counts = counts_B.repeat(len(self.memory))
        self.memory.copy_(advance(together, self.memory.flatten(0, 1), counts).view_as(self.memory))

    def copy(self, slot: int) -> tuple[Tensor, Tensor]:
        """A slot's present state, for `put`."""
        return self.memory[:, slot].clone(), self.inputs[:, slot].clone()

    def put(self, slot: int, state: tuple[Tensor, Tensor]) -> None:
        """Make a slot's state a copy of this one."""
        self.memory[:, slot], self.inputs[:, slot] = state

    def follow(self, other: "DeltaStates") -> None:
        """Become equal to the committed states of another cache of the same shape."""
        self.memory.copy_(other.memory)
        self.inputs.copy_(other.inputs)

    def reset(self, slot: int | slice) -> None:
        """Forget the text of one slot, or of several."""
        self.memory[:, slot].fill_(0)
        self.inputs[:, slot].fill_(0)


def last_inputs(before: Tensor, inputs: Tensor, counts_B: Tensor) -> Tensor:
    """The convolution's last inputs after the first `counts_B` of these: [..., B, W - 1, C].

    before: [..., B, W - 1, C]. inputs: [..., B, R, C].
    """
    joined, kept = torch.cat([before, inputs], -2), before.shape[-2]
    places_BW = counts_B[:, None] + torch.arange(kept, device=counts_B.device)
    return joined.gather(-2, places_BW[..., None].expand(*before.shape[:-3], -1, -1, joined.shape[-1]))
