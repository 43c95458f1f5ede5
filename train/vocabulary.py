"""The tokens that a draft with a restricted vocabulary proposes: the most frequent ones of the training data.

Reading the LM head once for each level is most of LongSpec's draft time, and few tokens make up most of a text. The
omitted ones cost acceptance, never exactness. models/drafts/longspec.py says what the draft does with them.
Shapes: V vocabulary, E draft vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longdraft.data_prep.shards import ShardSet


def frequent_tokens(
    rows: ShardSet, vocab_size: int, n: int, always: Sequence[int] = (), among: Tensor | None = None
) -> Tensor:
    """The n most frequent token ids of a split, int64 [E = n], ascending; a function of the rows alone.

    Every token of the split but padding is counted. Among equally frequent tokens the smaller id is taken. Ascending
    ids resolve equal logits to the same token as in the whole vocabulary, and the LM head's rows are read in order.

    Args:
        rows: the training split; it is read whole, a few million tokens at a time.
        vocab_size: V, the target's.
        always: ids that are included whatever their count: the tokens that end a sequence, which occur once in each
            document. Ids outside the vocabulary are ignored.
        among: int64: only these ids are taken, apart from `always`. None: the whole vocabulary.

    Raises ValueError where n is below the number of `always` or above that of the ids, or a token of the split is not
    below V.
    """
    included = sorted({token for token in always if 0 <= token < vocab_size})
    most = vocab_size if among is None else len({*among.tolist(), *included})
    least = max(1, len(included))
    if not least <= n <= most:
        raise ValueError(
            f"draft_vocab_size: {n}; give {least} (the tokens that end a sequence) to {most} (those that there are)"
        )
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for tokens in rows.used_tokens():
        counts = np.bincount(tokens, minlength=vocab_size)
        if len(counts) > vocab_size:
            raise ValueError(
                f"data.path: {rows.folder} holds the token {len(counts) - 1}, but the target's vocabulary has "
                f"{vocab_size}; prepare it with this target"
            )
        counts_V += counts
    if among is not None:
        counts_V[np.setdiff1d(np.arange(vocab_size), among.cpu())] = -1
    counts_V[included] = np.iinfo(np.int64).max
    most_frequent_E = np.argsort(-counts_V, kind="stable")[:n]
    return torch.from_numpy(np.sort(most_frequent_E))
