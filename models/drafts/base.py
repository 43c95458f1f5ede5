"""The base of every draft network: its loss and its vocabulary, maybe a subset of the target's.

The LM head takes most of a small draft's time, and few tokens make up most of a text. Tokens outside the vocabulary
cost acceptance, never exactness. train/methods/build.py chooses it. Shapes: V vocabulary, E draft vocabulary, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longdraft.kernels.distillation import Distillation
from longdraft.kernels.linear_loss import LinearLoss, LossPart, linear_loss
from longdraft.models.decoder import Decoder, LMHead

TOP_K = 3  # ranks of a label that training counts


class DraftModule(nn.Module):
    """Base of every draft: its training loss, and the buffer `token_ids`, int64 [E], of the tokens that it can propose.

    If that is set, the draft's logits and labels are indices into it; None: it can propose all tokens.
    """

    config: Any
    token_ids: Tensor | None

    def states(self, *inputs: Any) -> Tensor | list[Tensor]:
        """The LM head's inputs, each [..., D]: a list with one per part of the loss, or one tensor for all parts."""
        raise NotImplementedError

    def forward(
        self,
        inputs: tuple[Any, ...],
        parts: Sequence[LossPart],
        lm_head_VD: Tensor,
        count_top_k: bool,
        distillation: Distillation | None = None,
    ) -> LinearLoss:
        """The training loss of the states, in parts.

        Args:
            inputs: the arguments of `states`.
            parts: rows of the states; labels index the draft vocabulary if it is restricted.
            lm_head_VD: the target's frozen LM head.
            count_top_k: also count how often the label is among the TOP_K best candidates.
            distillation: the target's distributions; None trains on the labels' cross-entropy.
        """
        states = self.states(*inputs)
        of_parts = [states] * len(parts) if isinstance(states, Tensor) else states
        return linear_loss(of_parts, self.own_rows(lm_head_VD), parts, TOP_K if count_top_k else 0, distillation)

    def restrict(self, size: int | None, token_ids_E: Tensor | None) -> None:
        """Restrict the draft to these tokens; without ids, to the first `size`, until weights are read from a file.
        None, None: no restriction."""
        if size is not None:
            token_ids_E = torch.arange(size) if token_ids_E is None else token_ids_E.to(torch.int64)
        assert (None if token_ids_E is None else len(token_ids_E)) == size, f"token_ids_E: not {size} ids"
        self.register_buffer("token_ids", token_ids_E)

    def own_rows(self, lm_head_VD: Tensor) -> Tensor:
        """The rows of the target's LM head for the draft's tokens, [E, D]; if unrestricted, the LM head itself."""
        return lm_head_VD if self.token_ids is None else lm_head_VD[self.token_ids]

    def lm_head(self, model: Decoder) -> LMHead:
        """The target's LM head for the draft's tokens, which shares the target's weights where it can."""
        ranks, rows, n_tokens = model.ranks, model.lm_head.weight, model.config.vocab_size
        if self.token_ids is not None:
            rows, n_tokens = self.own_rows(ranks.joined(rows, 0, n_tokens)), len(self.token_ids)
            rows = rows if ranks.size == 1 else ranks.part(rows, 0).clone()
        with torch.device("meta"):
            head = LMHead(rows.shape[1], n_tokens, ranks)
        head.weight = nn.Parameter(rows.detach(), requires_grad=False)
        return head

    def tokens(self, places: Tensor) -> Tensor:
        """The target's token ids for indices among the draft's logits, of any shape."""
        return places if self.token_ids is None else self.token_ids[places]
