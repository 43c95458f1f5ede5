"""kernels/attention.py with every implementation of attention, against a softmax with one more score."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend, chain_attention, segment_attention, tree_attention
from longdraft.kernels.chain_attention import causal_attention
from longdraft.kernels.segment_attention import Segment
from longdraft.kernels.tree import attended_rows

HEADS, KV_HEADS, WIDTH = 6, 2, 16
SINKS = torch.tensor([-1.0, 0.5, 2.0, 4.0, -30.0, 0.0])
WINDOWS = (None, 5, 64)
IMPLEMENTATIONS = ("c", "pytorch", "flash", "triton")
# Of all combinations every second; any three values meet.
SHAPES = ((1, False), (9, True), (9, False), (150, False), (150, True))
OVER_A_CACHE = list(product(IMPLEMENTATIONS, ([0], [1100], [0, 70]), SHAPES, WINDOWS))[::2]


def expected(q_NHd: Tensor, k_MKd: Tensor, v_MKd: Tensor, open_NM: Tensor) -> Tensor:
    """Attention in fp64, with the sink as one more key whose value is zero."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_MKd, v_MKd))
    scores_HNM = torch.einsum("nhd,mhd->hnm", q_NHd.double(), keys) * WIDTH**-0.5
    scores_HNM = scores_HNM.masked_fill(~open_NM, float("-inf"))
    sinks_HN1 = SINKS.double()[:, None, None].expand(-1, len(q_NHd), 1)
    weights_HNM = torch.cat((scores_HNM, sinks_HN1), -1).softmax(-1)[..., :-1]
    return torch.einsum("hnm,mhd->nhd", weights_HNM, values).float()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch, pretended_cuda):
    if request.param == "c":
        request.getfixturevalue("c_kernels")
    kernels = SimpleNamespace(tree_attention=pretended_cuda.dense)
    for serves in ("can_attend", "attends_chains"):  # the C kernels serve chains in fp32 too, if they are asked
        monkeypatch.setattr(chain_attention.rows, serves, lambda _: request.param == "c")
    monkeypatch.setattr(
        backend, "varlen_attention_for", lambda _: pretended_cuda.varlen if request.param == "flash" else None
    )
    monkeypatch.setattr(backend, "triton_kernels", lambda *_: kernels if request.param == "triton" else None)
    return request.param


@pytest.mark.parametrize(
    ("implementation", "lengths", "shape", "window"), OVER_A_CACHE, ids=str, indirect=["implementation"]
)
def test_over_a_cache(implementation, trees, lengths, shape, window):
    n_rows, is_tree = shape
    keys, values = trees.poisoned(lengths, n_rows, max(lengths) + n_rows + 5, KV_HEADS, WIDTH)
    q, lengths_B = trees.draw(len(lengths), n_rows, HEADS, WIDTH, seed=7), torch.tensor(lengths)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(len(lengths))]) if is_tree else None
    found = tree_attention.tree_attention(q, keys, values, lengths_B, masks, window, sinks_H=SINKS)
    for slot, length in enumerate(lengths):
        written = length + n_rows
        tree = None if masks is None else masks[slot : slot + 1]
        seen = attended_rows(lengths_B[slot : slot + 1], n_rows, written, tree, window)[0]
        want = expected(q[slot], keys[slot, :written], values[slot, :written], seen)
        torch.testing.assert_close(found[slot], want, rtol=0, atol=2e-6)


def causal(n_queries: int, n_keys: int, window: int | None) -> Tensor:
    return attended_rows(torch.tensor([n_keys - n_queries]), n_queries, n_keys, None, window)[0]


@pytest.mark.parametrize("window", WINDOWS)
def test_of_rows_without_a_cache(implementation, trees, window):
    q, k, v = (trees.draw(2, 300, heads, WIDTH, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    whole = causal_attention(q[:, -50:], k, v, window, SINKS)
    for slot in range(2):
        want = expected(q[slot, -50:], k[slot], v[slot], causal(50, 300, window))
        torch.testing.assert_close(whole[slot], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", WINDOWS)
def test_of_segments(implementation, trees, window):
    q, k, v = (trees.draw(200, heads, WIDTH, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    segments = [Segment(0, 30, 0, 30), Segment(30, 31, 0, 90), Segment(50, 200, 40, 200)]
    found = segment_attention.segment_attention(q, k, v, segments, window, SINKS)
    assert not found[31:50].any()
    for q_start, q_stop, k_start, k_stop in segments:
        own, read = slice(q_start, q_stop), slice(k_start, k_stop)
        want = expected(q[own], k[read], v[read], causal(q_stop - q_start, k_stop - k_start, window))
        torch.testing.assert_close(found[own], want, rtol=0, atol=2e-6)
