"""What is around the gated delta rule: Triton's functions in the interpreter give what plain PyTorch gives, which
tests/models/test_equal_transformers.py compares with transformers; and a node's bits depend on its path alone.
"""

from importlib import import_module

import pytest
import torch

from longdraft.kernels.delta_layer import DeltaWeights, delta_tokens_reference, gated_norm_reference, recent_in_pieces
from longdraft.kernels.tree import PassPlan

BATCH, KEY_HEADS, HEADS, KEY, VALUE, TAPS = 2, 2, 6, 24, 40, 4
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE
# One rounding: the interpreter rounds bf16 down.
ALL = slice(None)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture
def triton():
    return import_module("longdraft.kernels.triton.delta_layer")


def drawn(dtype: torch.dtype, n_rows: int) -> tuple[torch.Tensor, torch.Tensor, DeltaWeights]:
    """Projections, the inputs before them, and weights; among the decays' inputs large ones of both signs."""
    generator = torch.Generator().manual_seed(n_rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    projected = draw(BATCH, n_rows, CHANNELS + HEADS * VALUE + 2 * HEADS)
    projected[..., -HEADS:] *= 8
    weights = DeltaWeights(draw(CHANNELS, TAPS), draw(HEADS), draw(HEADS), KEY_HEADS, KEY)
    return projected, draw(BATCH, TAPS - 1, CHANNELS), weights


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    largest = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("some", [ALL, slice(1, 3), slice(4, 7)], ids=["all", "from the second on", "later"])
@pytest.mark.parametrize(("n_rows", "tree"), [(7, False), (9, True)])
def test_tokens_are_those_of_the_definition(triton, trees, dtype, n_rows, tree, some):
    projected, before, weights = drawn(dtype, n_rows)
    plan = PassPlan(torch.zeros(BATCH, dtype=torch.int64), n_rows, trees.chain_and_tree(n_rows) if tree else None)
    recent = plan.recent_rows(TAPS)
    found = triton.delta_tokens(projected, before, recent, weights, some)
    every = delta_tokens_reference(projected, before, recent, weights, ALL)
    wanted = delta_tokens_reference(projected, before, recent, weights, some)
    assert all(torch.equal(x[:, some], y) for x, y in zip(every, wanted, strict=True))
    for ours, other in zip(found, wanted, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, other, TOLERANCE[dtype])
    # Decays close to 1 are held to their own size: their sum over a long text counts.
    torch.testing.assert_close(found.g_BTV, wanted.g_BTV, rtol=1e-5, atol=0.0)
    assert float(every.g_BTV.abs().min()) < 1e-5


def test_a_pieces_tokens_are_those_of_it_alone(triton):
    projected, before, weights = drawn(torch.float32, 9)
    projected, before = projected[:1], torch.zeros_like(before[:1])
    recent = recent_in_pieces(torch.tensor([4, 4, 5, 5, 5, 5, 5, 7, 7]), TAPS)
    for form in (triton.delta_tokens, delta_tokens_reference):
        packed = form(projected, before, recent, weights, ALL)
        for piece in (slice(2), slice(2, 7), slice(7, 9)):
            alone = form(projected[:, piece].contiguous(), before, None, weights, ALL)
            assert all(torch.equal(x[:, piece], y) for x, y in zip(packed, alone, strict=True))


def test_a_nodes_tokens_depend_on_its_path_alone(triton, trees):
    n_rows = 9
    projected, before, weights = drawn(torch.float32, n_rows)
    mask = trees.chain_and_tree(n_rows)
    recent = PassPlan(torch.zeros(BATCH, dtype=torch.int64), n_rows, mask).recent_rows(TAPS)
    found = triton.delta_tokens(projected, before, recent, weights, ALL)
    for node in range(n_rows):
        path = mask[1, node].nonzero()[:, 0]
        alone = triton.delta_tokens(projected[1:, path].contiguous(), before[1:], None, weights, ALL)
        assert all(torch.equal(x[0, -1], y[1, node]) for x, y in zip(alone, found, strict=True)), node


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_norm_and_its_gate_are_those_of_the_definition(triton, dtype):
    projected, _, _ = drawn(dtype, 5)
    read = torch.randn(BATCH, 5, HEADS, VALUE, generator=torch.Generator().manual_seed(2)) * 3
    gate, weight = projected[..., CHANNELS : CHANNELS + HEADS * VALUE], torch.rand(VALUE).to(dtype)
    found = triton.gated_norm(read, gate, weight, 1e-6)
    assert found.dtype == dtype
    assert_close(found.float(), gated_norm_reference(read, gate, weight, 1e-6).float(), 2 * TOLERANCE[dtype])
