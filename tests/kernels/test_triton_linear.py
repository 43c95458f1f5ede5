"""triton/linear.py in Triton's interpreter or on a GPU: its error, and a row's bits beside other rows."""

import pytest
import torch

from longdraft.kernels.triton.linear import BLOCK_K, BLOCK_N, grouped_linear, linear, split_inputs, stages

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter reads bf16 as integers.
DTYPE, ROUNDING = (torch.bfloat16, 2**-8) if ON_GPU else (torch.float16, 2**-11)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DTYPE)


@pytest.mark.parametrize(
    "n_outputs, n_inputs, bias",
    [(1, 1, True), (64, 1024, True), (136, 300, False), *([(4096, 14_336, True)] if ON_GPU else [])],
)
def test_rows_have_the_same_bits_whatever_lies_beside_them(n_outputs, n_inputs, bias):
    x, weight = draw(140, n_inputs), draw(n_outputs, n_inputs)
    bias_N = draw(n_outputs) if bias else None
    on_device = [None if part is None else part.to(DEVICE) for part in (weight, bias_N)]
    out = linear(x.to(DEVICE), *on_device).cpu()
    exact = x.double() @ weight.double().T + (0 if bias_N is None else bias_N.double())
    # Tensor cores cut the digits of each sum off, so the error grows with what is added, however small the result.
    slack = 1e-6 * (1 + x.double().abs() @ weight.double().abs().T) if ON_GPU else 1e-4
    assert bool(((out.double() - exact).abs() <= exact.abs() * ROUNDING + slack).all())
    for n_rows in (1, 16, 17, 128, 129):
        first = 140 - n_rows
        others = torch.full_like(x, float("nan"))
        others[first:] = x[first:]
        wide = linear(others.to(DEVICE), *on_device).cpu()
        narrow = linear(others[first:].to(DEVICE), *on_device).cpu()
        assert torch.equal(wide[first:], out[first:]) and torch.equal(narrow, out[first:])
    assert linear(x[:0].to(DEVICE), *on_device).shape == (0, n_outputs)


@pytest.mark.parametrize("n_outputs, n_inputs", [(1, 1), (64, 1024), (136, 300)])
@pytest.mark.parametrize("sizes", [(0, 49, 1, 0, 16, 2), (1,), (0, 0, 3)])
def test_a_row_of_an_expert_has_the_bits_of_that_expert_alone(sizes, n_outputs, n_inputs):
    x, weight = draw(sum(sizes), n_inputs).to(DEVICE), draw(len(sizes), n_outputs, n_inputs).to(DEVICE)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)
    want = [linear(rows, one) for rows, one in zip(x.split(sizes), weight, strict=True)]
    assert torch.equal(grouped_linear(x, weight, ends), torch.cat(want))


def test_splits_fill_the_processors_and_cover_all_inputs():
    for n_outputs, n_inputs in ((1, 1), (4096, 4096), (4096, 14_336), (128_256, 4096), (576, 1536)):
        size = split_inputs(n_outputs, n_inputs, 132)
        n_splits = -(-n_inputs // size)
        assert size % BLOCK_K == 0 and size * n_splits >= n_inputs > size * (n_splits - 1)
        assert n_splits == 1 or size >= 4 * BLOCK_K or n_inputs < 4 * BLOCK_K
    assert split_inputs(4096, 4096, 132) == 4096 // 4 and split_inputs(128_256, 4096, 132) == 4096
    assert 128_256 // BLOCK_N > 132 and stages(227 << 10) == 4 and stages(99 << 10) == 2
