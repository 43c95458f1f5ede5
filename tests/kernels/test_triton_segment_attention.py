"""kernels/triton/segment_attention.py against the reference on hostile segments, in Triton's interpreter or on a
GPU; and as the backward of kernels/segment_attention.py for frozen keys and values."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels import segment_attention as kernel
from longdraft.kernels.segment_attention import (
    Segment,
    lay_end_to_end,
    query_gradient_reference,
    read_keys,
    segment_attention_reference,
    with_frozen_keys,
)
from longdraft.kernels.triton import segment_attention as triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
N = 75
PIECES = list(pairwise([0, 1, 16, 16, 33, N]))
SEGMENTS = {
    "pieces": [(a, b, a, b) for a, b in PIECES],
    "shifted": [(min(a + 3, b), b, a, max(b - 3, a)) for a, b in PIECES],
    "subset": [(0, 15, 0, 16), (15, 33, 16, 70), (33, 34, 0, 60), (40, 44, 71, 75)],
    "many short": [(5 * i, 5 * i + 5, 5 * i, 5 * i + 5) for i in range(5)],
    "shared by many": [(5 * i, 5 * i + 5, 0, N - 7 * i) for i in range(4)],
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks per segment: the causal border and the window's are within, on and between them."""
    monkeypatch.setattr(triton, "blocks", lambda width: (16, 16))


def segments_of(name: str) -> tuple[Segment, ...]:
    return tuple(Segment(*segment) for segment in SEGMENTS[name] if segment[1] > segment[0])


def drawn(segments, heads: tuple[int, int, int], dtype: torch.dtype, n: int = N) -> list[Tensor]:
    """q, k, v and the output's gradient, each a slice of wider rows, with NaN beside them and outside all segments."""
    n_heads, n_kv, width = heads
    seen = torch.zeros(2, n, dtype=torch.bool)
    for segment in segments:
        seen[0, segment.q_start : segment.q_stop] = True
        seen[1, segment.k_start : segment.k_stop] = True
    generator, given = torch.Generator().manual_seed(width), []
    for i, (rows, kind) in enumerate(((n_heads, 0), (n_kv, 1), (n_kv, 1), (n_heads, 0))):
        wide = torch.full((n, rows, (1 + i % 2) * width + 8), NAN, dtype=dtype)
        wide[seen[kind], :, :width] = torch.randn(n, rows, width, generator=generator).to(dtype)[seen[kind]]
        given.append(wide[..., :width])
    return given


def log_sum_exps(q: Tensor, k: Tensor, segments, window) -> Tensor:
    """Natural log-sum-exps of every query in a segment, fp32 [H, P], with NaN in memory behind each head's."""
    mask = read_keys(len(q), len(k), segments, window)
    keys = k.double().where(mask.any(0)[:, None, None], 0.0).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * q.shape[2] ** -0.5
    lses = scores.masked_fill(~mask, float("-inf")).logsumexp(-1)[:, mask.any(1)].float()
    return torch.cat((lses, torch.full((len(lses), 3), NAN)), 1)[:, :-3]


def run(given: list[Tensor], segments, window) -> Tensor:
    q, k, v, grad = given
    layout = lay_end_to_end(segments, DEVICE)
    out = segment_attention_reference(q, k, v, segments, window)[0]
    out[~read_keys(len(q), len(k), segments, None).any(1)] = NAN
    rows = [x.to(DEVICE) for x in (q, k, v, out, log_sum_exps(q, k, segments, window), grad)]
    found = triton.query_gradient(*rows, layout.spans, layout.q_borders, layout.most_queries, window)
    assert found.dtype == q.dtype and found.shape == q.shape
    return found.cpu()


def close_to_the_reference(given: list[Tensor], segments, window) -> None:
    exact = query_gradient_reference(*given, segments, window)
    torch.testing.assert_close(run(given, segments, window), exact, rtol=0, atol=3e-6)
    blind = ~read_keys(len(given[0]), len(given[1]), segments, None).any(1)
    assert not exact[blind].any() and (window == 1 or exact.any())


@pytest.mark.parametrize(("name", "window"), [
    ("pieces", None), ("pieces", 40), ("shifted", 7), ("shifted", 17), ("subset", None), ("subset", 40),
    ("many short", None), ("many short", 1), ("shared by many", None), ("shared by many", 33),
])  # fmt: skip
def test_against_the_reference(small_blocks, name, window):
    segments = segments_of(name)
    close_to_the_reference(drawn(segments, (1, 1, 24), torch.float32), segments, window)


def test_heads_are_those_of_their_group(small_blocks):
    segments = (Segment(0, 6, 0, 16),)
    for heads in ((3, 3, 16), (6, 2, 16)):
        close_to_the_reference(drawn(segments, heads, torch.float32, 21), segments, None)


@pytest.mark.parametrize(
    ("heads", "window"), [((1, 1, 8), 3), ((2, 1, 80), None), ((1, 1, 128), 90), ((1, 1, 256), 70)]
)
def test_blocks_as_they_are(heads, window):
    """One more query than a block of narrow heads, and more keys than two of their blocks."""
    segments = (Segment(1, 130, 3, 134), Segment(130, 131, 0, 1))
    close_to_the_reference(drawn(segments, heads, torch.float32, 140), segments, window)


@pytest.mark.parametrize(("name", "window"), [("shifted", None), ("subset", 7), ("shared by many", 40)])
def test_error_in_half_precision(small_blocks, plain, name, window):
    """At most three times the error of plain.py with the same numbers, both against fp32."""
    segments = segments_of(name)
    given = drawn(segments, (1, 1, 24), torch.float16)
    exact = query_gradient_reference(*(x.float() for x in given), segments, window)
    q, k, v, grad = (x.nan_to_num() for x in given)
    usual, *_ = plain.attention_gradients(q, k, v, read_keys(N, N, segments, window), grad)
    allowed = 3 * (usual.float() - exact).abs().max()
    assert (run(given, segments, window).float() - exact).abs().max() <= allowed


def varlen(q, k, v, q_borders, k_borders, most_queries, most_keys, window, with_lse=False):
    """Stands in for a GPU's kernel for sequences of several lengths: plain PyTorch, with log-sum-exps."""
    spans = [pairwise(borders.tolist()) for borders in (q_borders, k_borders)]
    segments = [Segment(*q_span, *k_span) for q_span, k_span in zip(*spans, strict=True)]
    out = segment_attention_reference(q, k, v, segments, window)[0]
    if not with_lse:
        return out
    assert not torch.is_grad_enabled()
    return out, log_sum_exps(q.cpu(), k.cpu(), segments, window).to(DEVICE)


@pytest.mark.parametrize(("name", "window"), [("pieces", None), ("subset", 7), ("shared by many", None)])
def test_frozen_keys_leave_the_queries_their_gradient(small_blocks, name, window):
    """Through the autograd function, for the gradient of a sum, which is expanded, and of a product, which is not."""
    segments = segments_of(name)
    q, k, v, weights = (x.to(DEVICE) for x in drawn(segments, (2, 1, 24), torch.float32))
    for weight in (None, weights.nan_to_num()):
        ours, plain = (q.clone().requires_grad_() for _ in range(2))
        out = with_frozen_keys(varlen, triton.query_gradient, ours, k, v, segments, window)
        expected = segment_attention_reference(plain, k, v, segments, window)[0]
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
        for result in (out, expected):
            (result.sum() if weight is None else (result * weight).sum()).backward()
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=3e-6)


def test_the_reference_is_the_gradient_of_the_references_output():
    segments = segments_of("subset")
    q, k, v, grad = drawn(segments, (4, 2, 24), torch.float32)
    leaf = q.clone().requires_grad_()
    segment_attention_reference(leaf, k, v, segments, 40)[0].backward(grad.nan_to_num())
    torch.testing.assert_close(query_gradient_reference(q, k, v, grad, segments, 40), leaf.grad, rtol=0, atol=1e-6)


def test_nothing_but_what_was_given_and_what_came_out_is_kept():
    """No copies of keys that several segments share are kept for the backward pass."""
    segments, kept = segments_of("shared by many"), []
    q, k, v, _ = (x.to(DEVICE) for x in drawn(segments, (4, 2, 24), torch.float32))
    q.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = with_frozen_keys(varlen, triton.query_gradient, q, k, v, segments, None)
    places = {x.data_ptr() for x in kept}
    assert {x.data_ptr() for x in (q, k, v, out)} <= places and len(places) == 5
    assert max(x.numel() for x in kept) == q.numel()


@pytest.mark.parametrize("learning", ["q", "qk", "qv", ""])
def test_it_is_taken_where_the_queries_alone_learn(small_blocks, monkeypatch, learning):
    """Through the public function, as on a GPU."""
    segments, taken = segments_of("subset"), []
    rows = [x.to(DEVICE) for x in drawn(segments, (1, 1, 24), torch.float32)[:3]]
    given = [x.clone().requires_grad_(name in learning) for x, name in zip(rows, "qkv", strict=True)]
    gradient = triton.query_gradient
    monkeypatch.setattr(triton, "query_gradient", lambda *a: taken.append(1) or gradient(*a))
    monkeypatch.setattr(backend, "varlen_attention_for", lambda _: varlen)
    monkeypatch.setattr(backend, "triton_kernels", lambda name, device: triton)
    out = kernel.segment_attention(*given, segments, 7)
    assert out.requires_grad is bool(learning)
    if learning:
        out.sum().backward()
    assert bool(taken) is (learning == "q")
    assert [x.grad is not None for x in given] == [name in learning for name in "qkv"]
