"""What all heads that guess the tokens after the next one share: their projections, and the training loss of all heads.

Methods differ in how a head transforms the target's state: the `step` of tokenswift.py and medusa.py.
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longdraft.kernels.distillation import Distillation
from longdraft.kernels.linear_loss import LinearLoss, LossPart, linear_loss
from longdraft.models.drafts.base import DraftModule, Projection
from longdraft.models.drafts.loss import TOP_K


class HeadsConfig:
    """The fields that every method's config has; each method's dataclass has its own order of them."""

    hidden_size: int
    n_heads: int
    init_std: float
    draft_vocab_size: int | None


class Heads(DraftModule):
    """Parameters: `proj.{i}.weight` [D, D], a matrix W for each head.

    Args:
        generator: draws W from N(0, init_std); the same seed gives the same heads. None leaves W at zero, for weights
            that are read from a file.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    config: HeadsConfig

    def __init__(
        self, config: HeadsConfig, generator: torch.Generator | None = None, token_ids_E: Tensor | None = None
    ):
        super().__init__()
        self.restrict(config.draft_vocab_size, token_ids_E)
        self.config, d = config, config.hidden_size
        self.proj = nn.ModuleList([Projection(d, d, bias=False) for _ in range(config.n_heads)])
        with torch.no_grad():
            for weight in self.proj.parameters():
                weight.zero_()
                if generator is not None and config.init_std:
                    weight.normal_(0.0, config.init_std, generator=generator)

    @property
    def needs(self) -> frozenset[str]:
        """The one field of TargetOutput that the heads read."""
        raise NotImplementedError

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the LM head for head i + 1, and the state that head i + 2 starts from, both [..., D].

        hidden: the target's state if i = 0, else the second result of the previous step.
        """
        raise NotImplementedError

    def states(self, hidden: Tensor) -> list[Tensor]:
        """Inputs of the LM head for heads 1..I, from the target's state: each [..., D] in the same dtype."""
        states = []
        for i in range(self.config.n_heads):
            state, hidden = self.step(i, hidden)
            states.append(state)
        return states

    def forward(
        self,
        hidden_ND: Tensor,
        parts: Sequence[LossPart],
        lm_head_VD: Tensor,
        count_top_k: bool,
        distillation: Distillation | None = None,
    ) -> LinearLoss:
        """The training loss, with one part for each head.

        Args:
            hidden_ND: the target's state that `needs` names, without gradient.
            parts: head i's part is `ahead` by i + 1 (models/drafts/loss.py).
            lm_head_VD: the target's frozen LM head.
            count_top_k: also count the labels among each head's TOP_K first candidates.
            distillation: the target's distributions; None trains on the labels' cross-entropy.
        """
        top_k = TOP_K if count_top_k else 0
        return linear_loss(self.states(hidden_ND), self.head(lm_head_VD), parts, top_k, distillation)
