"""The order of the C kernels' sums in bf16, bit for bit, by AVX-512's bf16 instructions and by AVX2."""

import pytest
import torch

from longdraft.kernels.cpu import library, rows

# How many numbers of a row a step takes, and the order in which lanes add them: eight lanes of one number, or sixteen
# of a pair, whose second number comes first.
ORDERS = {"avx2": (8, (slice(None),)), "pairs": (32, (slice(1, None, 2), slice(0, None, 2)))}


@pytest.fixture(params=ORDERS)
def order(request, monkeypatch, c_kernels):
    """Builds the kernels for these instructions, even if the processor has better ones."""
    if not (torch.cpu._is_avx512_bf16_supported() if request.param == "pairs" else torch.cpu._is_avx2_supported()):
        pytest.skip(f"this processor has no instructions for {request.param}")
    monkeypatch.setenv("LONGDRAFT_CPU_KERNELS", "avx2" if request.param == "avx2" else "1")
    library.library.cache_clear()
    yield ORDERS[request.param]
    library.library.cache_clear()


def in_order(x_MI, weight_NI, step, parts):
    """x W^T with sums in that order. Products of two bf16 numbers are exact in fp32; sums round."""
    short = -x_MI.shape[1] % step
    x_MI, weight_NI = (torch.nn.functional.pad(part.float(), (0, short)) for part in (x_MI, weight_NI))
    sums_MNL = 0.0
    for start in range(0, x_MI.shape[1], step):
        for part in parts:
            taken = x_MI[:, start : start + step][:, part], weight_NI[:, start : start + step][:, part]
            sums_MNL = sums_MNL + taken[0][:, None] * taken[1]
    while sums_MNL.shape[2] > 1:
        half = sums_MNL.shape[2] // 2
        sums_MNL = sums_MNL[..., :half] + sums_MNL[..., half:]
    return sums_MNL[..., 0]


@pytest.mark.parametrize("k", [8, 64, 328, 576])
def test_sums_are_in_one_order_at_every_width(order, k):
    torch.manual_seed(k)
    x, weight, bias = torch.randn(19, k).bfloat16(), torch.randn(53, k).bfloat16(), torch.randn(53).bfloat16()
    exact = in_order(x, weight, *order)
    for m in (1, 2, 3, 4, 5, 6, 7, 16, 19):
        assert torch.equal(rows.linear_rows(x[:m], weight), exact[:m].bfloat16())
        assert torch.equal(rows.linear_rows(x[:m], weight, bias), (exact[:m] + bias.float()).bfloat16())


def test_what_is_after_a_row_is_not_read(order):
    """40 numbers are not a whole number of steps, and NaN follows them, in the next row."""
    x, weight = torch.ones(7, 40).bfloat16(), torch.ones(9, 40).bfloat16()
    x[1::2], weight[1::2] = torch.nan, torch.nan
    found = rows.linear_rows(x, weight)
    assert torch.equal(found[::2, ::2], torch.full((4, 5), 40.0).bfloat16()) and found[1::2].isnan().all()
