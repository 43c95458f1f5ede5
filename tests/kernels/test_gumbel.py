"""The noise: Philox's published answers, independence of all but its arguments, and the right distribution."""

import pytest
import torch

from longdraft.kernels import choice as module
from longdraft.kernels.choice import MASK, gumbel_noise, gumbel_of, philox_4x32
from longdraft.kernels.choice import gumbel_noise_reference as reference
from longdraft.kernels.triton.choice import gumbel_noise as triton_noise


def words(*values):
    return tuple(torch.tensor(value) for value in values)


def test_philox_known_answers():
    """The three vectors published with Random123 for philox4x32, 10 rounds."""
    for counter, key, answer in [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        assert tuple(int(word) for word in philox_4x32(words(*counter), words(*key))) == answer


def test_counter_layout_is_token_block_then_position():
    seed, position, vocab = 0x1234_5678_9ABC_DEF0, 77, 11
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([[position]]), vocab)[0, 0]
    for token in range(vocab):
        answer = philox_4x32(words(token // 4, position, 0, 0), words(seed & MASK, seed >> 32))
        assert noise[token] == gumbel_of(answer[token % 4])


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, positions = torch.tensor([3, -9, 2**62]), torch.tensor([[5, 6], [1000, 0], [7, 70_000]])
    whole = gumbel_noise(seeds, positions, 1003)
    assert whole.shape == (3, 2, 1003) and whole.dtype == torch.float32
    for b in range(3):
        for j in range(2):
            alone = gumbel_noise(seeds[b : b + 1], positions[b : b + 1, j : j + 1], 130)
            assert torch.equal(alone[0, 0], whole[b, j, :130])
    assert len(whole.flatten().unique()) > 0.999 * whole.numel()


@pytest.mark.parametrize("vocab", [1, 3, 4, 255, 256, 259, 1003, 49_152])
def test_compiled_words_equal_the_reference_bit_for_bit(c_kernels, vocab):
    """Vocabularies around multiples of a block, and of the blocks that are computed together."""
    generator = torch.Generator().manual_seed(vocab)
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator)
    positions = torch.randint(0, 2**32, (9, 4), generator=generator)
    positions[0] = torch.tensor([0, 1, 2**32 - 1, 2**31])
    seeds[:3] = torch.tensor([0, -1, 2**63 - 1])
    assert torch.equal(gumbel_noise(seeds, positions, vocab), reference(seeds, positions, vocab))
    strided = positions.T.contiguous().T[::2], seeds.repeat_interleave(2)[::2][::2]
    assert torch.equal(gumbel_noise(strided[1], strided[0], vocab), reference(strided[1], strided[0], vocab))


def test_without_the_library_the_reference_serves(monkeypatch):
    seeds, positions = torch.tensor([3, -9]), torch.tensor([[5], [1000]])
    compiled = gumbel_noise(seeds, positions, 77)
    monkeypatch.setattr(module.rows, "library", lambda: None)
    assert torch.equal(gumbel_noise(seeds, positions, 77), compiled)


def test_no_word_gives_an_infinite_value():
    edge = gumbel_of(torch.tensor([0, 1, 127, 2**31, MASK - 300, MASK - 128, MASK - 1, MASK]))
    assert torch.isfinite(edge).all()
    assert (edge.diff() <= 0).all()


def test_distribution_is_gumbel():
    noise = gumbel_noise(torch.arange(40), torch.arange(25)[None].expand(40, -1), 200)
    noise_N = noise.flatten().double().sort().values
    below_N, steps_N = (-(-noise_N).exp()).exp(), torch.arange(len(noise_N) + 1) / len(noise_N)
    farthest = torch.maximum(steps_N[1:] - below_N, below_N - steps_N[:-1]).max()
    assert farthest * len(noise_N) ** 0.5 < 1.9495  # Kolmogorov and Smirnov: beyond with a chance of 0.001


@pytest.mark.parametrize("vocab", [1, 1023, 1024, 1030])
def test_tritons_noise_is_the_references_up_to_the_logarithms(vocab):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds = torch.tensor([0, 5, -1, 5, 2**63 - 1, 5])[::2]
    positions = torch.tensor([[0, 2**32 - 1], [2**31, 5], [131_072, 2]]).T.contiguous().T
    noise = triton_noise(seeds.to(device), positions.to(device), vocab).cpu()
    torch.testing.assert_close(noise, reference(seeds, positions, vocab), rtol=5e-7, atol=1e-6)
