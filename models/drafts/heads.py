"""TokenSwift's and Medusa's heads, which guess the tokens after the next one: configs and networks, one definition for
training and serving.

With the target's state from position t, head i proposes the token at t + 1 + i; methods differ in how a head transforms
the state (`step`). infer/drafters/heads.py and infer/drafters/tokenswift.py decode with the heads.
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longdraft.models.decoder_config import Size
from longdraft.models.drafts.base import DraftModule
from longdraft.models.schema import Float, validated_dataclass
from longdraft.models.stream import Linear, RMSNorm


class Heads(DraftModule):
    """Parameters: `proj.{i}.weight` [D, D], a matrix W for each head. `reads`: the field of TargetOutput that is the
    heads' input.

    Args:
        generator: draws W from N(0, init_std); the same seed gives the same heads. None leaves W at zero, for weights
            that are read from a file.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    config: "TokenSwiftConfig | MedusaConfig"
    reads: Literal["pre_norm", "post_norm"] = "post_norm"

    def __init__(
        self,
        config: "TokenSwiftConfig | MedusaConfig",
        generator: torch.Generator | None = None,
        token_ids_E: Tensor | None = None,
    ):
        super().__init__()
        self.restrict(config.draft_vocab_size, token_ids_E)
        self.config, d = config, config.hidden_size
        self.proj = nn.ModuleList([Linear(d, d, bias=False) for _ in range(config.n_heads)])
        with torch.no_grad():
            for weight in self.proj.parameters():
                weight.zero_()
                if generator is not None and config.init_std:
                    weight.normal_(0.0, config.init_std, generator=generator)

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the LM head for head i + 1, and the state that head i + 2 starts from, both [..., D].

        hidden: the target's state if i = 0, else the second result of the previous step.
        """
        raise NotImplementedError

    def states(self, hidden: Tensor) -> list[Tensor]:
        """Inputs of the LM head for heads 1..I, from the target's state that `reads` names: each [..., D] in the same
        dtype. The loss has a part for each; head i's is `ahead` by i + 1 (train/methods/base.py)."""
        states = []
        for i in range(self.config.n_heads):
            state, hidden = self.step(i, hidden)
            states.append(state)
        return states


@validated_dataclass
class TokenSwiftConfig:
    """Shape and initialisation of TokenSwift's heads.

    Attributes:
        hidden_size, rms_norm_eps: the target's.
        kind: "linear_chain" or "silu_chain".
        out_norm_init: whether RMSNorm_out_i starts at "ones" (the paper) or at the "target"'s final norm. `silu_chain`
            has no norms and accepts only "ones".
        init_std: standard deviation of W. 0 starts every head at the target's own next-token prediction.
        draft_vocab_size: how many tokens the heads can propose (the buffer `token_ids` says which); None for all.
    """

    hidden_size: Size
    rms_norm_eps: Float
    n_heads: Size = 3
    kind: Literal["linear_chain", "silu_chain"] = "linear_chain"
    out_norm_init: Literal["ones", "target"] = "ones"
    init_std: Annotated[Float, Field(ge=0)] = 0.02
    draft_vocab_size: Size | None = None

    def __post_init__(self):
        if self.kind == "silu_chain" and self.out_norm_init != "ones":
            raise ValueError("out_norm_init: silu_chain has no norms to start from the target's; set it to ones")


class TokenSwift(Heads):
    """TokenSwift's heads (arXiv 2502.18890, section 3), in a chain of one of two kinds.

    `linear_chain` is the paper's: from the target's un-normed residual stream h_0, head i computes
    h_i = h_{i-1} + W_i RMSNorm_in_i(h_{i-1}), and the target's LM head reads RMSNorm_out_i(h_i); it adds the parameters
    `in_norm.{i}` and `out_norm.{i}` to those of `Heads`. `silu_chain` computes h_i = h_{i-1} + SiLU(W_i h_{i-1}) from
    the target's post-norm state: Medusa's heads, but in a chain.

    Args:
        final_norm_D: the target's final norm weight, for `out_norm_init: target`. Other arguments: see `Heads`.
    """

    config: TokenSwiftConfig

    def __init__(
        self,
        config: TokenSwiftConfig,
        generator: torch.Generator | None = None,
        final_norm_D: Tensor | None = None,
        token_ids_E: Tensor | None = None,
    ):
        super().__init__(config, generator, token_ids_E)
        heads, norm = range(config.n_heads), (config.hidden_size, config.rms_norm_eps)
        if config.kind == "linear_chain":
            self.reads = "pre_norm"
            self.in_norm = nn.ModuleList([RMSNorm(*norm) for _ in heads])
            self.out_norm = nn.ModuleList([RMSNorm(*norm) for _ in heads])
        if config.out_norm_init == "target" and final_norm_D is not None:
            with torch.no_grad():
                for weight in self.out_norm.parameters():
                    weight.copy_(final_norm_D)

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.kind == "linear_chain":
            return self.out_norm[i](hidden, self.proj[i](hidden, self.in_norm[i]))
        hidden = hidden + F.silu(self.proj[i](hidden))
        return hidden, hidden


@validated_dataclass
class MedusaConfig:
    """Shape and initialisation of Medusa's heads; `hidden_size` is the target's.

    `init_std` is the standard deviation of W; 0, the paper's, starts every head at the target's next-token prediction.
    `draft_vocab_size`: how many tokens the heads can propose (the buffer `token_ids` says which); None for all.
    """

    hidden_size: Size
    n_heads: Size = 3
    init_std: Annotated[Float, Field(ge=0)] = 0.0
    draft_vocab_size: Size | None = None


class Medusa(Heads):
    """Medusa-1's heads (arXiv 2401.10774), independent ones: h_i = h + SiLU(W_i h) on the target's post-norm state.

    The target's own LM head reads h_i; the paper trains an LM head for each head instead. Labels and loss are
    TokenSwift's.
    """

    config: MedusaConfig

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + F.silu(self.proj[i](hidden)), hidden
