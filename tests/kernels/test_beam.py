"""kernels/beam.py: the best tokens of rows and a level of a beam, C against the plain references."""

import pytest
import torch

from longdraft.infer.tree import PAD
from longdraft.kernels.beam import beam_level, beam_level_reference, best_tokens, best_tokens_reference
from longdraft.kernels.cpu import library, tokens

either_best = pytest.mark.parametrize("best", [best_tokens, best_tokens_reference], ids=["C", "reference"])
ROWS = [(1, 1, 5, 3), (1, 1, 2048, 8), (2, 3, 2049, 16), (1, 16, 16384, 16), (3, 1, 5000, 1), (1, 2, 70, 70)]


def test_c_knows_how_long_a_part_is():
    assert f"#define PART_WORDS {tokens.PART_WORDS}\n" in (library.FOLDER / "best_tokens.inc").read_text()


@pytest.mark.parametrize("noisy", ["no noise", "noise", "noise by ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", ROWS, ids=str)
def test_the_best_tokens_are_the_references(c_kernels, size, dtype, noisy):
    (batch, n_rows, vocab, count), generator = size, torch.Generator().manual_seed(sum(size))
    logits = torch.randn(batch, n_rows, vocab, generator=generator)
    if vocab < 512:  # all different in bf16 too
        logits = torch.rand(batch, n_rows, vocab, generator=generator).argsort(-1) / 16
    divisors, noise, ids = torch.rand(batch, generator=generator) + 0.5, None, None
    if noisy != "no noise":
        noise = torch.randn(batch, 2 * vocab + 3, generator=generator)
        ids = torch.randperm(2 * vocab, generator=generator)[:vocab] if "ids" in noisy else None
    found, words = best_tokens(logits.to(dtype), count, divisors, noise, ids)
    log_probs, expected = best_tokens_reference(logits.to(dtype), count, divisors, noise, ids)
    torch.testing.assert_close(found, log_probs, rtol=1e-5, atol=1e-5)
    # Of equal scores either may be named: check that the named token has the score.
    wide, every_word = best_tokens_reference(logits.to(dtype), vocab, divisors, noise, ids)
    of_word = torch.empty_like(wide).scatter_(2, every_word, wide)
    torch.testing.assert_close(of_word.gather(2, words), log_probs, rtol=1e-5, atol=1e-5)
    assert all(len(set(row)) == count for slot in words.tolist() for row in slot)
    assert words.shape == expected.shape and words.dtype == torch.int64


@either_best
def test_of_equal_scores_none_is_named_twice_and_what_cannot_be_is_at_minus_infinity(c_kernels, best):
    logits, one = torch.full((1, 3, 3000), -torch.inf), torch.ones(1)
    logits[0, 0, [7, 2500]], logits[0, 1] = 1.0, 2.0
    log_probs, words = best(logits, 4, one)
    assert sorted(words[0, 0, :2].tolist()) == [7, 2500] and len(set(words[0, 1].tolist())) == 4
    torch.testing.assert_close(log_probs[0, 0], torch.tensor([0.5, 0.5, 0, 0]).log())
    torch.testing.assert_close(log_probs[0, 1], torch.full((4,), 1 / 3000).log())
    assert log_probs[0, 2].isneginf().all()
    one_alone = torch.full((1, 1, 3000), -torch.inf).index_fill_(2, torch.tensor([1]), 0.0)
    for row in (words[0, 2], best(one_alone, 4)[1][0, 0]):
        assert len(set(row.tolist())) == 4


@either_best
def test_a_broken_row_gives_words_that_exist(c_kernels, best):
    logits = torch.randn(1, 4, 2100)
    logits[0, 0], logits[0, 1, 2099], logits[0, 2, 3] = torch.nan, torch.nan, torch.inf
    log_probs, words = best(logits, 5, torch.ones(1))
    assert log_probs[0, :3].isneginf().all() and log_probs[0, 3].isfinite().all()
    assert best(logits[..., :2049].clone().index_fill_(2, torch.tensor([2048]), torch.nan), 5)[0].isneginf().all()
    empty = torch.full((1, 1, 4100), -torch.inf)
    empty[0, 0, :9], empty[0, 0, 4000] = 1.0, torch.nan
    assert best(empty, 5)[0].isneginf().all()
    assert ((words >= 0) & (words < 2100)).all()


def test_a_row_does_not_depend_on_the_others(c_kernels):
    logits, noise = torch.randn(2, 5, 4100).bfloat16(), torch.randn(2, 4100)
    divisors = torch.tensor([1.0, 0.7])
    log_probs, words = best_tokens(logits, 8, divisors, noise)
    for slot in range(2):
        for row in range(5):
            one = slice(slot, slot + 1)
            alone = best_tokens(logits[one, row : row + 1], 8, divisors[one], noise[one])
            assert torch.equal(alone[0][0, 0], log_probs[slot, row]) and torch.equal(alone[1][0, 0], words[slot, row])


SIZES = [(1, 1, 8, 0), (1, 8, 16, 1), (3, 4, 5, 9), (2, 16, 16, 21), (1, 1, 1, 0)]
BORDERS = torch.tensor([0.05, 0.5, 1.0, 2.5])
either_level = pytest.mark.parametrize("level", [beam_level, beam_level_reference], ids=["C", "reference"])


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
def test_a_level_is_the_references(c_kernels, size, width, restricted):
    inputs, ids = given(*size), torch.randperm(900)[:50] if restricted else None
    found = beam_level(*inputs, width, 3, 11, BORDERS, ids)
    width = min(width, size[1] * size[2])
    expected = beam_level_reference(*inputs, width, 3, 11, BORDERS, ids)
    assert found.nodes_3BW.shape == (3, size[0], width)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@either_level
def test_a_level_by_hand(c_kernels, level):
    log_probs = torch.tensor([[[0.5, 0.3], [0.9, 0.1]]]).log()
    words, scores = torch.tensor([[[4, 7], [7, 5]]]), torch.tensor([[0.6, 0.4]]).log()
    open_122 = torch.tensor([[[True, True, False], [True, False, True]]])
    nodes, sums, below = level(log_probs, words, scores, open_122, 3, 1, 20, torch.tensor([0.2, 0.7, 2.0]), None)
    # 0.4 * 0.9, 0.6 * 0.5, 0.6 * 0.3
    assert nodes.tolist() == [[[7, 4, 7]], [[2, 1, 1]], [[20, 21, 22]]]
    torch.testing.assert_close(sums.exp(), torch.tensor([[0.36, 0.3, 0.18]]))
    assert below[0].int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]


@either_level
def test_what_is_at_minus_infinity_is_padding(c_kernels, level):
    """A slot that is not active, and candidates that are banned."""
    log_probs, words, scores, rows = given(2, 2, 3, 0)
    scores[0], log_probs[1, :, 1:] = -torch.inf, -torch.inf
    nodes, sums, _ = level(log_probs, words, scores, rows, 4, 1, 1, BORDERS, None)
    assert nodes[1, 0].tolist() == [PAD] * 4 and sums[0].isneginf().all()
    assert sorted(nodes[1, 1, :2].tolist()) == [1, 2] and nodes[1, 1, 2:].tolist() == [PAD, PAD]
    assert ((nodes[0] >= 0) & (nodes[0] < 50)).all()
