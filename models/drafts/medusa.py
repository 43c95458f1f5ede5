"""Medusa-1's heads (arXiv 2401.10774): config, network, training loss; one definition for training and serving.

The heads are independent: h_i = h + SiLU(W_i h) on the target's post-norm state, read by the target's own LM head,
where Medusa trains an LM head for each. With h from position t, head i proposes the token at t + 1 + i, as TokenSwift's
do, so labels and loss are shared. Not here: decoding (infer/drafters/medusa.py), files (models/draft_folder.py).
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longdraft.models.drafts.loss import DraftLoss, Part, Teaching, draft_loss
from longdraft.models.drafts.projection import Projection
from longdraft.models.drafts.vocabulary import DraftVocabulary, check_size


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
        if self.hidden_size < 1:
            raise ValueError(f"draft.hidden_size: {self.hidden_size}; give the target's")
        if self.n_heads < 1:
            raise ValueError(f"draft.n_heads: {self.n_heads}, but at least 1 head is needed")
        if self.init_std < 0:
            raise ValueError(f"draft.init_std: {self.init_std} is negative; give 0 or more")
        check_size(self.draft_vocab_size)


class Medusa(DraftVocabulary):
    """The heads; parameters `proj.{i}.weight` [D, D].

    Args:
        config: the shape.
        generator: draws W where `init_std` is above 0; None leaves W at zero (for weights read from a file).
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    needs = frozenset({"post_norm"})

    def __init__(
        self, config: MedusaConfig, generator: torch.Generator | None = None, token_ids_E: Tensor | None = None
    ):
        super().__init__()
        self.restrict(config.draft_vocab_size, token_ids_E)
        self.config = config
        d = config.hidden_size
        self.proj = nn.ModuleList([Projection(d, d, bias=False) for _ in range(config.n_heads)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
                if generator is not None and config.init_std:
                    parameter.normal_(0.0, config.init_std, generator=generator)

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head reads for head i + 1, and what head i + 2 begins from, which is `hidden`: both [..., D]."""
        return hidden + F.silu(self.proj[i](hidden)), hidden

    def states(self, hidden: Tensor) -> list[Tensor]:
        """The target's post-norm state [..., D] to what its LM head reads for head 1..I, each [..., D]."""
        return [self.step(i, hidden)[0] for i in range(self.config.n_heads)]

    def forward(
        self,
        hidden_ND: Tensor,
        parts: Sequence[Part],
        lm_head_VD: Tensor,
        count_ranks: bool,
        teaching: Teaching | None = None,
    ) -> DraftLoss:
        """The training loss, a part for each head; as TokenSwift's, with the target's post-norm state."""
        return draft_loss(self.states(hidden_ND), parts, self.head(lm_head_VD), count_ranks, teaching)
