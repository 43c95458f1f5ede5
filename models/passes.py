"""One pass of a decoder: what goes in and what comes out. models/decoder.py computes it.

Shapes: B slots, T query tokens per slot, R of them with logits, L layers, D hidden width, H query heads,
K key/value heads, d head width, V vocabulary, P pieces of a packed sequence.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.segment_attention import Segment, send_segments
from longdraft.kernels.transfer import from_host
from longdraft.kernels.tree import PassPlan
from longdraft.models.kv_cache import KVCache

NEEDS = frozenset({"logits", "pre_norm", "post_norm", "last_kv", "queries"})
Span = tuple[int, int]  # start and stop, in tokens
# Prompt tokens per prefill pass. A GPU reads all weights and the whole context once per pass, so more tokens share that
# cost; a CPU's caches favour fewer.
ROWS_GPU, ROWS_CPU = 2048, 512


class SequenceShard(NamedTuple):
    """One process's share of a pass over a packed sequence that several processes split (train/sequence_parallel.py).

    Attributes:
        tokens: the range of the pass's tokens that this process computes.
        attend: attention of these n tokens over the tokens of all processes, [n, H, d]. Its arguments are those of
            `segment_attention`, with the pieces of the whole sequence.
    """

    tokens: slice
    attend: Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """The input of one forward pass of a decoder.

    Without a cache the pass is causal over its own tokens. With a cache its tokens follow each slot's committed ones.

    Attributes:
        tokens_BT: token ids of any integer dtype, at least one per slot.
        cache: earlier keys and values. The pass writes its own after each slot's committed ones, where they are
            pending until the caller's `cache.commit`. None: the pass stands alone.
        positions_BT: int64 positions for RoPE; jumps are allowed. They never change what a token attends to. None:
            0 .. T-1, counted from each slot's length with a cache, and from each piece's start with `borders`.
        tree_mask_BTT: bool, true where token i reads token j of the pass: j is node i itself or one of its ancestors.
            Needs `cache` and `positions_BT`, where a node's position is its parent's plus one. None: a chain.
        needs: names of the TargetOutput fields to compute; all others stay None. The pass stops as early as they allow:
            after the last layer's K and V for "last_kv" and "queries", before the final norm for "pre_norm".
        logits_at_BR: int64 indices of the pass's tokens whose logits are computed. None: all T.
        queries_at_B: int64 index of the one token per slot whose queries are returned. None: the last.
        borders: P + 1 offsets in order, 0 first and T last, that cut one packed sequence (B = 1) into pieces that do
            not read each other. Not with a cache. None: nothing is packed.
        chunk: how many tokens go through a layer's projections and feed-forward at a time, which bounds their memory;
            attention takes all tokens at once. Not with a cache. None: all T.
        shard: this process's share of a packed sequence that several processes split; the output then holds its own
            tokens only. Needs `borders`. None: this process computes the whole sequence.
        commits_B: int64, how many of its first tokens the caller will commit if that is known before, as of a prompt:
            linear attention then advances within the pass. Not with a tree. None: it waits for `cache.commit`.
    """

    tokens_BT: Tensor
    cache: KVCache | None = None
    positions_BT: Tensor | None = None
    tree_mask_BTT: Tensor | None = None
    needs: Set[str] = frozenset({"logits"})
    logits_at_BR: Tensor | None = None
    queries_at_B: Tensor | None = None
    borders: Sequence[int] | None = None
    chunk: int | None = None
    shard: SequenceShard | None = None
    commits_B: Tensor | None = None

    def __post_init__(self) -> None:
        cached, (n_sequences, n_tokens) = self.cache is not None, self.tokens_BT.shape
        assert self.tokens_BT.numel(), "tokens_BT: at least one token a slot"
        assert self.needs <= NEEDS, f"needs: unknown {sorted(self.needs - NEEDS)}"
        assert self.chunk is None or (not cached and self.chunk > 0), "chunk: none with a cache"
        assert self.commits_B is None or self.tree_mask_BTT is None, "commits_B: not with a tree"
        if self.borders is not None:
            assert not cached and n_sequences == 1, "borders: pieces lie end to end in one sequence without a cache"
            start, *_, end = self.borders
            assert [0, *sorted(self.borders), n_tokens] == [start, *self.borders, end], f"borders: {self.borders}"

    def positions(self) -> Tensor:
        """`positions_BT` [B, T], or the default positions, which are [1, T] where all slots share them."""
        if self.positions_BT is not None:
            return self.positions_BT
        device = self.tokens_BT.device
        positions_1T = torch.arange(self.tokens_BT.shape[1], device=device)[None]
        if self.cache is not None:
            return positions_1T + self.cache.lengths[:, None]
        if self.borders is None:
            return positions_1T
        starts_P, sizes_P = torch.tensor(self.borders[:-1]), torch.tensor(self.borders).diff()
        return positions_1T - from_host(starts_P.repeat_interleave(sizes_P), device)

    def pieces(self) -> list[Segment] | None:
        """Each piece as queries that read its own keys; None without borders.

        Sends to the device ahead of time what attention needs of them.
        """
        if self.borders is None:
            return None
        pieces = [Segment(*piece, *piece) for piece in pairwise(self.borders)]
        send_segments(pieces, self.tokens_BT.device)
        return pieces

    def plan(self) -> PassPlan | None:
        """What the attention of all layers shares in a pass over a cache; None without one."""
        if self.cache is None:
            return None
        return PassPlan(self.cache.lengths, self.tokens_BT.shape[1], self.tree_mask_BTT)


@dataclass
class AttentionContext:
    """What the attention of every layer needs of a pass: `plan` is `inputs.plan()`, `pieces` is `inputs.pieces()`."""

    inputs: Pass
    plan: PassPlan | None
    pieces: list[Segment] | None


@dataclass
class LayerContext(AttentionContext):
    """What the layers of one pass share."""

    ropes: list[tuple[Tensor, Tensor]]  # cos and sin of the pass's tokens, for each of Decoder.ropes
    query_factors: Tensor | None = None  # `query_factors` of models/rope.py
    # For linear attention. With borders: -1, then each token's piece, ascending ids. With borders or a tree: which
    # tokens each one's convolution reads (kernels/delta_layer.py).
    piece_S: Tensor | None = None
    recent_BTW: Tensor | None = None

    def of_tokens(self, tokens: slice) -> "LayerContext":
        """The context of these tokens of the pass."""
        ropes = [(cos[:, tokens].contiguous(), sin[:, tokens].contiguous()) for cos, sin in self.ropes]
        factors = None if self.query_factors is None else self.query_factors[:, tokens]
        return replace(self, ropes=ropes, query_factors=factors)

    def chunks(self) -> list[slice]:
        """The tokens of the pass in runs of at most `Pass.chunk`."""
        n_tokens = self.ropes[0][0].shape[1]
        size = self.inputs.chunk or max(1, n_tokens)
        return [slice(start, start + size) for start in range(0, n_tokens, size)]


@dataclass
class TargetOutput:
    """The output of one pass: the fields that `Pass.needs` named; all others are None.

    All tensors are on the model's device and in its dtype.

    Attributes:
        logits: [B, R, V], of the tokens at `logits_at_BR`, or of all T.
        pre_norm: [B, T, D], the last layer's output before the final norm (h_0 of TokenSwift).
        post_norm: [B, T, D], the same after the final norm: what the LM head reads.
        last_kv: K (after RoPE) and V of this pass's tokens in the last layer, each [B, T, K, d].
        queries: [L, B, H, d], the query (after RoPE) of one token per slot, in every layer.
    """

    logits: Tensor | None = None
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    last_kv: tuple[Tensor, Tensor] | None = None
    queries: Tensor | None = None

    def first(self, count: int) -> "TargetOutput":
        """The output of each slot's first `count` tokens, with the queries unchanged."""
        return self._with(lambda x_BTX: x_BTX[:, :count], self.queries)

    def among(self, slots: slice, batch: int) -> "TargetOutput":
        """An output of `batch` slots: this output at `slots`, zeros elsewhere."""
        queries = None if self.queries is None else spread(self.queries.transpose(0, 1), slots, batch).transpose(0, 1)
        return self._with(lambda x_BTX: spread(x_BTX, slots, batch), queries)

    def _with(self, change: Callable[[Tensor], Tensor], queries: Tensor | None) -> "TargetOutput":
        """The output with `change` applied to every field except the queries, which are replaced by `queries`."""
        parts = (self.logits, self.pre_norm, self.post_norm, *(self.last_kv or (None, None)))
        logits, pre_norm, post_norm, k, v = (None if x is None else change(x) for x in parts)
        return TargetOutput(logits, pre_norm, post_norm, None if k is None or v is None else (k, v), queries)


def take_at(x_BTD: Tensor, at_BR: Tensor | None) -> Tensor:
    """The tokens at these indices of each slot: [B, R, D]; None: all tokens."""
    return x_BTD if at_BR is None else x_BTD[torch.arange(len(x_BTD), device=x_BTD.device)[:, None], at_BR]


def take_one(x_BTHd: Tensor, at_B: Tensor | None) -> Tensor:
    """One token of each slot, copied: [B, H, d]; None: the last token."""
    return x_BTHd[:, -1].clone() if at_B is None else x_BTHd[torch.arange(len(x_BTHd), device=x_BTHd.device), at_B]


def spread(x: Tensor, slots: slice, batch: int) -> Tensor:
    """x [b, ...] of these slots as [B, ...], with zeros elsewhere."""
    all_slots = x.new_zeros(batch, *x.shape[1:])
    all_slots[slots] = x
    return all_slots


def prompt_rows(device_type: str) -> int:
    """The default number of prompt tokens per prefill pass."""
    return ROWS_CPU if device_type == "cpu" else ROWS_GPU
