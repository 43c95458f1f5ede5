"""Kernels on a GPU: the noise against the CPU's, attention and the fused loss against their references.

Memory that must not be read holds NaN. In fp32 (without TF32) the error is bounded outright, in bf16 it is at most
twice (gradients: three times) what plain PyTorch makes of the same numbers on the same device.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels import backend
from longdraft.kernels.causal_attention import causal_attention
from longdraft.kernels.cross_attention import cross_attention
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.linear import linear
from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.kernels.reference.cross_attention import cross_attention as cross_reference
from longdraft.kernels.reference.gumbel import MASK, philox_4x32
from longdraft.kernels.reference.segment_attention import read_keys
from longdraft.kernels.reference.segment_attention import segment_attention as segment_reference
from longdraft.kernels.reference.tree_attention import tree_attention as tree_reference
from longdraft.kernels.rotate import rotate
from longdraft.kernels.segment_attention import Segment, segment_attention
from longdraft.kernels.tree_attention import tree_attention

# PyTorch's fp32 attention may split products into several of the tensor cores.
FP32 = 2e-5
HEADS = [(4, 4, 16), (6, 2, 64), (8, 1, 128)]
LENGTHS = ([0], [1], [63], [1100], [0, 7, 100], [1030, 3])


@pytest.fixture
def trees(shared):
    """Builders of tests/kernels/test_tree_attention.py: `draw`, `random_tree`, `poisoned`."""
    return shared("kernels/test_tree_attention.py")


def place(x: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the device, as a slice of rows twice as wide, NaN beside them."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), device=device, dtype=dtype)
    wide[..., : x.shape[-1]] = x.to(device, dtype)
    return wide[..., : x.shape[-1]]


def test_philox_words_are_the_cpus_bit_for_bit(device):
    generator = torch.Generator().manual_seed(0)
    counter = [torch.randint(MASK + 1, (1000,), generator=generator) for _ in range(4)]
    key = [torch.randint(MASK + 1, (1000,), generator=generator) for _ in range(2)]
    for words in (counter, key):
        words[0][:3] = torch.tensor([0, 1, MASK])
    here = philox_4x32(tuple(counter), tuple(key))
    there = philox_4x32(tuple(x.to(device) for x in counter), tuple(x.to(device) for x in key))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("vocab", [3, 256, 1003, 128_256])
def test_noise_is_the_cpus_up_to_the_logarithms(device, vocab):
    """The words are equal bits; two logarithms follow, each of which may differ in its last bits."""
    seeds = torch.tensor([0, -1, 2**63 - 1, 77])
    positions = torch.tensor([[0, 1], [2**31, 2**32 - 1], [5, 6], [131_072, 9]])
    here = gumbel_noise(seeds, positions, vocab)
    there = gumbel_noise(seeds.to(device), positions.to(device), vocab)
    assert there.device.type == device.type and there.dtype == torch.float32
    torch.testing.assert_close(there.cpu(), here, rtol=5e-7, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("n_rows", [1, 2, 13, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_tree_attention(device, trees, heads, lengths, n_rows, tree, window):
    n_heads, n_kv_heads, width = heads
    keys, values = trees.poisoned(lengths, n_rows, max(lengths) + n_rows + 5, n_kv_heads, width)
    q, lengths_B = trees.draw(len(lengths), n_rows, n_heads, width, seed=7), torch.tensor(lengths)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(len(lengths))]) if tree else None
    want = tree_reference(q, keys, values, lengths_B, masks, window)
    there = None if masks is None else masks.to(device)
    out = tree_attention(q.to(device), keys.to(device), place(values, device), lengths_B.to(device), there, window)
    out = out.cpu()
    if masks is not None and window is not None:
        # A padding row has no place in a history: what a window leaves it is not defined, but finite.
        assert bool(out.isfinite().all())
        out, want = (x.where(masks.any(-1)[:, :, None, None], 0.0) for x in (out, want))
    torch.testing.assert_close(out, want, rtol=0, atol=FP32)


@pytest.mark.parametrize("n_rows", [1, 13, 64])
@pytest.mark.parametrize("length", [1, 300, 1100])
def test_tree_attention_in_bf16(device, trees, length, n_rows):
    keys, values = trees.poisoned([length], n_rows, length + n_rows + 5, 2, 64)
    q, lengths, mask = trees.draw(1, n_rows, 6, 64, seed=3), torch.tensor([length]), trees.random_tree(n_rows, 1)[None]
    mask[:, -1, -1] = True
    exact = tree_reference(q, keys, values, lengths, mask)
    low_q, low_k, low_v = (
        q.to(device, torch.bfloat16),
        keys.to(device, torch.bfloat16),
        place(values, device, torch.bfloat16),
    )
    full = torch.cat((torch.ones(1, n_rows, length, dtype=torch.bool), mask), 2)[:, None].to(device)
    rows = [low_q.transpose(1, 2), *(x[:, : length + n_rows].transpose(1, 2) for x in (low_k, low_v))]
    plain = scaled_dot_product_attention(*rows, attn_mask=full, enable_gqa=True).transpose(1, 2)
    out = tree_attention(low_q, low_k, low_v, lengths.to(device), mask.to(device))
    assert out.dtype == torch.bfloat16
    assert (out.float().cpu() - exact).abs().max() <= 2 * (plain.float().cpu() - exact).abs().max()


@pytest.mark.parametrize("n_rows", [1, 16, 63])
@pytest.mark.parametrize("lengths", [*LENGTHS, [1030, 3, 0]], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_cross_attention(device, shared, heads, lengths, n_rows):
    builders = shared("kernels/test_cross_attention.py")
    n_heads, n_kv_heads, width = heads
    keys, values = builders.poisoned(lengths, n_kv_heads, width)
    q, lengths_B = builders.draw(len(lengths), n_rows, n_heads, width, seed=7), torch.tensor(lengths)
    want = cross_reference(q, keys, values, lengths_B)
    on_device = q.to(device), keys.to(device), place(values, device), lengths_B.to(device)
    torch.testing.assert_close(cross_attention(*on_device).cpu(), want, rtol=0, atol=FP32)


@pytest.mark.parametrize("length", [1, 300, 1100])
def test_cross_attention_in_bf16(device, shared, length):
    builders = shared("kernels/test_cross_attention.py")
    keys, values = builders.poisoned([length], 2, 64)
    q, lengths = builders.draw(1, 9, 6, 64, seed=3), torch.tensor([length])
    exact = cross_reference(q, keys, values, lengths)
    low_q, low_k, low_v = (
        q.to(device, torch.bfloat16),
        keys.to(device, torch.bfloat16),
        place(values, device, torch.bfloat16),
    )
    rows = [low_q.transpose(1, 2), *(x[:, :length].transpose(1, 2) for x in (low_k, low_v))]
    plain = scaled_dot_product_attention(*rows, enable_gqa=True).transpose(1, 2)
    out = cross_attention(low_q, low_k, low_v, lengths.to(device))
    assert (out.float().cpu() - exact).abs().max() <= 2 * (plain.float().cpu() - exact).abs().max()


@pytest.mark.parametrize("window", [None, 7, 600])
@pytest.mark.parametrize("n_rows", [1, 63, 1100])
def test_causal_attention(device, trees, n_rows, window):
    q, k, v = (trees.draw(2, n_rows, heads, 64, seed=heads) for heads in (6, 2, 2))
    want = tree_reference(q, k, v, torch.zeros(2, dtype=torch.int64), None, window)
    out = causal_attention(q.to(device), k.to(device), place(v, device), window)
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=FP32)


N = 700
PIECES = list(pairwise([0, 1, 64, 64, 127, 300, N]))
SEGMENTS = {
    "pieces": [(a, b, a, b) for a, b in PIECES],
    "shifted": [(min(a + 3, b), b, a, max(b - 3, a)) for a, b in PIECES],
    "subset": [(0, 63, 0, 64), (63, 200, 300, 500), (200, 201, 0, 600), (260, 300, 660, 700)],
    "many short": [(10 * i, 10 * i + 10, 10 * i, 10 * i + 10) for i in range(70)],
    "shared by many": [(10 * i, 10 * i + 10, 0, N - 7 * i) for i in range(70)],
}


def with_gradients(attention, given: list[Tensor], weights: Tensor, frozen_keys: bool) -> list[Tensor]:
    """The output and the gradients of q and, where they are not frozen, k and v, in fp32."""
    leaves = [x.detach().requires_grad_(i == 0 or not frozen_keys) for i, x in enumerate(given)]
    out = attention(leaves[0], leaves[1], leaves[2][..., : leaves[1].shape[2]])
    (out.float() * weights).sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("way", ["one kernel in bf16", "one by one in bf16", "one by one in fp32"])
def test_segment_attention(device, trees, monkeypatch, way, heads, name, window):
    if "one by one" in way:
        monkeypatch.setattr(backend, "varlen_attention", lambda: None)
    dtype = torch.float32 if "fp32" in way else torch.bfloat16
    segments, (n_heads, n_kv_heads, width) = [Segment(*segment) for segment in SEGMENTS[name]], heads
    shapes = (n_heads, width), (n_kv_heads, width), (n_kv_heads, 2 * width)
    given = [trees.draw(N, *shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    weights = trees.draw(N, n_heads, width, seed=3).to(device)
    mask = read_keys(N, N, segments, window).to(device)
    blind = ~mask.any(1, keepdim=True)

    def plain(*rows):
        heads_first = [x.transpose(0, 1)[None] for x in rows]
        out = scaled_dot_product_attention(*heads_first, attn_mask=mask | blind, enable_gqa=n_heads != n_kv_heads)
        return out[0].transpose(0, 1) * ~blind[:, :, None]

    # Gradients of keys that many segments read are sums in bf16; only the target's keys are such, and have none.
    options = weights, name == "shared by many"
    exact = with_gradients(
        lambda *rows: segment_reference(*rows, segments, window), [x.float() for x in given], *options
    )
    found = with_gradients(lambda *rows: segment_attention(*rows, segments, window), given, *options)
    usual = with_gradients(plain, given, *options)
    for part, (ours, theirs, truth) in enumerate(zip(found, usual, exact, strict=True)):
        allowed = (3 if part else 2) * (theirs - truth).abs().max() + FP32 * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed, ("output", "dq", "dk", "dv")[part]


def test_linear_and_rotation_are_the_cpus(device, trees):
    x, weight = trees.draw(2, 9, 32, seed=1), trees.draw(48, 32, seed=2)
    bias, norm, residual = trees.draw(48, seed=3), trees.draw(32, seed=4), trees.draw(2, 9, 48, seed=5)
    for gated in (False, True):
        given = {"norm": (norm, 1e-6), "residual": None if gated else residual}
        moved = {"norm": (norm.to(device), 1e-6), "residual": None if gated else residual.to(device)}
        want = linear(x.clone(), weight, bias, gated=gated, **given)
        out = linear(x.to(device), weight.to(device), bias.to(device), gated=gated, **moved)
        torch.testing.assert_close(out.cpu(), want, rtol=1e-5, atol=1e-4)
    heads = trees.draw(2, 9, 6, 16, seed=6)
    angles = trees.draw(2, 9, 8, seed=7)
    tables = angles.cos()[:, :, None, None], torch.stack((-angles.sin(), angles.sin()), 2)[:, :, None]
    out = rotate(heads[:, :, 1:5].to(device), *(table.to(device) for table in tables))
    torch.testing.assert_close(out.cpu(), rotate(heads[:, :, 1:5], *tables), rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["torch", "liger"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_loss(device, shared, implementation, dtype):
    if implementation == "liger" and (device.type != "cuda" or backend.liger_cross_entropy() is None):
        pytest.skip("needs a CUDA device and liger-kernel (install longdraft[gpu])")
    builders = shared("kernels/test_linear_cross_entropy.py")
    drawn, weight, labels = builders.example(256, 64, 500, dtype)
    hidden = drawn.detach().to(device).requires_grad_()
    weight, labels = weight.to(device), labels.to(device)
    exact_loss, exact_grad = builders.full_formula(hidden.float(), weight.float(), labels)
    plain_loss, plain_grad = builders.full_formula(hidden, weight, labels)
    out = linear_cross_entropy(hidden, weight, labels, top_k=3, implementation=implementation)
    (out.loss_sum * 0.37).backward()
    assert hidden.grad is not None and hidden.grad.dtype == dtype
    assert (out.loss_sum - exact_loss).abs() <= 2 * (plain_loss - exact_loss).abs() + 1e-5 * exact_loss
    allowed = 3 * (plain_grad - exact_grad).norm() + 1e-5 * exact_grad.norm()
    assert (hidden.grad - exact_grad).norm() <= allowed
    assert out.n_labels == (labels >= 0).sum()
    if dtype == torch.float32:  # in bf16 logits are equal, and which of them is first depends on the rounding
        ranks = (hidden.detach() @ weight.T).topk(3, dim=1).indices == labels[:, None]
        assert out.rank_counts.tolist() == ranks.sum(0).tolist()
