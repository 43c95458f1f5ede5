"""One pass of a decoder: what goes in, what comes out, and how much memory it takes.

Not here: the computation (models/decoder.py) and what a pass of training holds (train/estimate_memory.py).
Shapes: B slots, T query tokens a slot, R of them with logits, D hidden width, H query heads, K key/value heads, d head
width, V vocabulary.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.segment_attention import Segment, send_segments
from longdraft.kernels.transfer import from_host
from longdraft.kernels.tree_attention import PassPlan
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.kv_cache import KVCache

NEEDS = frozenset({"logits", "pre_norm", "post_norm", "last_kv", "queries", "of_spans"})
Span = tuple[int, int]  # start and stop of tokens
# Tokens of a prompt that a pass takes: a GPU reads all weights and the whole context once a pass, so many tokens share
# them there; a CPU's caches want fewer.
ROWS_GPU, ROWS_CPU = 2048, 512


class SequenceShard(Protocol):
    """What one of several processes that share a packed sequence does of a pass (train/sequence_parallel.py)."""

    tokens: slice  # of the pass: its own

    def attend(
        self,
        q_nHd: Tensor,
        k_nKd: Tensor,
        v_nKd: Tensor,
        pieces: list[Segment],
        window: int | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Attention of its tokens over those of all processes, [n, H, d]; the pieces are the whole sequence's."""
        ...


@dataclass(frozen=True, eq=False)
class Pass:
    """The input of a decoder. Without a cache a pass is causal; with one it stands behind each slot's committed tokens.

    Attributes:
        tokens_BT: integer token ids.
        cache: the pass's K and V are written behind each slot's length; the caller commits with `cache.commit`.
        positions_BT: int64 positions for RoPE, jumps allowed; they never change what a token attends to. None:
            0 .. T-1, behind the slot's length where there is a cache.
        tree_mask_BTT: bool; token i reads token j of the pass (a node's ancestors and itself). None: a chain. Positions
            of a tree must be given: a node's is its parent's plus one.
        needs: fields of TargetOutput to compute; nothing else is. {"last_kv"} and {"queries"} stop after the last
            layer's K and V, {"pre_norm"} before the final norm.
        logits_at_BR: int64 indices of the tokens of the pass whose logits are wanted; None: all.
        queries_at_B: int64 index of the token whose queries are wanted; None: the last.
        borders: pieces that lie end to end in one packed sequence and do not read each other: where each starts, and at
            the end T. Without a cache only; positions start at 0 in each piece.
        spans: with borders, runs of tokens in order, each within a piece, whose post-norm states "of_spans" are wanted;
            with nothing but {"last_kv", "of_spans"} the last layer is finished for these alone.
        chunk: tokens that products and feed-forward take at a time, which bounds their memory; attention takes all
            tokens. Without a cache only. None: all.
        shard: with borders, what this process does of the sequence, where several share it; it gets the fields of its
            own tokens.
        prompt_lengths: the tokens are whole prompts, so many of each slot and then padding of which the output says
            nothing; the cache's slots are empty. What a prompt gives does not depend on the others of the pass on a
            CPU.
    Raises: ValueError for an unknown name in `needs`, a tree without a cache or without positions, borders or a chunk
        with a cache, borders that are not those of one packed sequence.
    """

    tokens_BT: Tensor
    cache: KVCache | None = None
    positions_BT: Tensor | None = None
    tree_mask_BTT: Tensor | None = None
    needs: Set[str] = frozenset({"logits"})
    logits_at_BR: Tensor | None = None
    queries_at_B: Tensor | None = None
    borders: Sequence[int] | None = None
    spans: Sequence[Span] = ()
    chunk: int | None = None
    shard: SequenceShard | None = None
    prompt_lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        cached, tree, prompts = self.cache is not None, self.tree_mask_BTT is not None, self.prompt_lengths
        if not self.tokens_BT.numel():
            raise ValueError(f"tokens_BT: shape {list(self.tokens_BT.shape)}; give at least one token a slot")
        if not self.needs <= NEEDS:
            raise ValueError(f"needs has {sorted(self.needs - NEEDS)}; known: {sorted(NEEDS)}")
        if tree and (not cached or self.positions_BT is None):
            raise ValueError("tree_mask_BTT needs a cache and positions_BT")
        if prompts is not None and (not cached or tree or len(prompts) != len(self.tokens_BT)):
            raise ValueError(f"prompt_lengths: {prompts}; give one length a slot, with a cache and without a tree")
        if self.chunk is not None and (cached or self.chunk < 1):
            raise ValueError(f"chunk: {self.chunk}; give at least 1, and none with a cache, whose passes are chunks")
        if self.borders is not None:
            self._check_borders(self.borders)
        assert self.shard is None or self.borders is not None

    def positions(self) -> Tensor:
        """`positions_BT`, or what None stands for; [1, T] where that is the same for all slots."""
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
        """Each piece as queries and keys of its own; what attention copies for them is on its way to the device."""
        if self.borders is None:
            return None
        pieces = [Segment(*piece, *piece) for piece in pairwise(self.borders)]
        send_segments(pieces, self.tokens_BT.device)
        return pieces

    def plan(self) -> PassPlan | None:
        """What all layers of a pass over a cache share."""
        if self.cache is None:
            return None
        return PassPlan(self.cache.lengths, self.tokens_BT.shape[1], self.tree_mask_BTT)

    def _check_borders(self, borders: Sequence[int]) -> None:
        n_sequences, n_tokens = self.tokens_BT.shape
        if self.cache is not None or n_sequences != 1:
            given = f"{n_sequences} sequences or a cache"
            raise ValueError(f"borders: pieces lie end to end in one sequence without a cache; {given} given")
        if [borders[0], *sorted(borders), borders[-1]] != [0, *borders, n_tokens]:
            where = f"in order from 0, and then {n_tokens}"
            raise ValueError(f"borders: {list(borders)}; give where each piece starts, {where}")


@dataclass
class TargetOutput:
    """What a pass gives; a field that was not asked for is None. All in the model's dtype.

    logits [B, R, V] of the requested tokens; pre_norm [B, T, D], the last layer's output before the final norm
    (h_0 of TokenSwift); post_norm [B, T, D]; last_kv: the last layer's post-RoPE K and V of this pass, each
    [B, T, K, d]; of_spans [1, R, D], post-norm, of the pass's spans; queries [n_layers, B, H, d]: post-RoPE
    query of one token of each slot, in every layer.
    """

    logits: Tensor | None = None
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    last_kv: tuple[Tensor, Tensor] | None = None
    queries: Tensor | None = None
    of_spans: Tensor | None = None

    def among(self, slots: slice, batch: int) -> "TargetOutput":
        """Of these slots' output that of all; zeros for the others."""

        def all_slots(x: Tensor | None) -> Tensor | None:
            return None if x is None else spread(x, slots, batch)

        queries = None if self.queries is None else spread(self.queries.transpose(0, 1), slots, batch).transpose(0, 1)
        last_kv = self.last_kv and (spread(self.last_kv[0], slots, batch), spread(self.last_kv[1], slots, batch))
        logits, pre_norm, post_norm = (all_slots(x) for x in (self.logits, self.pre_norm, self.post_norm))
        return TargetOutput(logits, pre_norm, post_norm, last_kv, queries)

    def of_slot(self, slot: int, n_tokens: int) -> "TargetOutput":
        """The first tokens of one slot: views with B = 1."""
        own, both = slice(slot, slot + 1), self.last_kv

        def first(x_BTX: Tensor | None) -> Tensor | None:
            return None if x_BTX is None else x_BTX[own, :n_tokens]

        return TargetOutput(
            first(self.logits),
            first(self.pre_norm),
            first(self.post_norm),
            None if both is None else (both[0][own, :n_tokens], both[1][own, :n_tokens]),
            None if self.queries is None else self.queries[:, own],
        )


def take_at(x_BTD: Tensor, at_BR: Tensor | None) -> Tensor:
    """The tokens at these indices of each slot, all where there are none: [B, R, D]."""
    return x_BTD if at_BR is None else x_BTD[torch.arange(len(x_BTD), device=x_BTD.device)[:, None], at_BR]


def take_one(x_BTHd: Tensor, at_B: Tensor | None) -> Tensor:
    """One token of each slot, None for the last: [B, H, d], a copy."""
    return x_BTHd[:, -1].clone() if at_B is None else x_BTHd[torch.arange(len(x_BTHd), device=x_BTHd.device), at_B]


def take_spans(x_1NX: Tensor, spans: Sequence[Span]) -> Tensor:
    """The spans' rows of a packed sequence end to end, [1, R, ...]; of one span a view."""
    if len(spans) == 1:
        return x_1NX[:, slice(*spans[0])]
    return torch.cat([x_1NX[:, :0], *(x_1NX[:, start:stop] for start, stop in spans)], 1)


def spread(x: Tensor, slots: slice, batch: int) -> Tensor:
    """x [b, ...] of these slots as [B, ...], zeros elsewhere."""
    whole = x.new_zeros(batch, *x.shape[1:])
    whole[slots] = x
    return whole


def layers_bytes(config: DecoderConfig, n_tokens: int, dtype: torch.dtype) -> int:
    """Bytes that the layers of a pass take as one C call, for that many tokens of all slots together."""
    heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
    of_attention = (heads + 2 * kv_heads) + (heads + kv_heads) + heads  # projected, rotated, attended
    of_layer = of_attention * width + config.intermediate_size + 2 * config.hidden_size
    return n_tokens * config.n_layers * of_layer * dtype.itemsize


def feed_forward_numbers(config: DecoderConfig) -> int:
    """Numbers a token that a layer's feed-forward has alive at once: the normed copy of the stream, gate and up, and
    what becomes of gate; of experts also each one's input and output, and their sum in fp32."""
    width, of = config.hidden_size, config.experts
    dense = width + 3 * config.intermediate_size
    return dense if of is None else max(dense, 5 * width + of.per_token * (2 * width + 3 * of.size))


def prompt_rows(device_type: str) -> int:
    """Tokens of a pass over a prompt, where nobody says how many."""
    return ROWS_CPU if device_type == "cpu" else ROWS_GPU


def pass_bytes(config: DecoderConfig, n_rows: int, dtype: torch.dtype) -> int:
    """Bytes that a pass of `n_rows` rows, of all slots together, allocates at most, logits not counted.

    That is in a layer's feed-forward, or where that is narrow in its projection or its attention. There is no mask
    among it, for chains have none (kernels/chain_attention.py).
    """
    heads, kv = config.n_heads * config.head_dim, 2 * config.n_kv_heads * config.head_dim
    qkv, qk = heads + kv, heads + kv // 2
    stages = (
        qkv + 3 * qk,  # beside q, k and v of the layer before; the rotation makes two more of its size on the way
        6 * heads,  # on a CPU two parts of the keys with fp32 copies of what they give
        # The heads' outputs, the normed copy of the stream behind them, gate and up, and what becomes of gate.
        heads + feed_forward_numbers(config),
    )
    tables = 2 * config.head_dim
    return n_rows * (config.hidden_size + qkv + qk + max(stages) + tables) * dtype.itemsize
