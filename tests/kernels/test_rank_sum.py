"""The sum over ranks: in their order, in fp32, rounded once; Triton's in its interpreter gives the same bits."""

from importlib import import_module

import pytest
import torch

from longdraft.kernels.rank_sum import rank_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (4, 2, 3, 700), (8, 1, 16, 64)])
def test_the_sum_is_in_order_and_rounded_once(dtype, shape):
    parts = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(100).to(dtype)
    kept, total = parts.clone(), torch.zeros(shape[1:])
    for part in parts:
        total = total + part.float()
    assert torch.equal(rank_sum(parts), total.to(dtype)) and torch.equal(parts, kept)
    found = import_module("longdraft.kernels.triton.rank_sum").rank_sum(parts)
    once = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0  # which the interpreter rounds down
    torch.testing.assert_close(found, total.to(dtype), rtol=once, atol=0.0)
