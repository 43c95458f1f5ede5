"""TokenSwift's heads (arXiv 2502.18890, section 3): config, network, training loss; one definition for
training and serving.

Two kinds. `linear_chain` is the paper's: head i turns the target's un-normed residual stream h_{i-1} into
h_i = h_{i-1} + W_i RMSNorm_in_i(h_{i-1}) and reads it with the target's LM head through RMSNorm_out_i. `silu_chain` is
h_i = h_{i-1} + SiLU(W_i h_{i-1}) on the target's post-norm state, a form that Medusa servers can load. With h_0 from
position t, head i proposes the token at t + 1 + i. Not here: trees and decoding (infer/drafters/tokenswift.py), files
(models/draft_folder.py).
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
from longdraft.models.stream import RMSNorm

KINDS = {"linear_chain": frozenset({"pre_norm"}), "silu_chain": frozenset({"post_norm"})}
OUT_NORM_INITS = ("ones", "target")


@dataclass(frozen=True)
class TokenSwiftConfig:
    """Shape and initialisation of the heads; `hidden_size` and `rms_norm_eps` are the target's.

    `init_std` is the standard deviation of W (0 starts every head at the target's own next-token prediction);
    `out_norm_init` starts RMSNorm_out_i at "ones" (the paper) or at the "target"'s final norm. `silu_chain` has no
    norms and takes "ones" alone. `draft_vocab_size`: how many tokens the heads can propose (the buffer `token_ids` says
    which); None for all.
    """

    hidden_size: int
    rms_norm_eps: float
    n_heads: int = 3
    kind: str = "linear_chain"
    out_norm_init: str = "ones"
    init_std: float = 0.02
    draft_vocab_size: int | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"draft.kind: {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if self.out_norm_init not in OUT_NORM_INITS:
            raise ValueError(
                f"draft.out_norm_init: {self.out_norm_init!r} is unknown; choose one of {', '.join(OUT_NORM_INITS)}"
            )
        if self.kind == "silu_chain" and self.out_norm_init != "ones":
            raise ValueError("draft.out_norm_init: silu_chain has no norms to start from the target's; set it to ones")
        if self.hidden_size < 1:
            raise ValueError(f"draft.hidden_size: {self.hidden_size}; give the target's")
        if self.n_heads < 1:
            raise ValueError(f"draft.n_heads: {self.n_heads}, but at least 1 head is needed")
        if self.init_std < 0:
            raise ValueError(f"draft.init_std: {self.init_std} is negative; give 0 or more, the paper's is 0.02")
        check_size(self.draft_vocab_size)


class TokenSwift(DraftVocabulary):
    """The chained heads; parameters `proj.{i}.weight` [D, D] and, for linear_chain, `in_norm.{i}` and `out_norm.{i}`.

    Args:
        config: the shape.
        generator: draws W; the same seed gives the same heads. None leaves W at zero (for weights read from a file).
        final_norm_D: the target's final norm weight, for `out_norm_init: target`.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    def __init__(
        self,
        config: TokenSwiftConfig,
        generator: torch.Generator | None = None,
        final_norm_D: Tensor | None = None,
        token_ids_E: Tensor | None = None,
    ):
        super().__init__()
        self.restrict(config.draft_vocab_size, token_ids_E)
        self.config = config
        heads, d = range(config.n_heads), config.hidden_size
        self.proj = nn.ModuleList([Projection(d, d, bias=False) for _ in heads])
        if config.kind == "linear_chain":
            self.in_norm = nn.ModuleList([RMSNorm(d, config.rms_norm_eps) for _ in heads])
            self.out_norm = nn.ModuleList([RMSNorm(d, config.rms_norm_eps) for _ in heads])
        with torch.no_grad():
            for i in heads:
                weight = torch.zeros(d, d)
                if generator is not None:
                    weight.normal_(0.0, config.init_std, generator=generator)
                self.proj[i].weight.copy_(weight)  # pyright: ignore[reportCallIssue]
                if config.out_norm_init == "target" and final_norm_D is not None:
                    self.out_norm[i].weight.copy_(final_norm_D)  # pyright: ignore[reportCallIssue]

    @property
    def needs(self) -> frozenset[str]:
        """The one field of TargetOutput that the heads read."""
        return KINDS[self.config.kind]

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the LM head reads for head i + 1, and the state that head i + 2 begins from, both [..., D].

        hidden: the target's state for i = 0, else the second of the step before.
        """
        if self.config.kind == "linear_chain":
            return self.out_norm[i](hidden, self.proj[i](hidden, self.in_norm[i]))
        hidden = hidden + F.silu(self.proj[i](hidden))
        return hidden, hidden

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
