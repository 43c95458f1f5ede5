"""kernels/segment_attention.py and its reference against attention row by row; gradients; the layout."""

import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels import chain_attention as causal
from longdraft.kernels.segment_attention import (
    Segment,
    in_one_call,
    read_keys,
    segment_attention,
    segment_attention_reference,
)

# (query rows, key rows, segments): those of training, and awkward ones.
CASES = {
    "pieces": (40, 40, [(0, 17, 0, 17), (17, 18, 17, 18), (18, 40, 18, 40)]),
    "shifted": (40, 40, [(3, 17, 0, 14), (22, 40, 17, 35)]),
    "subset": (20, 64, [(0, 7, 0, 9), (7, 11, 5, 40), (11, 20, 40, 60)]),
    "one query of many keys": (1, 63, [(0, 1, 0, 63)]),
    "gaps": (30, 25, [(4, 9, 3, 20), (9, 9, 8, 8), (12, 20, 12, 21)]),
    "shared keys": (12, 10, [(0, 4, 0, 10), (4, 8, 0, 10), (8, 12, 2, 9)]),
    "empty": (9, 5, [(0, 0, 0, 0), (2, 2, 1, 4)]),
    "none": (6, 6, []),
    "no rows": (0, 4, []),
}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(*given) -> Tensor:
    return segment_attention_reference(*given)[0]


def rows_of(case: str, heads: tuple[int, int]) -> tuple[tuple[Tensor, Tensor, Tensor], list[Segment]]:
    """q, k and v; keys and values have different strides and NaN wherever no segment reads."""
    n_queries, n_keys, segments = CASES[case]
    segments = [Segment(*segment) for segment in segments]
    k, v = draw(n_keys, heads[1], 16, seed=1), draw(heads[1], n_keys, 32, seed=2).transpose(0, 1)[..., :16]
    unread = torch.ones(n_keys, dtype=torch.bool)
    for segment in segments:
        if segment.q_stop > segment.q_start:
            unread[segment.k_start : segment.k_stop] = False
    k[unread], v[unread] = torch.nan, torch.nan
    assert k.stride() != v.stride() or n_keys == 0
    return (draw(n_queries, heads[0], 16, seed=3), k, v), segments


def written_out(q, k, v, segments, window) -> Tensor:
    """One query and one head at a time in fp64, over the keys it reads and nothing else."""
    out, groups = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1]
    for q_start, q_stop, k_start, k_stop in segments:
        for i in range(q_stop - q_start):
            stop = k_stop - (q_stop - q_start) + i + 1
            first = k_start if window is None else max(k_start, stop - window)
            for head in range(q.shape[1]):
                keys, values = k[first:stop, head // groups].double(), v[first:stop, head // groups].double()
                scores = keys @ q[q_start + i, head].double() * q.shape[2] ** -0.5
                out[q_start + i, head] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("case", CASES)
def test_every_row_reads_its_segments_keys_and_no_other(case, window, heads, monkeypatch):
    monkeypatch.setattr(causal, "BLOCK", 8)  # several blocks a segment
    rows, segments = rows_of(case, heads)
    expected = written_out(*rows, segments, window).float()
    for attention in (segment_attention, reference):
        out = attention(*rows, segments, window)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5, msg=lambda text, a=attention: f"{a}: {text}")


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_formula(case, window, heads, monkeypatch):
    monkeypatch.setattr(causal, "BLOCK", 8)
    rows, segments = rows_of(case, heads)
    grads = {}
    for attention in (segment_attention, reference, written_out):
        given = [row.clone().requires_grad_() for row in rows]
        out = attention(*given, segments, window).float()
        if out.requires_grad:
            (out * draw(*out.shape, seed=4)).sum().backward()
        grads[attention] = [torch.zeros_like(x) if x.grad is None else x.grad for x in given]
    for ours, plain, exact in zip(*grads.values(), strict=True):
        torch.testing.assert_close(plain, exact, rtol=0, atol=1e-5)
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-5)


def test_rows_in_no_segment_have_a_gradient_of_zero():
    """Not a missing one: a sharded weight below them needs a gradient on every rank. NaN in them is dropped too."""
    for segments in ([], [Segment(2, 5, 0, 3)]):
        q = draw(9, 4, 16, seed=3)
        q[6] = torch.nan
        q.requires_grad_()
        out = segment_attention(q, draw(9, 2, 16, seed=1), draw(9, 2, 16, seed=2), segments)
        out.sum().backward()
        assert q.grad is not None and not q.grad[[0, 1, *range(5, 9)]].any()
        assert bool(q.grad[2:5].any()) is bool(segments) and not out[5:].any()


@pytest.mark.parametrize("fused", [False, True], ids=["in parts", "in one call"])
def test_training_through_sinks_is_refused(fused, monkeypatch):
    """No implementation has a gradient of the log-sum-exp, by which sinks correct the output: part of it would lack."""

    def flash(q, *arguments, with_lse):
        return q.clone(), torch.zeros(q.shape[1], len(q))

    monkeypatch.setattr(backend, "varlen_attention_for", lambda q: flash if fused else None)
    (q, k, v), segments = rows_of("pieces", (6, 2))
    segment_attention(q, k, v, segments, sinks_H=draw(6, seed=5))
    with pytest.raises(AssertionError, match="no gradient"):
        segment_attention(q.requires_grad_(), k, v, segments, sinks_H=draw(6, seed=5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_plain_arithmetic_in_the_same_precision(plain, dtype):
    """At most twice the error of plain.py's attention under a dense mask, both measured against fp32."""
    rows, segments = rows_of("subset", (6, 2))
    for window in (None, 5):
        exact, low = reference(*rows, segments, window), [row.nan_to_num().to(dtype) for row in rows]
        usual = plain.attention(*low, read_keys(20, 64, segments, window))
        out = segment_attention(*low, segments, window)
        allowed = 2 * (usual.float() - exact).abs().max()
        assert out.dtype == dtype and (out.float() - exact).abs().max() <= allowed


LAID = [case for case, (_, _, segments) in CASES.items() if any(s[1] > s[0] for s in segments)]


def looped(q, k, v, q_borders, k_borders, most_queries, most_keys, window) -> Tensor:
    """Stands in for a GPU's kernel for sequences of several lengths."""
    assert q_borders.dtype == k_borders.dtype == torch.int32
    spans = [pairwise(borders.tolist()) for borders in (q_borders, k_borders)]
    segments = [Segment(*q_span, *k_span) for q_span, k_span in zip(*spans, strict=True)]
    assert most_queries == max(segment.q_stop - segment.q_start for segment in segments)
    assert most_keys == max(segment.k_stop - segment.k_start for segment in segments)
    return reference(q, k, v, segments, window)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("case", LAID)
def test_one_call_is_the_same_with_its_gradients(case, window):
    rows, segments = rows_of(case, (6, 2))
    ours, plain = ([row.clone().requires_grad_() for row in rows] for _ in range(2))
    out = in_one_call(looped, *ours, tuple(s for s in segments if s.q_stop > s.q_start), window)
    expected = reference(*plain, segments, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    for result in (out, expected):
        (result * draw(*result.shape, seed=4)).sum().backward()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "before"), [(None, -1), (1, 0), (513, 512)])
def test_windows_count_a_querys_own_key_and_kernels_do_not(window, before):
    assert backend._before(window) == before


def test_a_row_of_one_piece_is_pytorchs_where_there_is_a_flash_kernel(monkeypatch):
    """Anything else goes to the flash kernel."""
    monkeypatch.setattr(backend, "prompt_attention_for", lambda *_: "flash")
    monkeypatch.setattr(sys.modules[segment_attention.__module__], "in_one_call", lambda *_: "by flash")
    q, k, v = draw(40, 6, 16, seed=1), draw(40, 2, 16, seed=2), draw(40, 2, 16, seed=3)
    whole, shorter = Segment(0, 40, 0, 40), Segment(0, 39, 0, 39)
    out = segment_attention(q, k, v, [whole, Segment(40, 40, 40, 40)])
    torch.testing.assert_close(out, reference(q, k, v, [whole], None), rtol=0, atol=1e-5)
    others = ([shorter], None), ([whole], 8), ([Segment(0, 20, 0, 20), Segment(20, 40, 20, 40)], None)
    assert {segment_attention(q, k, v, *given) for given in others} == {"by flash"}
    assert segment_attention(q[:20], k, v, [Segment(0, 20, 0, 40)]) == "by flash"


def test_pytorchs_kernel_takes_what_it_is_given():
    """As far as shapes can show without a GPU."""
    chosen = backend.torch_varlen()
    rows = [x.to("meta", torch.bfloat16) for x in (draw(12, 6, 16, seed=1), draw(9, 2, 16, seed=2))]
    borders = torch.tensor([0, 4, 12], dtype=torch.int32, device="meta")
    out = chosen(rows[0], rows[1], rows[1], borders, borders, 8, 8, 5)
    assert out.shape == (12, 6, 16) and out.dtype == torch.bfloat16
    out, lse = chosen(rows[0], rows[1], rows[1], borders, borders, 8, 8, 5, with_lse=True)
    assert out.shape == (12, 6, 16) and lse.shape == (6, 12) and lse.dtype == torch.float32


@pytest.mark.parametrize("files, whether", [(["cute/__init__.py"], False), (["__init__.py", "cute/__init__.py"], True)])
def test_flash_attn_4_alone_is_not_flash_attn(tmp_path, monkeypatch, files, whether):
    """The package of version 4 is the folder flash_attn/cute, without a flash_attn/__init__.py."""
    for file in files:
        path = tmp_path / "flash_attn" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert backend.has_flash_attn() is whether
