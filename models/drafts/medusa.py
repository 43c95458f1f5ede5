"""Medusa-1's heads (arXiv 2401.10774): config, network, training loss; one definition for training and serving.

The heads are independent: h_i = h + SiLU(W_i h) on the target's post-norm state. The target's own LM head reads h_i;
the paper trains an LM head for each head instead. With h from position t, head i proposes the token at t + 1 + i, as in
TokenSwift, so both share labels and loss. infer/drafters/heads.py decodes with the heads.
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from longdraft.models.decoder_config import Size
from longdraft.models.drafts.heads import Heads, HeadsConfig
from longdraft.models.schema import Float, validated_dataclass


@validated_dataclass
class MedusaConfig(HeadsConfig):
    """Shape and initialisation of the heads; `hidden_size` is the target's.

    `init_std` is the standard deviation of W; 0, the paper's, starts every head at the target's next-token prediction.
    `draft_vocab_size`: how many tokens the heads can propose (the buffer `token_ids` says which); None for all.
    """

    hidden_size: Size
    n_heads: Size = 3
    init_std: Annotated[Float, Field(ge=0)] = 0.0
    draft_vocab_size: Size | None = None


class Medusa(Heads):
    """Independent heads: each reads the target's state itself."""

    config: MedusaConfig

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"post_norm"})

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + F.silu(self.proj[i](hidden)), hidden
