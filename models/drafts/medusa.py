"""Medusa-1's heads (arXiv 2401.10774): config, network, training loss; one definition for training and serving.

The heads are independent: h_i = h + SiLU(W_i h) on the target's post-norm state, read by the target's own LM head,
where Medusa trains an LM head for each. With h from position t, head i proposes the token at t + 1 + i, as TokenSwift's
do, so labels and loss are shared. Not here: decoding (infer/drafters/medusa.py), files (models/draft_folder.py).
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from longdraft.models.drafts.heads import Heads, check_heads


@dataclass(frozen=True)
class MedusaConfig:
    """Shape and initialisation of the heads; `hidden_size` is the target's.

    `init_std` is the standard deviation of W; 0, Medusa's own, starts every head at the target's next-token prediction.
    `draft_vocab_size`: how many tokens the heads can propose (the buffer `token_ids` says which); None for all.
    """

    hidden_size: int
    n_heads: int = 3
    init_std: float = 0.0
    draft_vocab_size: int | None = None

    def __post_init__(self):
        check_heads(self.hidden_size, self.n_heads, self.draft_vocab_size)
        if self.init_std < 0:
            raise ValueError(f"draft.init_std: {self.init_std} is negative; give 0 or more")


class Medusa(Heads):
    """The heads, each on the state itself."""

    config: MedusaConfig
    needs = frozenset({"post_norm"})

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + F.silu(self.proj[i](hidden)), hidden
