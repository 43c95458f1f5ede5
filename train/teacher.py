"""The frozen target as the trainer sees it: hidden states of whole rows, and its own choices at a few positions.

A row's pieces are read one after the other as one context, as in the target's own pre-training. Not here: loading
(models/hf.py), the network (models/decoder.py).
Shapes: B rows, T positions, D hidden, V vocabulary, R chosen rows.
"""

import torch
from torch import Tensor

from longdraft.models.decoder import Decoder

CHOICE_ROWS = 128


class Teacher:
    """One copy of the target, whole, in each process; outside DeepSpeed's engine, without gradient.

    Args:
        model: the frozen decoder.
        needs: the one field of TargetOutput that the draft reads: pre_norm or post_norm.
    """

    def __init__(self, model: Decoder, needs: frozenset[str]):
        (self._field,) = needs
        self.model, self._needs = model, needs

    @property
    def lm_head_VD(self) -> Tensor:
        return self.model.lm_head.weight

    @torch.no_grad()  # not inference_mode: what is gathered there from a sharded target cannot be saved for backward
    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, D]; nothing behind the layer that is needed is computed (no LM head; for pre_norm no final norm)."""
        return getattr(self.model(tokens_BT, needs=self._needs), self._field)

    @torch.no_grad()
    def choices(self, hidden_RD: Tensor) -> Tensor:
        """The target's greedy next token after each of these positions, int64 [R]; a few rows of logits at a time."""
        if self._field == "pre_norm":
            hidden_RD = self.model.norm(hidden_RD)
        if not len(hidden_RD):  # a rank without a row left
            return torch.empty(0, dtype=torch.int64, device=hidden_RD.device)
        return torch.cat([self.model.lm_head(part).argmax(-1) for part in hidden_RD.split(CHOICE_ROWS)])
