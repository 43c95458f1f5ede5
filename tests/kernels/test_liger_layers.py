"""Liger's kernels behind kernels/rms_norm.py and kernels/gate.py, in Triton's interpreter or on a GPU, against the
references: values, places of rounding, gradients, and that they do not overwrite their inputs."""

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels.gate import gate, gate_reference
from longdraft.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    adds_with_norm,
    rms_norm,
    rms_norm_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cannot compute in bf16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
EPS = 1e-5
SHAPES = [(1, 1, 48), (2, 5, 48), (3, 257), (1, 2)]


@pytest.fixture
def liger(monkeypatch, shared) -> list[str]:
    """Makes the public functions use Liger's kernels; returns a list of the device types that they ask for."""
    kernels, device_types = shared("ligers.py").interpreted(monkeypatch), []
    monkeypatch.setattr(backend, "liger_layers", lambda device_type: device_types.append(device_type) or kernels)
    return device_types


def draw(*shape: int, dtype=torch.float32, seed=0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def nearly_equal(found: Tensor, wanted: Tensor) -> None:
    """In half precision numbers are equal, but for the few whose fp32 values are next to a rounding border: these are
    one step off. A kernel that rounded in another place would change a third of them."""
    step = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=4 * step, atol=step * 1e-3)
    if found.dtype != torch.float32 and found.numel() > 100:
        assert (found != wanted).float().mean() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_references(liger, shape, dtype):
    x, added = draw(*shape, dtype=dtype), 3 * draw(*shape, dtype=dtype, seed=1)
    weight = 1 + draw(shape[-1], dtype=dtype, seed=2) / 2
    with torch.no_grad():
        found, total = add_rms_norm(x, added, weight, EPS)
        wanted, wanted_total = add_rms_norm_reference(x, added, weight, EPS)
        assert torch.equal(total, wanted_total)
        nearly_equal(found, wanted)
        assert torch.equal(rms_norm(total, weight, EPS), found), "the bits depend on the addition"
        wide = draw(*shape[:-1], 2 * shape[-1], dtype=dtype, seed=3)
        nearly_equal(gate(wide), gate_reference(wide))
    assert liger == 3 * [DEVICE] and adds_with_norm(x)


def test_a_row_does_not_depend_on_the_others(liger):
    x, added, weight = draw(7, 48), draw(7, 48, seed=1), draw(48, seed=2)
    together, alone = add_rms_norm(x, added, weight, EPS), add_rms_norm(x[3:4], added[3:4], weight, EPS)
    assert all(torch.equal(one[3:4], other) for one, other in zip(together, alone, strict=True))
    assert torch.equal(rms_norm(x, weight, EPS)[3:4], rms_norm(x[3:4], weight, EPS))
    assert torch.equal(gate(x)[3:4], gate(x[3:4]))


def test_rows_that_lie_apart(liger):
    wide, weight = draw(4, 3, 96), draw(48, seed=1)
    x, added = wide[:, 1:, :48], wide[:, :-1, 48:]
    for pair in zip(*(f(x, added, weight, EPS) for f in (add_rms_norm, add_rms_norm_reference)), strict=True):
        nearly_equal(*pair)
    nearly_equal(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    nearly_equal(gate(wide[:, ::2]), gate_reference(wide[:, ::2]))


def gradients(function, given: list[Tensor], trained: list[bool], used: list[bool]) -> list[Tensor]:
    """Gradients of the trained inputs, of a sum over the used outputs. Taken twice, as a kernel may work only once."""
    leaves = [x.detach().clone().requires_grad_(train) for x, train in zip(given, trained, strict=True)]
    before = [x.detach().clone() for x in leaves]
    inputs = [x * 1 for x in leaves[:-1]] + leaves[-1:]  # results of others, which a kernel must not overwrite
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    kept = [out.detach().clone() for out in outputs]
    weights = [draw(*out.shape, dtype=out.dtype, seed=9 + i) for i, out in enumerate(outputs)]
    parts = zip(outputs, weights, used, strict=True)
    total = sum((out * weight).float().sum() for out, weight, use in parts if use)
    wanted = [x for x in leaves if x.requires_grad]
    first = torch.autograd.grad(total, wanted, retain_graph=True)
    second = torch.autograd.grad(total, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    changed = zip((*leaves, *outputs, *inputs), (*before, *kept, *before), strict=True)
    assert all(torch.equal(now.detach(), then) for now, then in changed)
    return list(first)


def same_gradients(function, reference, given: list[Tensor], trained: list[bool], used: list[bool]) -> None:
    """Against the reference's in fp32: at most three times the error of the reference's in this precision."""
    exact = gradients(reference, [x.float() for x in given], trained, used)
    usual = gradients(reference, given, trained, used)
    for ours, theirs, truth in zip(gradients(function, given, trained, used), usual, exact, strict=True):
        assert ours.dtype == theirs.dtype
        allowed = 3 * (theirs.float() - truth).norm() + 1e-6 * truth.norm()
        assert (ours.float() - truth).norm() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("used", [[True, True], [True, False], [False, True]], ids=["both", "norm", "sum"])
@pytest.mark.parametrize("trained", [[True, True, True], [True, True, False], [False, True, True]], ids=str)
def test_gradients_of_addition_and_norm(liger, trained, used, dtype):
    given = [draw(2, 5, 48, dtype=dtype), draw(2, 5, 48, dtype=dtype, seed=1), draw(48, dtype=dtype, seed=2)]
    if used == [False, True] and trained[2]:
        trained = [*trained[:2], False]  # the sum does not depend on the weight
    same_gradients(lambda *x: add_rms_norm(*x, EPS), lambda *x: add_rms_norm_reference(*x, EPS), given, trained, used)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_gradients_of_the_gate(liger, dtype):
    same_gradients(
        lambda x, _: gate(x), lambda x, _: gate_reference(x),
        [draw(2, 5, 96, dtype=dtype), draw(1)], [True, False], [True],
    )  # fmt: skip


def test_a_norm_that_trains_is_pytorchs(monkeypatch):
    """And so is a norm of no rows, and of another dtype than the weight's."""
    monkeypatch.setattr(backend, "liger_layers", lambda _: backend.LigerLayers(*[pytest.fail] * 3))
    weight = draw(48).requires_grad_()
    rms_norm(draw(3, 48), weight, EPS).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert rms_norm(draw(0, 48), weight, EPS).shape == (0, 48) and gate(draw(0, 96)).shape == (0, 48)
        assert rms_norm(draw(3, 48).double(), weight, EPS).dtype == torch.float64
