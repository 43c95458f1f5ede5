"""A restricted draft vocabulary: a draft that proposes some of the target's tokens alone, through their LM-head rows.

The LM head is most of a small draft's time, and a few tokens make most of a text. What is left out costs acceptance,
never exactness. Not here: which tokens (train/vocabulary.py). Shapes: V vocabulary, E draft vocabulary, D hidden.
"""

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """A draft's part that knows its tokens: the buffer `token_ids` int64 [E], None for all tokens of the target.

    With it, logits and labels of the draft are by place in `token_ids`.
    """

    token_ids: Tensor | None

    def restrict(self, size: int | None, token_ids_E: Tensor | None) -> None:
        """To these tokens; without ids, for weights read from a file, the first `size`. None, None: to nothing.

        Raises: ValueError where their number is not `size`.
        """
        if size is None and token_ids_E is not None:
            raise ValueError("token_ids_E: given, but draft_vocab_size is None; set it to their number")
        if size is not None:
            token_ids_E = torch.arange(size) if token_ids_E is None else token_ids_E.to(torch.int64)
            if token_ids_E.shape != (size,):
                raise ValueError(f"token_ids_E: {list(token_ids_E.shape)} ids for a draft_vocab_size of {size}")
        self.register_buffer("token_ids", token_ids_E)

    def head(self, lm_head_VD: Tensor) -> Tensor:
        """The rows of the target's LM head that the draft reads, [E, D]; the head itself where it reads all."""
        return lm_head_VD if self.token_ids is None else lm_head_VD[self.token_ids]

    def tokens(self, places: Tensor) -> Tensor:
        """The target's ids of these places among the draft's logits, of any shape."""
        return places if self.token_ids is None else self.token_ids[places]
