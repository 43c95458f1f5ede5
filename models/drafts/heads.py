"""What heads that guess the tokens behind the next one share: their products, and the training loss of all of them.

Heads differ in what a head makes of the target's state, its `step` (tokenswift.py, medusa.py).
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.models.drafts.loss import DraftLoss, Part, Teaching, draft_loss
from longdraft.models.drafts.projection import Projection
from longdraft.models.drafts.vocabulary import DraftVocabulary


class Heads(DraftVocabulary):
    """Parameters `proj.{i}.weight` [D, D], a matrix W for each head.

    Args:
        config: the shape: hidden_size, n_heads, init_std and draft_vocab_size.
        generator: draws W from N(0, init_std); the same seed gives the same heads. None leaves W at zero, for weights
            read from a file.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    def __init__(self, config: Any, generator: torch.Generator | None = None, token_ids_E: Tensor | None = None):
        super().__init__()
        self.restrict(config.draft_vocab_size, token_ids_E)
        self.config, d = config, config.hidden_size
        self.proj = nn.ModuleList([Projection(d, d, bias=False) for _ in range(config.n_heads)])
        with torch.no_grad():
            for weight in self.proj.parameters():
                weight.zero_()
                if generator is not None and config.init_std:
                    weight.normal_(0.0, config.init_std, generator=generator)

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head reads for head i + 1, and the state that head i + 2 begins from, both [..., D].

        hidden: the target's state for i = 0, else the second of the step before.
        """
        raise NotImplementedError

    def states(self, hidden: Tensor) -> list[Tensor]:
        """The target's state [..., D] to what its LM head reads for head 1..I, each [..., D] in the same dtype."""
        states = []
        for i in range(self.config.n_heads):
            state, hidden = self.step(i, hidden)
            states.append(state)
        return states

    def forward(
        self,
        hidden_ND: Tensor,
        parts: Sequence[Part],
        lm_head_VD: Tensor,
        count_ranks: bool,
        teaching: Teaching | None = None,
    ) -> DraftLoss:
        """The training loss, a part for each head.

        Args:
            hidden_ND: the target's state that `needs` names, without gradient.
            parts: head i's are `ahead` by i + 1 (models/drafts/loss.py).
            lm_head_VD: the target's frozen LM head.
            count_ranks: also count the labels among each head's first candidates.
            teaching: the target's distributions; None: the loss is the labels' cross-entropy.
        """
        return draft_loss(self.states(hidden_ND), parts, self.head(lm_head_VD), count_ranks, teaching)


def check_heads(hidden_size: int, n_heads: int, draft_vocab_size: int | None) -> None:
    """Raises ValueError for heads of no width, none of them, or a vocabulary of no token."""
    if hidden_size < 1:
        raise ValueError(f"draft.hidden_size: {hidden_size}; give the target's")
    if n_heads < 1:
        raise ValueError(f"draft.n_heads: {n_heads}, but at least 1 head is needed")
    if draft_vocab_size is not None and draft_vocab_size < 1:
        raise ValueError(
            f"draft.draft_vocab_size: {draft_vocab_size}; give 1 to the target's vocabulary, or None for all of it"
        )
