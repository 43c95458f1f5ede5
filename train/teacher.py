"""The frozen target as the trainer uses it: one pass over the rows of a batch, and its choices at a few positions.

Every document piece is a context of its own, as it is in decoding.
Shapes: N tokens end to end, D hidden, V vocabulary, R chosen rows.
"""

from collections.abc import Set

import torch
from torch import Tensor

from longdraft.models.decoder import Decoder
from longdraft.models.passes import Pass, TargetOutput
from longdraft.train.sequence_parallel import SequenceParallel

CHOICE_ROWS = 128
# Tokens per chunk of a layer's matmuls: enough to fill any device, and with long rows little memory compared with their
# hidden states.
ROW_CHUNK = 4096


class Teacher:
    """The target in this process, outside DeepSpeed's engine and without gradient.

    Args:
        parallel: the ranks that share each row; their passes are collective. None: this rank reads whole rows.
    """

    def __init__(self, model: Decoder, parallel: SequenceParallel | None = None):
        self.model, self._parallel = model, parallel

    def own_span(self, n_tokens: int) -> tuple[int, int] | None:
        """Start and stop of this rank's tokens in shared rows; None if it has all tokens."""
        return None if self._parallel is None else self._parallel.own_span(n_tokens)

    @property
    def lm_head_VD(self) -> Tensor:
        return self.model.lm_head.weight

    # Not inference_mode: weights that are gathered in it from a sharded target cannot be saved for backward.
    @torch.no_grad()
    def forward(
        self, tokens_N: Tensor, borders: list[int], positions_N: Tensor | None, needs: Set[str]
    ) -> TargetOutput:
        """The target's pass over these tokens. Computes only the fields in `needs` and returns them without a batch
        dimension.

        If ranks share the rows, last_kv covers all tokens, the other fields those in this rank's `own_span`.
        """
        positions_1N = None if positions_N is None else positions_N[None]
        given = Pass(tokens_N[None], positions_BT=positions_1N, borders=borders, needs=needs, chunk=ROW_CHUNK)
        output = self.model(given) if self._parallel is None else self._parallel.forward(self.model, given)
        for name in ("logits", "pre_norm", "post_norm"):
            field = getattr(output, name)
            setattr(output, name, None if field is None else field[0])
        if output.last_kv is not None:
            output.last_kv = output.last_kv[0][0], output.last_kv[1][0]
        return output

    def gather(self, own_nD: Tensor, n_tokens: int) -> Tensor:
        """Hidden states of all tokens, [N, D], gathered from the ranks that share the rows."""
        return own_nD if self._parallel is None else self._parallel.gather(own_nD[None], n_tokens)[0]

    def any(self, flag: Tensor) -> Tensor:
        """Whether the flag is true on any rank that shares these rows: a bool scalar on the device."""
        return flag if self._parallel is None else self._parallel.any(flag)

    @torch.no_grad()
    def choices(self, post_norm_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The target's greedy next token after each of these positions, int64 [R], and the log-sum-exp of its logits,
        fp32 [R]. At most CHOICE_ROWS rows of logits exist at a time."""
        chosen, totals = [], []
        for part_RD in post_norm_RD.split(CHOICE_ROWS):
            logits_RV = self.model.lm_head(part_RD)
            chosen.append(logits_RV.argmax(-1))
            totals.append(logits_RV.float().logsumexp(-1))
        return torch.cat(chosen), torch.cat(totals)
