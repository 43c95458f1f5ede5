"""One decoder for the Llama family: RMSNorm, grouped-query attention with RoPE, gated SiLU feed-forward.

It is frozen (no gradient needs to flow through it) and single-device; reading checkpoints is hf.py's work, choosing
tokens is infer's. Shapes: B slots, T rows of a pass, R rows with logits, D hidden width, H query heads, K key/value
heads, d head width, V vocabulary.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from longdraft.kernels.causal_attention import causal_attention
from longdraft.kernels.chain_attention import prompt_attention
from longdraft.kernels.linear import linear
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.kernels.transfer import from_host
from longdraft.kernels.tree_attention import PassPlan, plan_pass, tree_attention
from longdraft.models.device import on_device
from longdraft.models.kv_cache import KVCache
from longdraft.models.recorded_layers import RecordedLayers, can_record
from longdraft.models.rope import Rope, RopeConfig, piece_lengths
from longdraft.models.stream import RMSNorm, Stream

NEEDS = frozenset({"logits", "pre_norm", "post_norm", "last_kv", "queries"})
# What is finished once the last layer's K and V are written: with nothing else asked for, the pass stops there.
_BEFORE_LAST_ATTENTION = frozenset({"last_kv", "queries"})


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and arithmetic of a target; `head_dim` stands alone, it is not hidden_size / n_heads everywhere."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention_bias: bool = False  # on q, k and v
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] | None = None  # one a layer: tokens a query sees, None for all

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}; it must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.sliding_windows is not None and len(self.sliding_windows) != self.n_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.n_layers} layers")


@dataclass
class TargetOutput:
    """What a pass gives; a field that was not asked for is None. All in the model's dtype.

    logits [B, R, V] of the requested rows; pre_norm [B, T, D], the last layer's output before the final norm
    (h_0 of TokenSwift); post_norm [B, T, D]; last_kv: the last layer's post-RoPE K and V of this pass, each
    [B, T, K, d]; queries [n_layers, B, H, d]: post-RoPE query of one row of each slot, in every layer.
    """

    logits: Tensor | None = None
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    last_kv: tuple[Tensor, Tensor] | None = None
    queries: Tensor | None = None

    def of_slot(self, slot: int, n_rows: int) -> "TargetOutput":
        """The first rows of one slot: views with B = 1."""
        own, both = slice(slot, slot + 1), self.last_kv

        def first(x_BTX: Tensor | None) -> Tensor | None:
            return None if x_BTX is None else x_BTX[own, :n_rows]

        return TargetOutput(
            first(self.logits),
            first(self.pre_norm),
            first(self.post_norm),
            None if both is None else (both[0][own, :n_rows], both[1][own, :n_rows]),
            None if self.queries is None else self.queries[:, own],
        )


class Linear(nn.Linear):
    """nn.Linear through kernels/linear.py, with the norm before it and what follows it in the same call."""

    def forward(
        self,
        input: Tensor,
        norm: RMSNorm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        prompts: Sequence[int] | None = None,
    ) -> Tensor:
        before = None if norm is None else (norm.weight, norm.eps)
        return linear(input, self.weight, self.bias, norm=before, gated=gated, residual=residual, prompts=prompts)


class RowShare(Protocol):
    """What one of several processes that share a packed row does of a pass (train/sequence_parallel.py)."""

    rows: slice  # of the pass: its own

    def attend(self, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor, pieces: list[Segment], window: int | None) -> Tensor:
        """Its rows' attention over those of all processes, [n, H, d]; the pieces are the whole row's."""
        ...


@dataclass
class _Pass:
    """What the layers of one pass share."""

    cos: Tensor
    sin: Tensor
    cache: KVCache | None
    plan: PassPlan | None
    pieces: list[Segment] | None
    row_chunk: int | None
    share: RowShare | None = None
    prompts: Sequence[int] | None = None

    def rows(self, part: slice) -> "_Pass":
        """The same pass, for some of its rows."""
        return replace(self, cos=self.cos[:, part], sin=self.sin[:, part])

    def chunks(self) -> list[slice]:
        """The rows of a pass, as many at a time as products and feed-forward take."""
        n_rows = self.cos.shape[1]
        size = self.row_chunk or n_rows
        return [slice(start, start + size) for start in range(0, n_rows, size)]


class Attention(nn.Module):
    """Grouped-query attention of one layer; q, k and v come from one projection, in this order of rows."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.window = config.sliding_windows[layer] if config.sliding_windows else None
        rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, bias=config.attention_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, stream: Stream, norm: RMSNorm, step: _Pass) -> tuple[Tensor, Tensor, Tensor]:
        """Post-RoPE q [B, T, H, d] and k, and v [B, T, K, d]; k and v are written to the cache, if there is one."""
        qkv_BTNd = stream.read(self.qkv_proj, norm, prompts=step.prompts).unflatten(-1, (-1, self.head_dim))
        norms, tables = self._head_norms(), (step.cos, step.sin)
        if step.cache is None:
            qk = rotate(qkv_BTNd[:, :, : -self.n_kv_heads], *tables, norms)
        else:
            qk = step.cache.append_rotated(self.layer, qkv_BTNd, *tables, norms)
        return qk[:, :, : self.n_heads], qk[:, :, self.n_heads :], qkv_BTNd[:, :, -self.n_kv_heads :]

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.n_heads, self.q_norm.eps)

    def attend(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, step: _Pass) -> Tensor:
        """Attention over the pass's own rows, or the cache, before the output projection: [B, T, H, d]."""
        if step.pieces is not None:
            attend = segment_attention if step.share is None else step.share.attend
            return attend(q_BTHd[0], k_BTKd[0], v_BTKd[0], step.pieces, self.window)[None]
        if step.cache is None:
            return causal_attention(q_BTHd, k_BTKd, v_BTKd, self.window)
        if step.prompts is not None:
            return prompt_attention(q_BTHd, k_BTKd, v_BTKd, step.prompts, self.window)
        cache, plan = step.cache, step.plan
        assert plan is not None
        return tree_attention(
            q_BTHd, cache.keys[self.layer], cache.values[self.layer], cache.lengths,
            plan.tree_mask_BTT, self.window, plan,
        )  # fmt: skip


class MLP(nn.Module):
    """Adds down(silu(gate(x)) * up(x)) of x = norm(stream); gate and up are one projection, gate's rows first."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, stream: Stream, norm: RMSNorm, prompts: Sequence[int] | None = None) -> None:
        gated_BTF = stream.read(self.gate_up_proj, norm, gated=True, prompts=prompts)
        stream.add(self.down_proj, gated_BTF, prompts=prompts)


class Layer(nn.Module):
    """attention, then feed-forward, each on a normed copy and added to the stream."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def project(self, stream: Stream, step: _Pass) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of this layer (see `Attention.project`)."""
        chunks = step.chunks()
        if len(chunks) == 1:
            return self.attention.project(stream, self.attention_norm, step)
        norm = self.attention_norm
        parts = [self.attention.project(stream.part(rows), norm, step.rows(rows)) for rows in chunks]
        q_BTHd, k_BTKd, v_BTKd = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return q_BTHd, k_BTKd, v_BTKd

    def finish(self, stream: Stream, qkv: tuple[Tensor, Tensor, Tensor], step: _Pass) -> None:
        """Adds the layer's two parts to its input, from its q, k, v; in chunks they take its rows' place."""
        heads_BTF = self.attention.attend(*qkv, step).flatten(2)
        chunks = step.chunks()
        if len(chunks) == 1:
            stream.add(self.attention.o_proj, heads_BTF, prompts=step.prompts)
            self.mlp(stream, self.mlp_norm, step.prompts)
            return
        for rows in chunks:
            part = stream.part(rows)
            part.add(self.attention.o_proj, heads_BTF[:, rows])
            self.mlp(part, self.mlp_norm)
            stream.rows[:, rows] = part.rows


class Decoder(nn.Module):
    """A frozen target: tokens in, what was asked for out."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = Rope(config.rope)
        # Entered around each layer's work; whoever keeps the weights elsewhere brings them here (train/sharding.py).
        self.around_layer: Callable[[Layer], AbstractContextManager[object]] = nullcontext
        self.recorded_layers = RecordedLayers()
        self.tie()

    @property
    def weights_stay(self) -> bool:
        """Whether passes are this process's own affair; else `around_layer` brings the weights of each, which takes the
        other ranks and the host, so that no pass can be recorded and replayed."""
        return self.around_layer is nullcontext

    def tie(self) -> None:
        """Share the embedding with the LM head where the configuration says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def __call__(self, *args, **kwargs) -> Any:
        """`forward`, with kernels launched on the weights' device, whichever is the current one."""
        with on_device(self.embed_tokens.weight.device):
            return super().__call__(*args, **kwargs)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for this model, in its dtype and on its device."""
        config, weight = self.config, self.embed_tokens.weight
        return KVCache(
            config.n_layers, batch, capacity, config.n_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: KVCache | None = None,
        positions_BT: Tensor | None = None,
        tree_mask_BTT: Tensor | None = None,
        needs: Set[str] = frozenset({"logits"}),
        logits_rows_BR: Tensor | None = None,
        query_rows_B: Tensor | None = None,
        borders: Sequence[int] | None = None,
        row_chunk: int | None = None,
        share: RowShare | None = None,
        prompts: Sequence[int] | None = None,
    ) -> TargetOutput:
        """One pass. Without a cache, causal by row order; with one, behind each slot's committed rows.

        Args:
            tokens_BT: integer token ids.
            cache: the pass's K and V are written behind each slot's length; the caller commits with `cache.commit`.
            positions_BT: int64 positions for RoPE, jumps allowed; they never change what a row attends to. None:
                0 .. T-1, behind the slot's length where there is a cache.
            tree_mask_BTT: bool; row i reads row j of the pass (a node's ancestors and itself). None: a chain.
                Positions of a tree must be given: a node's is its parent's plus one.
            needs: fields of TargetOutput to compute; nothing else is. {"last_kv"} and {"queries"} stop after the
                last layer's K and V, {"pre_norm"} before the final norm.
            logits_rows_BR: int64 indices of the rows of the pass whose logits are wanted; None: all.
            query_rows_B: int64, the row whose queries are wanted; None: the last.
            borders: pieces that lie end to end in the one row and do not read each other: where each starts, and at
                the end T. Without a cache only; positions start at 0 in each piece.
            row_chunk: rows that products and feed-forward take at a time, which bounds their memory; attention takes
                all rows. Without a cache only. None: all.
            share: with borders, what this process does of the row, where several share it; it gets the fields of its
                own rows.
            prompts: the rows are whole prompts, so many tokens of each slot and then padding of which the output says
                nothing; the cache's slots are empty. What a prompt gives does not depend on the others of the pass on a
                CPU.
        Raises: ValueError for an unknown name in `needs`, a tree without a cache or without positions, borders or
            row_chunk with a cache, borders that are not those of the one row.
        """
        if not needs <= NEEDS:
            raise ValueError(f"needs has {sorted(needs - NEEDS)}; known: {sorted(NEEDS)}")
        if tree_mask_BTT is not None and (cache is None or positions_BT is None):
            raise ValueError("tree_mask_BTT needs a cache and positions_BT")
        if borders is not None:
            _check_borders(borders, tokens_BT, cache)
        if prompts is not None and (cache is None or tree_mask_BTT is not None or len(prompts) != len(tokens_BT)):
            raise ValueError(f"prompts: {prompts}; give one length a slot, with a cache and without a tree")
        if row_chunk is not None and (cache is not None or row_chunk < 1):
            raise ValueError(f"row_chunk: {row_chunk}; give at least 1, and none with a cache, whose passes are chunks")
        step = replace(self._begin(tokens_BT, cache, positions_BT, tree_mask_BTT, borders, row_chunk), prompts=prompts)
        if share is not None:
            assert borders is not None
            tokens_BT, step = tokens_BT[:, share.rows], replace(step.rows(share.rows), share=share)
        stream = Stream(self.embed_tokens(tokens_BT))  # which lets go of it behind the first layer
        kept = None if cache is None or prompts is not None else self._recorded_layers(stream.rows, step, cache, needs)
        if kept is not None:
            hidden_BTD, queries, last_kv = kept
            queries = [_pick(q_BTHd, query_rows_B) for q_BTHd in queries]
        else:
            pick = (lambda q_BTHd: _pick(q_BTHd, query_rows_B)) if "queries" in needs else None
            hidden_BTD, queries, last_kv = self._layers(stream, step, needs, pick)
        output = TargetOutput()
        if "queries" in needs:
            output.queries = torch.stack(queries)
        if "last_kv" in needs:  # what was recorded is overwritten by the next pass
            output.last_kv = last_kv if kept is None else (last_kv[0].clone(), last_kv[1].clone())
        if needs <= _BEFORE_LAST_ATTENTION:
            return output
        if "pre_norm" in needs and kept is not None:
            hidden_BTD = hidden_BTD.clone()
        return self._head(hidden_BTD, output, needs, logits_rows_BR)

    def _layers(
        self, stream: Stream, step: _Pass, needs: Set[str], pick: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]]:
        """(The last layer's output, or its input where `needs` ends before it; what `pick` takes of each layer's
        queries [B, T, H, d]; the last layer's K and V)."""
        layers, queries = cast("list[Layer]", self.layers), []
        for layer in layers:
            with self.around_layer(layer):
                qkv = layer.project(stream, step)
                if pick is not None:
                    queries.append(pick(qkv[0]))
                if layer is not layers[-1] or not needs <= _BEFORE_LAST_ATTENTION:
                    layer.finish(stream, qkv, step)
        return stream.rows, queries, qkv[1:]

    def _recorded_layers(
        self, hidden_BTD: Tensor, step: _Pass, cache: KVCache, needs: Set[str]
    ) -> tuple[Tensor, list[Tensor], tuple[Tensor, Tensor]] | None:
        """`_layers` where a CPU's calls are recorded, with the queries of all rows where they are needed; else None."""
        assert step.plan is not None
        n_slots, n_rows, _ = hidden_BTD.shape
        if not (self.weights_stay and can_record(n_slots * n_rows, self.embed_tokens.weight)):
            return None
        mask_BTT = step.plan.tree_mask_BTT
        ends_early, pick = needs <= _BEFORE_LAST_ATTENTION, (lambda q_BTHd: q_BTHd) if "queries" in needs else None

        def layers(hidden_BTD: Tensor, cos: Tensor, sin: Tensor, mask_BTT: Tensor | None = None):
            plan = plan_pass(cache.lengths, n_rows, mask_BTT)
            return self._layers(Stream(hidden_BTD), replace(step, cos=cos, sin=sin, plan=plan), needs, pick)

        inputs = [hidden_BTD, step.cos, step.sin] + ([] if mask_BTT is None else [mask_BTT])
        key = ends_early, pick is None
        return self.recorded_layers.run(layers, cache, key, inputs, lambda: list(self.layers.parameters()))

    def _begin(
        self,
        tokens_BT: Tensor,
        cache: KVCache | None,
        positions_BT: Tensor | None,
        tree_mask_BTT: Tensor | None,
        borders: Sequence[int] | None,
        row_chunk: int | None,
    ) -> _Pass:
        n_rows = tokens_BT.shape[1]
        if positions_BT is None:
            positions_BT = torch.arange(n_rows, device=tokens_BT.device)[None]
            if cache is not None:
                positions_BT = positions_BT + cache.lengths[:, None]
            if borders is not None:
                starts_P, sizes_P = torch.tensor(borders[:-1]), torch.tensor(borders).diff()
                positions_BT = positions_BT - from_host(starts_P.repeat_interleave(sizes_P), tokens_BT.device)
        lengths, pieces = None if cache is None else cache.prompt_lengths, None
        if borders is not None:
            pieces = [Segment(*piece, *piece) for piece in pairwise(borders)]
            lengths = piece_lengths(positions_BT, borders) if self.rope.length_dependent else None
        cos, sin = self.rope(positions_BT, lengths, self.embed_tokens.weight.dtype)
        plan = None if cache is None else plan_pass(cache.lengths, n_rows, tree_mask_BTT)
        return _Pass(cos, sin, cache, plan, pieces, row_chunk)

    def _head(self, hidden_BTD: Tensor, output: TargetOutput, needs: Set[str], rows_BR: Tensor | None) -> TargetOutput:
        """Final norm and LM head, as far as asked for; the norm of rows without logits only for `post_norm`."""
        if "pre_norm" in needs:
            output.pre_norm = hidden_BTD
        if "post_norm" in needs:
            output.post_norm = self.norm(hidden_BTD)
        if "logits" in needs:  # from the un-normed rows, so that logits do not depend on what else is needed
            output.logits = self.lm_head(_rows(hidden_BTD, rows_BR), self.norm)
        return output


def _check_borders(borders: Sequence[int], tokens_BT: Tensor, cache: KVCache | None) -> None:
    n_slots, n_rows = tokens_BT.shape
    if cache is not None or n_slots != 1:
        raise ValueError(f"borders: pieces lie end to end in one row without a cache; {n_slots} rows or a cache given")
    if [borders[0], *sorted(borders), borders[-1]] != [0, *borders, n_rows]:
        raise ValueError(f"borders: {list(borders)}; give where each piece starts, in order from 0, and then {n_rows}")


def _rows(x_BTD: Tensor, rows_BR: Tensor | None) -> Tensor:
    """Rows `rows_BR` of each slot: [B, R, D]."""
    if rows_BR is None:
        return x_BTD
    return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device)[:, None], rows_BR]


def _pick(q_BTHd: Tensor, rows_B: Tensor | None) -> Tensor:
    """One row of each slot: [B, H, d], a copy."""
    if rows_B is None:
        return q_BTHd[:, -1].clone()
    return q_BTHd[torch.arange(len(q_BTHd), device=q_BTHd.device), rows_B]
