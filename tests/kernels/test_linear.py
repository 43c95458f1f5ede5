"""kernels/linear.py: the paths for few and many rows, against fp32 arithmetic on the same bf16 numbers."""

import pytest
import torch

from longdraft.kernels import linear as module
from longdraft.kernels.linear import FP32_FROM, linear


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows", [(1, 1), (1, FP32_FROM - 1), (1, FP32_FROM), (2, 37), (5,)])
def test_error_is_that_of_a_bf16_layer(request, monkeypatch, rows, compiled, bias, emulated):
    """At most the rounding of the result, half a unit in the last place of bf16, plus a little for summation."""
    monkeypatch.setattr(module, "emulates_bf16", lambda: emulated)
    if compiled:
        request.getfixturevalue("c_kernels")
    else:
        monkeypatch.setattr(module.rows, "library", lambda: None)
    monkeypatch.setattr(module, "BLOCK", 24 * 10)  # several blocks, the last one short
    x, weight = draw(*rows, 24, seed=0), draw(33, 24, seed=1)
    bias_N = draw(33, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if bias_N is None else bias_N.double())
    out = linear(x, weight, bias_N)
    assert out.dtype == torch.bfloat16 and out.shape == (*rows, 33)
    assert bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all())


def test_gradient_reaches_the_input():
    """The shared LM head is frozen, but gradients of trained heads pass through it."""
    x, weight = draw(3, 24, seed=0).requires_grad_(), draw(33, 24, seed=1)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.float().sum(0).bfloat16().expand(3, -1), rtol=2**-7, atol=0.05)
