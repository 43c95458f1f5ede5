"""A restricted draft vocabulary: a draft that proposes only some of the target's tokens, through their LM-head rows.

The LM head is most of a small draft's time, and a few tokens make up most of a text. Tokens that are left out cost
acceptance, never exactness. train/vocabulary.py chooses them. Shapes: V vocabulary, E draft vocabulary, D hidden.
"""

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Base of every draft: the buffer `token_ids`, int64 [E], of the tokens that it can propose; None for all tokens.

    If it is set, the draft's logits and labels are indices into it.
    """

    token_ids: Tensor | None

    def restrict(self, size: int | None, token_ids_E: Tensor | None) -> None:
        """Restrict the draft to these tokens; without ids, to the first `size`, until weights are read from a file.
        None, None: no restriction."""
        if size is not None:
            token_ids_E = torch.arange(size) if token_ids_E is None else token_ids_E.to(torch.int64)
        assert (None if token_ids_E is None else len(token_ids_E)) == size, f"token_ids_E: not {size} ids"
        self.register_buffer("token_ids", token_ids_E)

    def head(self, lm_head_VD: Tensor) -> Tensor:
        """The rows of the target's LM head for the draft's tokens, [E, D]; the LM head itself if these are all."""
        return lm_head_VD if self.token_ids is None else lm_head_VD[self.token_ids]

    def tokens(self, places: Tensor) -> Tensor:
        """The target's token ids for indices among the draft's logits, of any shape."""
        return places if self.token_ids is None else self.token_ids[places]
