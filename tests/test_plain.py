"""tests/plain.py, the yardstick for kernels' errors, is correct and sums in the promised order."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_run_from_the_first_number_to_the_last_unfused(plain, dtype):
    left, right = draw(2, 5, 70, seed=1).to(dtype), draw(70, 3, seed=2).to(dtype)
    found = plain.product(left, right)
    assert found.dtype == torch.float32
    for *place, value in ((b, i, j, found[b, i, j]) for b in range(2) for i in range(5) for j in range(3)):
        b, i, j = place
        expected = torch.tensor(0.0).numpy()
        for x, y in zip(left[b, i].float().numpy(), right[:, j].float().numpy(), strict=True):
            expected = expected + x * y
        assert value.numpy() == expected
    big = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert plain.total(big) == 1.0 and plain.total(big.double()) == 2.0
    assert plain.total(torch.ones(3, 0)).tolist() == [0, 0, 0]


def test_in_fp64_it_is_the_truth(plain):
    q, k, v, grad = (draw(2, n, heads, 24, seed=n).double() for n, heads in ((9, 6), (30, 2), (31, 2), (9, 6)))
    v = v[:, :30].contiguous()
    sees = draw(2, 9, 30, seed=5) > 0.3
    sees[:, :, 0] = True
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in leaves), attn_mask=sees[:, None], enable_gqa=True
    )
    expected.transpose(1, 2).backward(grad)
    found = plain.attention(q, k, v, sees), *plain.attention_gradients(q, k, v, sees, grad)
    for ours, theirs in zip(found, (expected.transpose(1, 2), *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    hidden, weight, labels = draw(40, 16, seed=6).double(), draw(70, 16, seed=7).double(), torch.arange(40) % 7 * 10
    labels[::5] = -100
    hidden.requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss * 0.3, hidden)
    found = plain.cross_entropy(hidden, weight, labels, 0.3)
    torch.testing.assert_close(found, (loss.detach(), gradient), rtol=1e-10, atol=1e-12)
    bias = draw(70, seed=8).double()
    torch.testing.assert_close(plain.linear(hidden, weight, bias), F.linear(hidden, weight, bias), rtol=1e-10, atol=0)
