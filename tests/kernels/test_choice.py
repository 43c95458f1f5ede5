"""kernels/choice.py: the same tokens from every implementation; ties, infinities and NaN; the kernel's noise."""

import pytest
import torch

from longdraft.kernels import backend
from longdraft.kernels.choice import choose, top_p_border_reference
from longdraft.kernels.choice import choose_reference as reference
from longdraft.kernels.choice import gumbel_noise_reference as gumbel_noise
from longdraft.kernels.triton import choice as kernel
from longdraft.kernels.triton.choice import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = torch.tensor([0, -1, 2**63 - 1])
POSITIONS = torch.tensor([[0, 2**32 - 1], [2**31, 5], [131_072, 2]])
TEMPERATURES = torch.tensor([0.7, 0.0, 1.5])


@pytest.fixture(params=["node by node", "triton"])
def implementation(request, monkeypatch):
    """The function under test: `choose` with and without Triton."""
    if request.param == "triton":
        monkeypatch.setattr(backend, "triton_kernels", lambda name, device_type: kernel)
    return on_device if request.param == "triton" else choose


def on_device(*given):
    return choose(*(x.to(DEVICE) for x in given)).cpu()


def poisoned(vocab, dtype=torch.float32):
    """Logits [3, 2, V] whose rows are apart in memory, with NaN between them."""
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.full((3, 3, vocab + 9), float("nan"), dtype=dtype)
    wide[:, :2, 2 : vocab + 2] = torch.randn(3, 2, vocab, generator=generator).to(dtype)
    return wide[:, :2, 2 : vocab + 2]


@pytest.mark.parametrize(("vocab", "dtype"), [
    (1, torch.float32), (3, torch.float32), (6, torch.float32), (BLOCK - 1, torch.float32), (BLOCK, torch.float32),
    (BLOCK + 1, torch.bfloat16), (BLOCK + 1, torch.float16), (2 * BLOCK + 5, torch.float32),
], ids=str)  # fmt: skip
def test_every_implementation_chooses_the_same(implementation, vocab, dtype):
    given = poisoned(vocab, dtype), SEEDS, POSITIONS, TEMPERATURES
    chosen = implementation(*given)
    assert chosen.dtype == torch.int64 and torch.equal(chosen, reference(*given))


def test_the_reference_is_the_formula():
    logits = poisoned(300)
    chosen = reference(logits, SEEDS, POSITIONS, TEMPERATURES)
    for slot, temperature in enumerate(TEMPERATURES.tolist()):
        for node in range(2):
            noise = gumbel_noise(SEEDS[slot : slot + 1], POSITIONS[slot : slot + 1, node : node + 1], 300)[0, 0]
            scores = logits[slot, node] / temperature + noise if temperature else logits[slot, node]
            assert int(chosen[slot, node]) == int(scores.argmax())
    assert (chosen[0] != logits[0].argmax(-1)).any(), "the noise should matter here"


def test_a_choice_depends_on_its_own_row_alone(implementation):
    logits = poisoned(BLOCK + 30)
    whole = implementation(logits, SEEDS, POSITIONS, TEMPERATURES)
    for slot in range(3):
        one = slice(slot, slot + 1)
        alone = implementation(logits[one, 1:], SEEDS[one], POSITIONS[one, 1:], TEMPERATURES[one])
        assert alone.tolist() == whole[one, 1:].tolist()


def test_of_equal_scores_the_lowest_id(implementation):
    logits = torch.full((3, 1, 3 * BLOCK), -2.0)
    logits[0, 0, [BLOCK + 5, BLOCK + 9, 2 * BLOCK + 1]] = 1.0
    logits[1, 0, BLOCK + 3], logits[1, 0, 40] = -0.0, 0.0  # equal in spite of the sign
    logits[2, 0, 2 * BLOCK :], logits[2, 0, BLOCK + 7] = 0.0, -0.0
    given = logits, SEEDS, POSITIONS[:, :1], torch.zeros(3)
    assert implementation(*given)[:, 0].tolist() == [BLOCK + 5, 40, BLOCK + 7]
    assert reference(*given)[:, 0].tolist() == [BLOCK + 5, 40, BLOCK + 7]
    assert implementation(torch.full((3, 1, 2 * BLOCK), -1.5), *given[1:]).tolist() == [[0], [0], [0]]


def test_infinities_and_nan_as_in_argmax(implementation):
    inf, nan = float("inf"), float("nan")
    logits = poisoned(BLOCK + 50)[:, :1].repeat(1, 4, 1)
    logits[:, 0] = -inf
    logits[:, 1, : BLOCK + 2] = -inf
    logits[:, 2, 9], logits[:, 2, BLOCK + 1] = inf, inf
    logits[:, 3, 3], logits[:, 3, [BLOCK + 8, BLOCK + 4]] = inf, nan
    given = logits, SEEDS, POSITIONS.repeat(1, 2), TEMPERATURES
    chosen = implementation(*given)
    assert torch.equal(chosen, reference(*given))
    assert chosen[:, 0].tolist() == [0] * 3 and chosen[:, 2].tolist() == [9] * 3
    assert chosen[:, 3].tolist() == [BLOCK + 4] * 3, "the first NaN"


def test_strided_seeds_positions_and_temperatures(implementation):
    logits = poisoned(70)
    want = reference(logits, SEEDS, POSITIONS, TEMPERATURES)
    twice = [x.repeat_interleave(2)[::2] for x in (SEEDS, TEMPERATURES)]
    assert torch.equal(implementation(logits, twice[0], POSITIONS.T.contiguous().T, twice[1]), want)
    expanded = POSITIONS[:, :1].expand(-1, 2)
    want = reference(logits, SEEDS, expanded, TEMPERATURES)
    assert torch.equal(implementation(logits, SEEDS, expanded, TEMPERATURES), want)


def rows_for_top_p(vocab):
    """Scores [3, 2, V]: peaked, with ties, some dropped, flat, all equal, and one token alone."""
    scores = torch.randn(3, 2, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    scores[0, 1], scores[1, 1], scores[2, 1] = scores[0, 1].round(), scores[1, 1] / 40, -torch.inf
    scores[1, 0, : vocab // 2], scores[2, 0], scores[2, 1, vocab // 3] = -torch.inf, -2.5, 7.0
    return scores.to(DEVICE)


@pytest.mark.parametrize("vocab", [1, 7, 3 * BLOCK // 2 + 5])
def test_top_ps_border_is_found_without_sorting(monkeypatch, vocab):
    """Also in two chunks of several blocks each, the last one short."""
    monkeypatch.setattr(kernel, "CHUNK", BLOCK)
    scores = rows_for_top_p(vocab)
    probs = scores.double().softmax(-1)
    for top_p in ((0.9, 1.0, 0.6), (0.999, 1e-9, 0.05)):
        top_p_B11 = torch.tensor(top_p, device=DEVICE)[:, None, None]
        found = kernel.top_p_border(scores, top_p_B11)
        kept, above = ((probs * mask).sum(-1, keepdim=True) for mask in (scores >= found, scores > found))
        assert ((kept > top_p_B11 - 2e-6) & ((above < top_p_B11 + 2e-6) | (top_p_B11 == 1))).all()
        assert ((scores == found).any(-1, keepdim=True) | (found.isneginf() & (top_p_B11 == 1))).all()
        assert torch.equal(kernel.top_p_border(scores[2:, 1:].contiguous(), top_p_B11[2:]), found[2:, 1:])
        near_1 = top_p_B11 == torch.tensor(0.999)  # where the sums' rounding counts
        assert torch.equal(found[~near_1[:, 0, 0]], top_p_border_reference(scores, top_p_B11)[~near_1[:, 0, 0]])
