"""A level of a beam: C against the plain reference."""

import pytest
import torch

from longdraft.infer.tree import PAD
from longdraft.kernels.beam import beam_level
from longdraft.kernels.beam import beam_level_reference as reference

SIZES = [(1, 1, 8, 0), (1, 8, 16, 1), (3, 4, 5, 9), (2, 16, 16, 21), (1, 1, 1, 0)]
BORDERS = torch.tensor([0.05, 0.5, 1.0, 2.5])
both = pytest.mark.parametrize("level", [beam_level, reference], ids=["C", "reference"])


def given(batch, n_rows, count, before, seed=0):
    """Candidates like a draft's: sorted, with different sums; rows that read themselves and some of those before."""
    generator = torch.Generator().manual_seed(seed)
    log_probs_BTC = torch.randn(batch, n_rows, count, generator=generator).sort(-1, descending=True).values - 2
    words_BTC = torch.rand(batch, n_rows, 50, generator=generator).argsort(-1)[..., :count]
    scores_BT = torch.randn(batch, n_rows, generator=generator) - 3
    ancestors_BTN = torch.rand(batch, n_rows, before, generator=generator) < 0.5
    own_TT = torch.eye(n_rows, dtype=torch.bool).expand(batch, -1, -1)
    return log_probs_BTC, words_BTC, scores_BT, torch.cat((ancestors_BTN, own_TT), 2)


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("restricted", [False, True])
def test_it_is_the_references(c_kernels, size, width, restricted):
    inputs, ids = given(*size), torch.randperm(900)[:50] if restricted else None
    found = beam_level(*inputs, width, 3, 11, BORDERS, ids)
    width = min(width, size[1] * size[2])
    expected = reference(*inputs, width, 3, 11, BORDERS, ids)
    assert found.nodes_3BW.shape == (3, size[0], width)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@both
def test_a_level_by_hand(c_kernels, level):
    log_probs = torch.tensor([[[0.5, 0.3], [0.9, 0.1]]]).log()
    words, scores = torch.tensor([[[4, 7], [7, 5]]]), torch.tensor([[0.6, 0.4]]).log()
    open_122 = torch.tensor([[[True, True, False], [True, False, True]]])
    nodes, sums, below = level(log_probs, words, scores, open_122, 3, 1, 20, torch.tensor([0.2, 0.7, 2.0]), None)
    # 0.4 * 0.9, 0.6 * 0.5, 0.6 * 0.3
    assert nodes.tolist() == [[[7, 4, 7]], [[2, 1, 1]], [[20, 21, 22]]]
    torch.testing.assert_close(sums.exp(), torch.tensor([[0.36, 0.3, 0.18]]))
    assert below[0].int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]


@both
def test_what_is_at_minus_infinity_is_padding(c_kernels, level):
    """A slot that is not active, and candidates that are banned."""
    log_probs, words, scores, rows = given(2, 2, 3, 0)
    scores[0], log_probs[1, :, 1:] = -torch.inf, -torch.inf
    nodes, sums, _ = level(log_probs, words, scores, rows, 4, 1, 1, BORDERS, None)
    assert nodes[1, 0].tolist() == [PAD] * 4 and sums[0].isneginf().all()
    assert sorted(nodes[1, 1, :2].tolist()) == [1, 2] and nodes[1, 1, 2:].tolist() == [PAD, PAD]
    assert ((nodes[0] >= 0) & (nodes[0] < 50)).all()
