"""The operations of a training step for each token, and r, which compares them with those of the target's pass.

r is the operations of the whole step over those of the target's pass, as far as the method reads that (for LongSpec, up
to the last layer's keys and values). No step can be faster than that pass; with all parts equally fast it takes r times
as long. A multiplication and an addition count as two operations; norms, rotations and the optimizer count as none. Not
here: bytes (estimate_memory.py), time.
Shapes: L tokens of a row, one piece; D hidden, F the query heads' width, I feed-forward, V tokens that can be proposed.
"""

from dataclasses import dataclass
from typing import Any

from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.longspec import LongSpecConfig
from longdraft.train.config import Config

# Operations of a backward pass over those of its forward pass. A product: the gradients of its input and its weight.
# Attention: the scores once more, and the gradients of weights, queries, keys and values.
BACKWARD_PRODUCT, BACKWARD_ATTENTION = 2.0, 2.5


@dataclass(frozen=True)
class Operations:
    """Operations for each token of a row, as (products, attention). `head`: the LM head's, at the labels alone.
    `labels`: how many of them a token has."""

    target: tuple[float, float]
    forward: tuple[float, float]
    backward: tuple[float, float]
    head: tuple[float, float]
    labels: float

    @property
    def r(self) -> float:
        parts = (self.target, self.forward, self.backward, self.head)
        return sum(sum(part) for part in parts) / sum(self.target)

    def of_step(self, n_tokens: int, n_labels: float) -> float:
        """Operations of a step of so many tokens, in rows of one piece each, with so many labels."""
        of_token = sum(sum(part) for part in (self.target, self.forward, self.backward))
        return n_tokens * of_token + n_labels * self.head[0] / self.labels


def operations(config: Config, target: DecoderConfig) -> Operations:
    """The operations of a row whose data.seq_len tokens are one piece, with a label for every query. Short pieces have
    less attention, and conversations, where only answers are labels, have less of the LM head."""
    t, length, share = target, config.data.seq_len, config.data.query_share
    shape: Any = config.draft.network(target)
    is_block = isinstance(shape, LongSpecConfig)
    d, heads, kv = t.hidden_size, t.n_heads * t.head_dim, 2 * t.n_kv_heads * t.head_dim
    project, output, gated = 2 * d * (heads + kv), 2 * heads * d, 6 * d * t.intermediate_size
    feed_forward = sum(6 * d * t.feed_forward_size(layer) for layer in range(t.n_layers - is_block))
    windows = t.sliding_windows or (None,) * t.n_layers
    whole = t.n_layers - 1 if is_block else t.n_layers  # layers that run to their end
    reads = sum(mean_keys(length, window) for window in windows[:whole])
    seen = t.n_layers * project + whole * output + feed_forward, 4 * heads * reads
    distils = config.train.loss != "cross_entropy"
    if distils and is_block:  # the last layer is finished for the queries
        last = output + 6 * d * t.feed_forward_size(t.n_layers - 1)
        seen = seen[0] + share * last, seen[1] + share * 4 * heads * mean_keys(length, windows[-1])
    n_words = shape.draft_vocab_size or t.vocab_size
    if is_block:
        # With a subset of queries, keys and values are computed for all tokens, in a projection of their own.
        products = share * (project + 3 * output + gated) + (2 * d * kv if share < 1 else 0)
        later = mean_keys(length, None) - (1 + shape.noise) / 2  # a query reads up to its noise shift before it
        attention = share * 4 * heads * (mean_keys(length, shape.window + 1) + max(later, 0.0))
    else:
        products, attention = 2 * d * d * shape.n_heads, 0.0  # for all tokens, labels or not
    labels = share * (1 if is_block else shape.n_heads)
    return Operations(
        target=seen,
        forward=(products, attention),
        backward=(BACKWARD_PRODUCT * products, BACKWARD_ATTENTION * attention),
        # Logits and the gradient of their input (the LM head is frozen), and the target's logits in a distillation.
        head=(labels * (6 if distils else 4) * d * n_words, 0.0),
        labels=labels,
    )


def mean_keys(length: int, window: int | None) -> float:
    """The mean number of keys that a token of a piece reads: itself and the tokens before it within the window."""
    seen = min(length, window or length)
    return (seen * (seen + 1) / 2 + (length - seen) * seen) / length


def operations_table(found: Operations) -> str:
    """A table for people: millions of operations a token, one line for each part."""
    parts = {
        "target's pass, as far as it is read": found.target,
        "draft, forward": found.forward,
        "draft, backward": found.backward,
        "LM head and loss": found.head,
    }
    lines = [f"{'millions of operations a token':38}{'products':>10}{'attention':>11}{'sum':>10}{'share':>8}"]
    total = sum(found.target)
    for name, part in parts.items():
        products, attention = part
        lines.append(
            f"{name:38}{products / 1e6:10,.1f}{attention / 1e6:11,.1f}{sum(part) / 1e6:10,.1f}{sum(part) / total:8.3f}"
        )
    return "\n".join([*lines, f"{f'r, a step over the target{chr(39)}s pass':69}{found.r:8.3f}"])
