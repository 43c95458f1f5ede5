"""kernels/experts.py: both implementations against the reference; ties; a token's bits do not depend on others."""

from types import SimpleNamespace

import pytest
import torch

from longdraft.kernels.cpu.library import decoding
from longdraft.kernels.experts import ExpertWeights, choose_experts, experts, grouped, waits_for_host
from longdraft.kernels.experts import experts_reference as reference

D, E, F = 24, 5, 16
CLAMPED = 1.702, 2.0  # gpt-oss's slope, and a limit that is met here


def weights(dtype: torch.dtype = torch.float32, clamped: bool = False) -> ExpertWeights:
    """Random weights; `clamped` are experts like gpt-oss's, with biases."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(E, D), (E, 2 * F, D), (E, D, F), *([(E,), (E, 2 * F), (E, D)] if clamped else [])]
    given = [(torch.randn(*shape, generator=generator) * 0.3).to(dtype) for shape in shapes]
    return ExpertWeights(*given, clamped=CLAMPED if clamped else None)


def tokens(slots: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(slots, count, D, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("n_chosen", [1, 3, E])
@pytest.mark.parametrize("shape", [(1, 1), (2, 7), (1, 150)])
def test_against_the_reference(shape, n_chosen, normalised, clamped):
    x_BTD, given = tokens(*shape), weights(clamped=clamped)
    want = reference(x_BTD, given, n_chosen, normalised)
    torch.testing.assert_close(experts(x_BTD, given, n_chosen, normalised), want)
    chosen_MK, shares_MK = choose_experts(x_BTD, given, n_chosen, normalised)
    by_groups = grouped(x_BTD.flatten(0, 1), chosen_MK, shares_MK, given).view_as(x_BTD)
    torch.testing.assert_close(by_groups, want)


def test_of_equal_experts_the_lower_index_is_taken():
    x_BTD, given = tokens(1, 40), weights()
    given.router_ED.zero_()
    chosen_MK, shares_MK = choose_experts(x_BTD, given, 2, normalised=True)
    assert chosen_MK.tolist() == [[0, 1]] * 40 and bool((shares_MK == 0.5).all())


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoded_tokens_bits_do_not_depend_on_the_others(c_kernels, dtype, clamped):
    x_BTD, given = tokens(3, 40, dtype), [weights(dtype, clamped), 2, True]
    with decoding():
        whole_BTD = experts(x_BTD, *given)
        for width in (1, 3, 8):
            assert torch.equal(experts(x_BTD[:, :width].contiguous(), *given), whole_BTD[:, :width])
        assert torch.equal(experts(x_BTD[1:2], *given), whole_BTD[1:2])


@pytest.mark.parametrize("major, waits", [(8, True), (9, False), (10, False), (12, True)])
def test_where_pytorch_has_no_grouped_product_a_pass_waits_for_the_host(monkeypatch, major, waits):
    """ATen's `_grouped_mm_cuda` has a kernel for sm_90 and sm_100 in bf16; elsewhere it reads the sizes on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    given = {"is_cuda": True, "device": torch.device("cuda", 0)}
    assert waits_for_host(SimpleNamespace(dtype=torch.bfloat16, **given)) is waits
    assert waits_for_host(SimpleNamespace(dtype=torch.float16, **given))
