"""TokenSwift's heads (arXiv 2502.18890, section 3): config, network, training loss; one definition for
training and serving.

There are two kinds. `linear_chain` is the paper's: from the target's un-normed residual stream h_0, head i computes
h_i = h_{i-1} + W_i RMSNorm_in_i(h_{i-1}), and the target's LM head reads RMSNorm_out_i(h_i). `silu_chain` computes
h_i = h_{i-1} + SiLU(W_i h_{i-1}) from the target's post-norm state: Medusa's heads, but in a chain. With h_0 from
position t, head i proposes the token at t + 1 + i. infer/drafters/tokenswift.py decodes with the heads.
Shapes: N tokens, D hidden, V vocabulary; ... any leading shape.
"""

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longdraft.models.decoder_config import Size
from longdraft.models.drafts.heads import Heads, HeadsConfig
from longdraft.models.schema import Float, validated_dataclass
from longdraft.models.stream import RMSNorm

# By kind: the field of TargetOutput that the heads read.
NEEDS = {"linear_chain": frozenset({"pre_norm"}), "silu_chain": frozenset({"post_norm"})}


@validated_dataclass
class TokenSwiftConfig(HeadsConfig):
    """Shape and initialisation of the heads.

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
    """Chained heads. `linear_chain` adds the parameters `in_norm.{i}` and `out_norm.{i}` to those of `Heads`.

    Args:
        final_norm_D: the target's final norm weight, for `out_norm_init: target`. Other arguments as of `Heads`.
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
            self.in_norm = nn.ModuleList([RMSNorm(*norm) for _ in heads])
            self.out_norm = nn.ModuleList([RMSNorm(*norm) for _ in heads])
        if config.out_norm_init == "target" and final_norm_D is not None:
            with torch.no_grad():
                for weight in self.out_norm.parameters():
                    weight.copy_(final_norm_D)

    @property
    def needs(self) -> frozenset[str]:
        return NEEDS[self.config.kind]

    def step(self, i: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.kind == "linear_chain":
            return self.out_norm[i](hidden, self.proj[i](hidden, self.in_norm[i]))
        hidden = hidden + F.silu(self.proj[i](hidden))
        return hidden, hidden
