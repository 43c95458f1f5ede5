"""Causal attention between runs of rows that lie end to end: packed documents, noise shifts, subsets of queries.

A segment's last query reads all of its keys, each query before it one key less (flash-attention's bottom-right
alignment); whatever lies outside the segments is not read. On a GPU in half precision all segments go through one
kernel (kernels/backend.py says whose), elsewhere each is a call of its own. Its backward computes the gradients of keys
and values too, wanted or not; where they are frozen, as the target's are, triton_impl/segment_attention.py computes the
queries' alone. The plain reference is reference/segment_attention.py. Not here: caches and trees (tree_attention.py).
Shapes: N query rows, M key rows, S segments, P queries in segments, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longdraft.kernels import backend
from longdraft.kernels.causal_attention import causal_attention
from longdraft.kernels.sinks import attention_with_sinks
from longdraft.kernels.transfer import from_host

# One kernel wants keys end to end, so what segments share is copied: at most this many rows for each that there is.
MOST_COPIES = 4


class Segment(NamedTuple):
    """Query rows [q_start, q_stop) read key rows [k_start, k_stop); at least as many keys as queries."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


class Layout(NamedTuple):
    """Segments end to end. `q_rows`, `k_rows`: which rows lie there, a slice where they lie so already, int64 indices
    where they are gathered. `q_borders`, `k_borders` int32 [S + 1]: where each segment starts among them, and at the
    end how many there are. `most_queries`, `most_keys`: of one segment. `spans` int32 [S, 4]: the segments."""

    q_rows: slice | Tensor
    k_rows: slice | Tensor
    q_borders: Tensor
    k_borders: Tensor
    most_queries: int
    most_keys: int
    spans: Tensor


def segment_attention(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Query i of a segment of n queries and m keys reads its keys 0 .. m - n + i, the last `window` of them.

    Args:
        q_NHd: queries after RoPE. k_MKd, v_MKd: keys and values, K divides H (head h reads h // (H / K)).
        segments: in the order of their queries, which do not overlap; their keys may. One without queries is none.
        window: number of keys a query reads at most; None for all.
        sinks_H: scores of kernels/sinks.py, where there are any; without gradients.
    Returns: [N, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for rows in no segment, and no gradient to them.
    Raises: ValueError for a segment with fewer keys than queries, out of order, or beyond the rows there are.
    """
    _check(segments, len(q_NHd), len(k_MKd))
    segments = _with_queries(segments)
    if not segments:
        return _blind(q_NHd)
    copies = sum(segment.k_stop - segment.k_start for segment in segments)
    attention = backend.varlen_attention_for(q_NHd) if copies <= MOST_COPIES * len(k_MKd) else None
    if attention is None:
        return _one_by_one(q_NHd, k_MKd, v_MKd, segments, window, sinks_H)
    kernels = backend.triton_kernels("segment_attention", q_NHd.device.type)
    frozen = not (k_MKd.requires_grad or v_MKd.requires_grad)
    if kernels is not None and frozen and q_NHd.requires_grad and torch.is_grad_enabled():
        return with_frozen_keys(attention, kernels.query_gradient, q_NHd, k_MKd, v_MKd, segments, window)
    return in_one_call(attention_with_sinks(attention, sinks_H), q_NHd, k_MKd, v_MKd, segments, window)


def send_segments(segments: Sequence[Segment], device: torch.device) -> None:
    """What `segment_attention` copies to a GPU for these segments is copied now, before other work is queued there."""
    segments = _with_queries(segments)
    if segments and device.type == "cuda":
        lay_end_to_end(segments, device)


def _with_queries(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments if segment.q_stop > segment.q_start)


def in_one_call(
    attention: Callable[..., Tensor],
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: tuple[Segment, ...],
    window: int | None,
) -> Tensor:
    """`segment_attention` by one call of a function like `backend.varlen_attention`; none without queries."""
    layout = lay_end_to_end(segments, q_NHd.device)
    return _put_back(attention(*_laid(layout, q_NHd, k_MKd, v_MKd), window), q_NHd, layout)


def with_frozen_keys(
    attention: Callable[..., tuple[Tensor, Tensor]],
    query_gradient: Callable[..., Tensor],
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: tuple[Segment, ...],
    window: int | None,
) -> Tensor:
    """As `in_one_call`, with a gradient of the queries alone, by a function like the one of that name in
    triton_impl/segment_attention.py. `attention` is told `with_lse=True` and gives the log-sum-exps, fp32 [H, P], too.
    """
    layout = lay_end_to_end(segments, q_NHd.device)
    out_NHd: Any = _FrozenKeys.apply(attention, query_gradient, q_NHd, k_MKd, v_MKd, layout, window)
    return out_NHd


class _FrozenKeys(torch.autograd.Function):
    """Copies that lay segments end to end are not kept: the gradient is of the rows where they are."""

    @staticmethod
    def forward(ctx, attention, query_gradient, q_NHd, k_MKd, v_MKd, layout, window):  # pyright: ignore[reportIncompatibleMethodOverride]
        out, lse_HP = attention(*_laid(layout, q_NHd, k_MKd, v_MKd), window, with_lse=True)
        assert lse_HP.shape == (q_NHd.shape[1], len(out)) and lse_HP.dtype == torch.float32, "not fp32 [H, P]"
        out_NHd = _put_back(out, q_NHd, layout)
        ctx.save_for_backward(q_NHd, k_MKd, v_MKd, out_NHd, lse_HP)
        ctx.query_gradient, ctx.layout, ctx.window = query_gradient, layout, window
        return out_NHd

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NHd):  # pyright: ignore[reportIncompatibleMethodOverride]
        layout = ctx.layout
        segments = layout.spans, layout.q_borders, layout.most_queries
        dq_NHd = ctx.query_gradient(*ctx.saved_tensors, grad_NHd, *segments, ctx.window)
        return None, None, dq_NHd, None, None, None, None


def _laid(layout: Layout, q_NHd: Tensor, k_MKd: Tensor, v_MKd: Tensor) -> tuple[Any, ...]:
    """What a function like `backend.varlen_attention` takes, but for the window."""
    rows = q_NHd[layout.q_rows], k_MKd[layout.k_rows], v_MKd[layout.k_rows]
    return *rows, layout.q_borders, layout.k_borders, layout.most_queries, layout.most_keys


def _put_back(out_PHd: Tensor, q_NHd: Tensor, layout: Layout) -> Tensor:
    if len(out_PHd) == len(q_NHd):
        return out_PHd
    out_NHd = torch.zeros_like(q_NHd)
    out_NHd[layout.q_rows] = out_PHd
    return out_NHd


def _one_by_one(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: tuple[Segment, ...],
    window: int | None,
    sinks_H: Tensor | None,
) -> Tensor:
    q_parts = _cut(q_NHd, [(segment.q_start, segment.q_stop) for segment in segments])
    spans = [(segment.k_start, segment.k_stop) for segment in segments]
    keys, values = _cut(k_MKd, spans)[1::2], _cut(v_MKd, spans)[1::2]
    out = [_blind(q_parts[0])]
    for q, k, v, gap in zip(q_parts[1::2], keys, values, q_parts[2::2], strict=True):
        out += [causal_attention(q[None], k[None], v[None], window, sinks_H)[0], _blind(gap)]
    return torch.cat(out)


def _cut(x: Tensor, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
    """The rows before the first span, the first span's, those between it and the second, ..., those behind the last.

    Spans in order are cut at once: the gradient of that is one tensor, that of a slice as long as x for each.
    """
    edges = [0, *(edge for span in spans for edge in span), len(x)]
    if edges == sorted(edges):
        return x.split([stop - start for start, stop in pairwise(edges)])
    return [x[:0], *(rows for start, stop in spans for rows in (x[start:stop], x[:0]))]


def _blind(q_NHd: Tensor) -> Tensor:
    """Zeros that depend on the queries, whose gradient is then zero and not missing: every rank of a sharded draft has
    one for the same weights. NaN does not get through."""
    return q_NHd.masked_fill(torch.ones((), dtype=torch.bool, device=q_NHd.device), 0.0)


@lru_cache(maxsize=16)  # the layers of a pass share theirs
def lay_end_to_end(segments: tuple[Segment, ...], device: torch.device) -> Layout:
    """What kernels for sequences of several lengths want to know; at least one segment, none without queries. Made on
    the host; what is queued on the device is not waited for."""
    q_rows, q_borders, most_queries = _end_to_end([(s.q_start, s.q_stop) for s in segments], device)
    k_rows, k_borders, most_keys = _end_to_end([(s.k_start, s.k_stop) for s in segments], device)
    spans = from_host(torch.tensor(segments, dtype=torch.int32), device)
    return Layout(q_rows, k_rows, q_borders, k_borders, most_queries, most_keys, spans)


def _end_to_end(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[slice | Tensor, Tensor, int]:
    sizes = [stop - start for start, stop in spans]
    borders = from_host(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)
    if all(before[1] == behind[0] for before, behind in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1]), borders, max(sizes)
    return from_host(torch.cat([torch.arange(*span) for span in spans]), device), borders, max(sizes)


def _check(segments: Sequence[Segment], n_queries: int, n_keys: int) -> None:
    done = 0
    for segment in segments:
        q_start, q_stop, k_start, k_stop = segment
        if not done <= q_start <= q_stop <= n_queries:
            raise ValueError(
                f"segments: {segment} has queries out of order, or not among rows {done} to {n_queries}; "
                "give segments in the order of their queries, none twice"
            )
        if not 0 <= k_start <= k_stop - (q_stop - q_start) or k_stop > n_keys:
            raise ValueError(
                f"segments: {segment} has fewer keys than queries, or not among rows 0 to {n_keys}; "
                "give it a key for each query"
            )
        done = q_stop
