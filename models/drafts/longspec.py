"""LongSpec's draft (arXiv 2502.17421): config and network, one definition for training and serving.

One block on the target's token embedding: self-attention over a window of rows, cross-attention to the keys and values
of the target's last layer, feed-forward; the target's LM head reads its output. As the block's input is the embedding
alone, its own keys and values depend on token and position only, so serving projects them without running the block.
Not here: beams and caches (infer/drafters/longspec.py), files (models/draft_folder.py), the authors' tensor names
(models/published_longspec.py).
Shapes: B rows, T tokens, D hidden, H query heads, K key/value heads, d head width, E draft vocabulary. In training N
tokens of several pieces lie end to end, and the block runs for Q of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from longdraft.kernels.rotate import rotate
from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.models.decoder import Decoder, Layer
from longdraft.models.decoder_config import DecoderConfig
from longdraft.models.drafts.loss import DraftLoss, Part, Teaching, draft_loss
from longdraft.models.drafts.projection import Projection
from longdraft.models.drafts.vocabulary import DraftVocabulary
from longdraft.models.experts import Experts
from longdraft.models.rope import Rope, RopeConfig, piece_lengths
from longdraft.models.stream import RMSNorm, Stream

INIT_STD = 0.02
# Fields that are the target's own.
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim", "rms_norm_eps",
    "max_positions",
)  # fmt: skip


@dataclass(frozen=True)
class LongSpecConfig:
    """Shape of the block, which is the target's (see `for_target`), and its options.

    `rope`: transformers' `rope_parameters`. `window`: rows before a query's own that self-attention reads.
    `noise`: J, the largest noise shift in training, so the deepest tree level that serving should use.
    `final_norm`: an RMSNorm before the LM head. `warm_start`: the weights start as the target's own, not at random.
    `draft_vocab_size`: how many tokens it can propose (the buffer `token_ids` says which); None for all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: Mapping[str, Any]
    window: int = 512
    noise: int = 5
    final_norm: bool = False
    warm_start: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self):
        for name in (*SHAPE, "window", "noise"):
            if getattr(self, name) <= 0:
                raise ValueError(f"draft.{name}: {getattr(self, name)}, but it must be above 0")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"draft.n_heads: {self.n_heads} is no multiple of n_kv_heads ({self.n_kv_heads})")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft.draft_vocab_size: {self.draft_vocab_size}; give 1 to {self.vocab_size}, the target's "
                f"vocabulary, or None for all of it"
            )
        object.__setattr__(self, "rope", dict(self.rope))
        _ = self.rope_config  # an unknown type is refused here

    @property
    def rope_config(self) -> RopeConfig:
        """RoPE of the target's last layer, whose keys the block reads."""
        return RopeConfig(self.head_dim, self.max_positions, self.rope)

    @staticmethod
    def for_target(target: DecoderConfig, **options: Any) -> "LongSpecConfig":
        """The config of a draft for this target; `options` are the fields from `window` on."""
        return LongSpecConfig(**shape_of(target), rope=target.rope_of(-1).parameters, **options)


def shape_of(target: DecoderConfig) -> dict[str, Any]:
    """The fields of SHAPE; `max_positions` is what RoPE is made with, however many the target is allowed."""
    return {name: getattr(target, name) for name in SHAPE} | {"max_positions": target.rope.max_positions}


class Queries(NamedTuple):
    """What the block runs for in training, from `plan_queries`.

    `rows` int64 [Q], the tokens, None for all N. `in_window`, `in_target`: which of the draft's own and of the target's
    keys these read. `borders`: where each piece starts, and at the end N.
    """

    rows: Tensor | None
    in_window: list[Segment]
    in_target: list[Segment]
    borders: list[int]


def plan_queries(
    borders: Sequence[int], shifts: Sequence[int], window: int, ranges: Sequence[tuple[int, int]] | None = None
) -> Queries:
    """Token t of a piece reads tokens t - window .. t by self-attention, target keys up to t - j by cross-attention.

    No query reads beyond its piece; where t - j lies before it the cross-attention gives zeros. Rows count, whatever
    their positions. Level l of a tree is j = l, as the target has not seen the l tokens before it.

    Args:
        borders: where each piece starts, and at the end N.
        shifts: the noise shift j >= 1 of each piece.
        window: rows before its own that a query reads.
        ranges: [start, stop) of the tokens to run for, in order, each within a piece; None: all.
    Raises: ValueError for a shift below 1, another number of them than of pieces, or such a range.
    """
    if len(shifts) != len(borders) - 1 or min(shifts, default=1) < 1:
        raise ValueError(f"shifts: {list(shifts)}; give one of at least 1 for each of {len(borders) - 1} pieces")
    wanted = list(pairwise(borders)) if ranges is None else list(ranges)
    in_window, in_target, done, last, piece = [], [], 0, 0, 0
    for start, stop in wanted:
        while piece + 1 < len(shifts) and start >= borders[piece + 1]:
            piece += 1
        first, shift = borders[piece], shifts[piece]
        if not max(first, last) <= start <= stop <= borders[piece + 1]:
            raise ValueError(
                f"ranges: [{start}, {stop}) is out of order or crosses the border of its piece, [{first}, "
                f"{borders[piece + 1]}); give ranges in order, each within one piece"
            )
        end, last = done + stop - start, stop
        in_window.append(Segment(done, end, max(first, start - window), stop))
        seeing = min(max(start, first + shift), stop)
        in_target.append(Segment(done + seeing - start, end, first, max(first, stop - shift)))
        done = end
    rows = None if ranges is None else torch.cat([torch.arange(*r) for r in wanted] or [torch.empty(0).long()])
    return Queries(rows, in_window, in_target, list(borders))


class LongSpec(DraftVocabulary):
    """The block. q, k and v of the self-attention are one projection, in this order of rows; so are gate and up.

    Args:
        config: the shape.
        generator: draws the weights from N(0, 0.02); the same seed gives the same draft. None leaves them at zero, for
            weights read from a file.
        target: where `final_norm` and `warm_start` take their weights from.
        token_ids_E: int64, the target's ids of a restricted draft vocabulary; None: the first `draft_vocab_size`.
    Raises: ValueError where `warm_start` has no target, or the target another shape.
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
        self.self_qkv = Projection(d, q_rows + 2 * config.n_kv_heads * config.head_dim)
        self.self_o = Projection(q_rows, d, bias=False)
        self.cross_q = Projection(d, q_rows)
        self.cross_o = Projection(q_rows, d, bias=False)
        self.gate_up = Projection(d, 2 * config.intermediate_size, bias=False)
        self.down = Projection(config.intermediate_size, d, bias=False)
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
        wanted = [name for name in ("final_norm", "warm_start") if getattr(self.config, name)]
        if not wanted or (target is None and generator is None):
            return
        if target is None:
            raise ValueError(
                f"draft.{wanted[0]}: it starts from the target's weights; give the target, or set it false"
            )
        different = [name for name, own in shape_of(target.config).items() if getattr(self.config, name) != own]
        if different:
            raise ValueError(f"target: not of this draft's {', '.join(different)}; use LongSpecConfig.for_target")
        if self.final_norm is not None:
            self.final_norm.weight.copy_(target.norm.weight)
        if self.config.warm_start:
            self._start_from(target)

    def _start_from(self, target: Decoder) -> None:
        """Self-attention as in the target's first layer, the rest as in its last; biases of q, k, v where it has them.

        What this block has no place for (norms of q and k and behind the sub-layers, biases of o and of the
        feed-forward, another gate than silu) is left out; where the last layer has experts, the feed-forward stays as
        it was drawn.
        """
        first, last = cast(Layer, target.layers[0]), cast(Layer, target.layers[-1])
        q_rows = self.cross_q.out_features
        pairs: list[tuple[Tensor, Tensor]] = [
            (self.self_norm.weight, first.attention_norm.weight),
            (self.self_qkv.weight, first.attention.qkv_proj.weight),
            (self.self_o.weight, first.attention.o_proj.weight),
            (self.cross_norm.weight, last.attention_norm.weight),
            (self.cross_q.weight, last.attention.qkv_proj.weight[:q_rows]),
            (self.cross_o.weight, last.attention.o_proj.weight),
            (self.mlp_norm.weight, last.mlp_norm.weight),
        ]
        if not isinstance(last.mlp, Experts):
            pairs += [
                (self.gate_up.weight, last.mlp.gate_up_proj.weight),
                (self.down.weight, last.mlp.down_proj.weight),
            ]
        if target.config.attention_bias:
            pairs += [
                (self.self_qkv.bias, first.attention.qkv_proj.bias),
                (self.cross_q.bias, last.attention.qkv_proj.bias[:q_rows]),
            ]
        for ours, theirs in pairs:
            ours.copy_(theirs)

    def tables(self, positions_BT: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin at these positions (int64, jumps allowed), in the draft's dtype.

        lengths: as in `Rope`; RoPE types that depend on the length ask for it.
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
        """What the LM head reads, [B, T, D], for these rows.

        Args:
            tables: of the rows' positions, from `tables`.
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
        """Whole pieces: what the LM head reads at every query, [Q, D]. Token t's state proposes token t + 1.

        Args:
            embeddings_ND: the target's embeddings of the tokens, in the draft's dtype.
            positions_N: int64; Anchor-Offset positions may jump.
            target_keys_NKd, target_values_NKd: last layer's post-RoPE K and V of a target pass over the same pieces and
                positions.
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
            window = self.config.window + 1  # with the query's own
            return segment_attention(q_BTHd[0], keys_1NKd[0], values_1NKd[0], queries.in_window, window)[None]

        def attend_cross(q_BTHd: Tensor) -> Tensor:
            return segment_attention(q_BTHd[0], target_keys_NKd, target_values_NKd, queries.in_target)[None]

        return self.block(x_1ND, tables, attend_self, attend_cross)[0]

    def forward(
        self,
        embeddings_ND: Tensor,
        positions_N: Tensor,
        target_keys_NKd: Tensor,
        target_values_NKd: Tensor,
        queries: Queries,
        parts: Sequence[Part],
        lm_head_VD: Tensor,
        count_ranks: bool,
        teaching: Teaching | None = None,
    ) -> DraftLoss:
        """The training loss of the queries' states (see `states`), a part for each noise shift.

        Args:
            parts: rows of the Q states; labels are draft tokens, so numbers below `draft_vocab_size` where it is set.
            lm_head_VD: the target's frozen LM head.
            count_ranks: also count the labels among the first candidates.
            teaching: the target's distributions; None: the loss is the labels' cross-entropy.
        """
        states_QD = self.states(embeddings_ND, positions_N, target_keys_NKd, target_values_NKd, queries)
        return draft_loss([states_QD] * len(parts), parts, self.head(lm_head_VD), count_ranks, teaching)
