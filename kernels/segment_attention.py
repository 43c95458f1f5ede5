"""Causal attention within segments of rows: packed documents, noise shifts, subsets of queries.

A segment's last query reads all of its keys, and each query before it reads one key fewer (flash-attention's
bottom-right alignment). Rows outside the segments are not read.
Shapes: N query rows, M key rows, S segments, P queries in segments, H query heads, K key/value heads, d head width.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.attention import attention_with_sinks, masked_attention
from longdraft.kernels.chain_attention import causal_attention
from longdraft.kernels.transfer import from_host

# One kernel for all segments needs their keys end to end, so keys that segments share are copied. If that would take
# more than this many rows per key, segments are computed one by one.
MOST_COPIES = 4
# The rows to lay end to end: a slice if they already are, else int64 indices; int32 [S + 1], where each segment then
# starts, and the total; and the rows of the longest segment.
Layout = tuple[slice | Tensor, Tensor, int]


class Segment(NamedTuple):
    """Query rows [q_start, q_stop) read key rows [k_start, k_stop); at least as many keys as queries."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int


def segment_attention(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: Sequence[Segment],
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention in which query i of a segment of n queries and m keys reads its keys 0 .. m - n + i.

    On a GPU in half precision all segments go through one kernel, the fastest that is installed (kernels/backend.py); a
    single segment of all rows goes through PyTorch's SDPA.
    Elsewhere PyTorch takes one segment after the other (`causal_attention`).

    Args:
        q_NHd: queries after RoPE.
        k_MKd, v_MKd: keys and values. K divides H: head h reads key head h // (H / K).
        segments: in the order of their queries, which do not overlap; their keys may. Empty ones are ignored.
        window: number of keys a query reads at most, the last ones; None for all.
        sinks_H: attention sinks (kernels/attention.py); None for none. With sinks nothing has a gradient.
    Returns:
        [N, H, d] in q's dtype, scores scaled by d ** -0.5; zeros for rows in no segment, which get a zero gradient.
    """
    done, n_queries, n_keys = 0, len(q_NHd), len(k_MKd)
    for q_start, q_stop, k_start, k_stop in segments:
        assert done <= q_start <= q_stop <= n_queries, f"segments: queries {q_start} to {q_stop} are out of order"
        assert 0 <= k_start <= k_stop - (q_stop - q_start) <= n_keys - (q_stop - q_start), "segments: too few keys"
        done = q_stop
    segments = _with_queries(segments)
    if not segments:
        return _blind(q_NHd)
    copies = sum(segment.k_stop - segment.k_start for segment in segments)
    attention = backend.prompt_attention_for(q_NHd, window) if copies <= MOST_COPIES * len(k_MKd) else None
    if attention is None:
        return _one_by_one(q_NHd, k_MKd, v_MKd, segments, window, sinks_H)
    if segments == (Segment(0, n_queries, 0, n_keys),) and n_queries == n_keys and (window, sinks_H) == (None, None):
        # All such calls have one shape, for which PyTorch runs cuDNN's kernel on an H100, faster than flash-attn 2.
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHd, k_MKd, v_MKd))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out[0].transpose(0, 1)
    return in_one_call(attention_with_sinks(attention, sinks_H), q_NHd, k_MKd, v_MKd, segments, window)


def send_segments(segments: Sequence[Segment], device: torch.device) -> None:
    """Copy what `segment_attention` needs for these segments to a GPU now, before other work is queued there."""
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
    """`segment_attention` by one call of a function like `backend.varlen_attention`; every segment has queries."""
    (q_rows, q_borders, most_queries), (k_rows, k_borders, most_keys) = lay_end_to_end(segments, q_NHd.device)
    rows = q_NHd[q_rows], k_MKd[k_rows], v_MKd[k_rows]
    out_PHd = attention(*rows, q_borders, k_borders, most_queries, most_keys, window)
    if len(out_PHd) == len(q_NHd):
        return out_PHd
    out_NHd = torch.zeros_like(q_NHd)
    out_NHd[q_rows] = out_PHd
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
    """The rows before the first span, those of the first span, those between it and the second, ..., those after the
    last. Spans that overlap have nothing between them.

    Spans in order are cut by one `split`, whose gradient is one tensor; slices have one gradient of x's size each.
    """
    edges = [0, *(edge for span in spans for edge in span), len(x)]
    if edges == sorted(edges):
        return x.split([stop - start for start, stop in pairwise(edges)])
    return [x[:0], *(rows for start, stop in spans for rows in (x[start:stop], x[:0]))]


def _blind(q_NHd: Tensor) -> Tensor:
    """Zeros that depend on the queries, so that their gradient is zero and not missing: every rank of a sharded draft
    must have gradients for the same weights. NaN does not pass through."""
    return q_NHd.masked_fill(torch.ones((), dtype=torch.bool, device=q_NHd.device), 0.0)


@lru_cache(maxsize=16)  # the layers of a pass share a layout
def lay_end_to_end(segments: tuple[Segment, ...], device: torch.device) -> tuple[Layout, Layout]:
    """The layouts of queries and keys for kernels that take sequences of different lengths. There is at least one
    segment, and each has queries. They are made on the host, without waiting for work queued on the device."""
    queries, keys = [one[:2] for one in segments], [one[2:] for one in segments]
    return _end_to_end(queries, device), _end_to_end(keys, device)


def _end_to_end(spans: Sequence[tuple[int, int]], device: torch.device) -> Layout:
    sizes = [stop - start for start, stop in spans]
    borders = from_host(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device)
    if all(one[1] == following[0] for one, following in pairwise(spans)):
        return slice(spans[0][0], spans[-1][1]), borders, max(sizes)
    return from_host(torch.cat([torch.arange(*span) for span in spans]), device), borders, max(sizes)


def read_keys(n_queries: int, n_keys: int, segments: Sequence[tuple[int, int, int, int]], window: int | None) -> Tensor:
    """Bool [N, M]: which keys each query reads."""
    mask_NM = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    for q_start, q_stop, k_start, k_stop in segments:
        last = torch.arange(q_stop - q_start)[:, None] + (k_stop - k_start) - (q_stop - q_start)
        key = torch.arange(k_stop - k_start)
        in_window = key > last - (n_keys if window is None else window)
        mask_NM[q_start:q_stop, k_start:k_stop] = (key <= last) & in_window
    return mask_NM


def segment_attention_reference(
    q_NHd: Tensor,
    k_MKd: Tensor,
    v_MKd: Tensor,
    segments: Sequence[tuple[int, int, int, int]],
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`segment_attention` by one dense mask, with the natural log-sum-exps of the scaled scores, fp32 [N, H].

    Segments are not checked."""
    mask_NM = read_keys(len(q_NHd), len(k_MKd), segments, window).to(q_NHd.device)
    out_1NHd, lse_1NH = masked_attention(q_NHd[None], k_MKd[None], v_MKd[None], mask_NM[None])
    return out_1NHd[0], lse_1NH[0]
