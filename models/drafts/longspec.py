"""LongSpec's draft (arXiv 2502.17421): config and network.

One block reads the target's token embedding: self-attention over a window of tokens, cross-attention to the keys and
values of the target's last layer, feed-forward. The target's LM head reads its output. The block's input is only the
embedding, so its own keys and values depend only on token and position, and serving projects them without running the
block. infer/drafters/longspec.py drafts with it, on a CPU through kernels/cpu/draft_block.inc, the same block in C; the
authors' tensor names are in models/published.py.
Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, d head width, E draft vocabulary. In training N
tokens of several pieces are packed end to end, and the block runs for Q of them.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import Field
from torch import Tensor

from longdraft.kernels.rotate import rotate
from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.models.decoder import Decoder
from longdraft.models.decoder_config import DecoderConfig, Size
from longdraft.models.drafts.base import DraftModule
from longdraft.models.layer import Attention, Experts, Layer
from longdraft.models.passes import Span
from longdraft.models.rope import Rope, RopeConfig, piece_lengths
from longdraft.models.schema import Bool, Float, validated_dataclass
from longdraft.models.stream import Linear, RMSNorm, Stream

INIT_STD = 0.02
# Nodes in each level of the beam. The paper's first level has 4. A wider first level needs no further draft pass, and
# brings most of the gain where verifying a few nodes costs hardly more than verifying the root.
WIDTHS = (8, 16, 16, 16, 16)
# Config fields that are copied from the target.
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim", "rms_norm_eps",
    "max_positions",
)  # fmt: skip


@validated_dataclass
class LongSpecConfig:
    """Shape of the block, which is the target's (see `for_target`), and its options.

    Attributes:
        rope: transformers' `rope_parameters`.
        window: how many tokens before its own a query reads in self-attention.
        noise: J, the largest noise shift in training. Shift j hides the last j tokens from cross-attention, as level j
            of a tree does, so serving should use at most J levels.
        final_norm: an RMSNorm before the LM head.
        warm_start: start from the target's weights instead of random ones.
        draft_vocab_size: how many tokens it can propose (the buffer `token_ids` says which); None for all.
    """

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    n_heads: Size
    n_kv_heads: Size
    head_dim: Size
    rms_norm_eps: Annotated[Float, Field(gt=0)]
    max_positions: Size
    rope: dict[str, Any]
    window: Size = 512
    noise: Size = 5
    final_norm: Bool = False
    warm_start: Bool = False
    draft_vocab_size: Size | None = None

    def __post_init__(self):
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads: {self.n_heads} is not a multiple of n_kv_heads, {self.n_kv_heads}")
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size: {self.draft_vocab_size}, but the target has {self.vocab_size} tokens")
        _ = self.rope_config  # refuses an unknown type

    @property
    def rope_config(self) -> RopeConfig:
        """The RoPE of the target's last layer, whose keys the block reads."""
        return RopeConfig(self.head_dim, self.max_positions, self.rope)

    @staticmethod
    def for_target(target: DecoderConfig, **options: Any) -> "LongSpecConfig":
        """The config of a draft for this target. options: fields from `window` on."""
        return LongSpecConfig(**shape_of(target), rope=target.rope_of(-1).parameters, **options)


def shape_of(target: DecoderConfig) -> dict[str, Any]:
    """The fields of SHAPE. `max_positions` is RoPE's, which may differ from the target's own limit."""
    return {name: getattr(target, name) for name in SHAPE} | {"max_positions": target.rope.max_positions}


class Queries(NamedTuple):
    """The tokens that the block runs for in training, from `plan_queries`.

    Attributes:
        rows: int64 [Q], indices of these tokens; None for all N.
        self_segments, cross_segments: which queries read which of the draft's own keys, and which of the target's.
        borders: where each piece starts, then N.
    """

    rows: Tensor | None
    self_segments: list[Segment]
    cross_segments: list[Segment]
    borders: list[int]


def plan_queries(
    borders: Sequence[int], shifts: Sequence[int], window: int, spans: Sequence[Span] | None = None
) -> Queries:
    """Decide which keys each query reads: token t of a piece reads tokens t - window .. t by self-attention, and the
    target's keys up to t - j by cross-attention.

    No query reads outside its piece; if t - j is before the piece, its cross-attention gives zeros. The window counts
    rows, not positions. Noise shift j = l trains level l of a tree, where the target has not seen the last l tokens.

    Args:
        borders: where each piece starts, then N.
        shifts: the noise shift j >= 1 of each piece.
        window: rows before its own that a query reads.
        spans: ranges of the tokens to run for, in order, each within a piece; None: all.
    """
    assert len(shifts) == len(borders) - 1 and min(shifts, default=1) >= 1, f"shifts: {list(shifts)}"
    runs = list(pairwise(borders)) if spans is None else list(spans)
    self_segments, cross_segments, done, last, piece = [], [], 0, 0, 0
    for start, stop in runs:
        while piece + 1 < len(shifts) and start >= borders[piece + 1]:
            piece += 1
        first, shift = borders[piece], shifts[piece]
        assert max(first, last) <= start <= stop <= borders[piece + 1], f"spans: [{start}, {stop}) is not in a piece"
        end, last = done + stop - start, stop
        self_segments.append(Segment(done, end, max(first, start - window), stop))
        first_seeing = min(max(start, first + shift), stop)  # earlier tokens of the piece see no target key
        cross_segments.append(Segment(done + first_seeing - start, end, first, max(first, stop - shift)))
        done = end
    rows = None if spans is None else torch.cat([torch.arange(*run) for run in runs] or [torch.empty(0).long()])
    return Queries(rows, self_segments, cross_segments, list(borders))


class LongSpec(DraftModule):
    """The block. The self-attention's q, k and v are one projection, in this order of rows; so are gate and up.

    Args:
        generator: draws the weights from N(0, 0.02); the same seed gives the same draft. None leaves them at zero, for
            weights that are read from a file.
        target: where `final_norm` and `warm_start` take their weights from.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    """

    def __init__(
        self,
        config: LongSpecConfig,
        generator: torch.Generator | None = None,
        target: Decoder | None = None,
        token_ids_E: Tensor | None = None,
    ):
        super().__init__()
        self.config, self.rope = config, Rope(config.rope_config)
        d, q_rows = config.hidden_size, config.n_heads * config.head_dim
        self.self_norm, self.cross_norm, self.mlp_norm = (RMSNorm(d, config.rms_norm_eps) for _ in range(3))
        self.self_qkv = Linear(d, q_rows + 2 * config.n_kv_heads * config.head_dim)
        self.self_o = Linear(q_rows, d, bias=False)
        self.cross_q = Linear(d, q_rows)
        self.cross_o = Linear(q_rows, d, bias=False)
        self.gate_up = Linear(d, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, d, bias=False)
        self.final_norm = RMSNorm(d, config.rms_norm_eps) if config.final_norm else None
        self.restrict(config.draft_vocab_size, token_ids_E)
        self._initialise(generator, target)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator | None, target: Decoder | None) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if "norm" in name else 0.0)
            elif generator is not None:
                parameter.normal_(0.0, INIT_STD, generator=generator)
            else:
                parameter.zero_()
        copied = [name for name in ("final_norm", "warm_start") if getattr(self.config, name)]
        if not copied or (target is None and generator is None):
            return
        assert target is not None, f"{copied[0]}: it starts from the target's weights; give the target"
        if self.final_norm is not None:
            self.final_norm.weight.copy_(target.norm.weight)
        if self.config.warm_start:
            self._start_from(target)

    def _start_from(self, target: Decoder) -> None:
        """Copy self-attention from the target's first layer with attention and the rest from its last; biases of q, k,
        v if it has them.

        What this block has no place for is skipped: norms of q and k and after sub-layers, biases of o and of the
        feed-forward, a gate other than silu. If the last layer has experts, the feed-forward keeps its random weights.
        """
        first, last = cast(Layer, target.layers[target.config.attention_layers[0]]), cast(Layer, target.layers[-1])
        first_attention, last_attention = cast(Attention, first.attention), cast(Attention, last.attention)
        copied: list[tuple[Any, Any]] = [
            (self.self_norm, first.attention_norm),
            (self.self_o, first_attention.o_proj),
            (self.cross_norm, last.attention_norm),
            (self.cross_o, last_attention.o_proj),
            (self.mlp_norm, last.mlp_norm),
        ]
        if not isinstance(last.mlp, Experts):
            copied += [(self.gate_up, last.mlp.gate_up_proj), (self.down, last.mlp.down_proj)]
        for ours, theirs in copied:
            ours.weight.copy_(theirs.weight)
        for ours, theirs in ((self.self_qkv, first_attention.qkv_proj), (self.cross_q, last_attention.qkv_proj)):
            ours.weight.copy_(theirs.weight[: ours.out_features])
            if theirs.bias is not None:
                ours.bias.copy_(theirs.bias[: ours.out_features])

    def tables(self, positions_BT: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin at these positions (int64, jumps allowed), in the draft's dtype.

        lengths: as in `Rope`; needed by RoPE types that depend on the length.
        """
        return self.rope(positions_BT, lengths, self.self_o.weight.dtype)

    def self_kv(self, embeddings_BTD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Post-RoPE keys and values [B, T, K, d] of the self-attention, without running the block."""
        q_rows, kv_rows = self.cross_q.out_features, self.config.n_kv_heads * self.config.head_dim
        kv = self.self_qkv(embeddings_BTD, self.self_norm, first_row=q_rows)
        k_BTKd = kv[..., :kv_rows].unflatten(-1, (-1, self.config.head_dim))
        return rotate(k_BTKd, *tables), kv[..., kv_rows:].unflatten(-1, (-1, self.config.head_dim))

    def block(
        self,
        embeddings_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        attend_self: Callable[[Tensor, Tensor, Tensor], Tensor],
        attend_cross: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Run the block: the LM head's input, [B, T, D].

        Args:
            tables: `tables` of the rows' positions.
            attend_self: (q [B, T, H, d], k and v [B, T, K, d], post-RoPE) -> [B, T, H, d].
            attend_cross: q [B, T, H, d], post-RoPE -> [B, T, H, d], over the target's keys and values.
        """
        config, stream = self.config, Stream(embeddings_BTD)
        qkv = stream.read(self.self_qkv, self.self_norm).unflatten(-1, (-1, config.head_dim))
        qk, v_BTKd = qkv[:, :, : -config.n_kv_heads], qkv[:, :, -config.n_kv_heads :]
        qk = rotate(qk, *tables)
        out_BTHd = attend_self(qk[:, :, : config.n_heads], qk[:, :, config.n_heads :], v_BTKd)
        stream.add(self.self_o, out_BTHd.flatten(2))
        q_BTHd = stream.read(self.cross_q, self.cross_norm).unflatten(-1, (-1, config.head_dim))
        stream.add(self.cross_o, attend_cross(rotate(q_BTHd, *tables)).flatten(2))
        stream.add(self.down, stream.read(self.gate_up, self.mlp_norm, gated=True))
        return stream.rows if self.final_norm is None else stream.normed(self.final_norm)

    def states(
        self,
        embeddings_ND: Tensor,
        positions_N: Tensor,
        target_keys_NKd: Tensor,
        target_values_NKd: Tensor,
        queries: Queries,
    ) -> Tensor:
        """Run the block over whole pieces: the LM head's input for every query, [Q, D]. Token t's query proposes token
        t + 1. The loss has a part for each noise shift, all on these states.

        Args:
            embeddings_ND: the target's embeddings of the tokens, in the draft's dtype.
            positions_N: int64; Anchor-Offset positions may jump.
            target_keys_NKd, target_values_NKd: the last layer's post-RoPE keys and values of a target pass over the
                same pieces and positions.
            queries: from `plan_queries`.
        """
        x_1ND, positions_1N, rows = embeddings_ND[None], positions_N[None], queries.rows
        lengths = piece_lengths(positions_1N, queries.borders) if self.rope.length_dependent else None
        tables = self.tables(positions_1N, lengths)
        own_kv = None
        if rows is not None:
            own_kv = self.self_kv(x_1ND, tables)
            x_1ND, tables = x_1ND[:, rows], (tables[0][:, rows], tables[1][:, rows])

        def attend_self(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor) -> Tensor:
            keys_1NKd, values_1NKd = own_kv or (k_BTKd, v_BTKd)
            window = self.config.window + 1  # includes the query's own row
            return segment_attention(q_BTHd[0], keys_1NKd[0], values_1NKd[0], queries.self_segments, window)[None]

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            return segment_attention(q_BTHd[0], target_keys_NKd, target_values_NKd, queries.cross_segments)[None]

        return self.block(x_1ND, tables, attend_self, attend_cross)[0]
