"""The C kernels: correct against fp64, and bit for bit independent of the other rows of a pass."""

import pytest
import torch

from longdraft.kernels.cpu import library, rows
from longdraft.kernels.linear import linear
from longdraft.kernels.rotate import HeadNorms, rotate
from longdraft.kernels.rotate import rotate_reference as reference_rotate

pytestmark = pytest.mark.usefixtures("c_kernels")


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def cache_with(keys, values, capacity):
    """Both in larger tensors of different strides, with NaN after their rows."""
    batch, n, heads, width = keys.shape
    k = torch.full((batch, capacity, heads, width), torch.nan, dtype=keys.dtype)
    v = torch.full((batch, heads, capacity, width + 8), torch.nan, dtype=keys.dtype)[..., :width].transpose(1, 2)
    k[:, :n], v[:, :n] = keys, values
    return k, v


@pytest.mark.parametrize("m", [1, 7, 40])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_parts_round_like_separate_operations(m, gated, bias):
    """Norm, gate and residual in one call, against each in fp64 with a rounding to bf16 after it."""
    torch.manual_seed(m)
    x, weight, w_norm = torch.randn(m, 64).bfloat16() * 3, torch.randn(96, 64).bfloat16(), torch.randn(64).bfloat16()
    b = torch.randn(96).bfloat16() if bias else None
    residual = None if gated else torch.randn(m, 96).bfloat16()
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w_norm.double()
    exact = normed.bfloat16().double() @ weight.double().T + (0 if b is None else b.double())
    exact = exact.bfloat16().double()
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = ((gate * gate.sigmoid()).bfloat16().double() * up).bfloat16().double()
    else:
        exact = (residual.double() + exact).bfloat16().double()

    def call(part):
        added = None if residual is None else residual[part]
        return linear(x[part], weight, b, norm=(w_norm, 1e-5), gated=gated, residual=added)

    ours = call(slice(None))
    # fp32 sums may fall on the other side of a rounding border, so a few numbers are one bf16 step off, and none more.
    assert (ours.double() == exact).float().mean() > 0.95
    assert ((ours.double() - exact).abs() <= exact.abs() * 2**-5 + 0.1).all()
    assert torch.equal(torch.cat([call(slice(i, i + 1)) for i in range(m)]), ours)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("n_rows", [1, 7])
@pytest.mark.parametrize("shared", [True, False])
def test_rotation_equals_the_reference_bit_for_bit(slots, n_rows, shared):
    """Of some heads of a wider projection: the stride of rows is the projection's, even if each slot has one row."""
    generator = torch.Generator().manual_seed(slots)
    wide = torch.randn(slots, n_rows, 6, 16, generator=generator).bfloat16()
    angle = torch.randn(1 if shared else slots, n_rows, 1, 1, 8, generator=generator)
    cos, sin = angle.cos().bfloat16(), torch.cat([-angle.sin(), angle.sin()], 3).bfloat16()
    assert torch.equal(rows.rotate_rows(wide[:, :, :4], cos, sin), reference_rotate(wide[:, :, :4], cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("slots", "n_rows"), [(1, 1), (3, 1), (3, 7)])
def test_norms_of_heads_and_a_cache_in_the_rotations_call(slots, n_rows, dtype):
    """The reference's results but for the order of a norm's sum, with the same bits in every pass and in the cache."""
    generator = torch.Generator().manual_seed(slots)
    qkv = torch.randn(slots, n_rows, 5 + 2 * 2, 64, generator=generator).to(dtype)
    angle = torch.randn(slots, n_rows, 1, 1, 32, generator=generator)
    cos, sin = angle.cos().to(dtype), torch.cat([-angle.sin(), angle.sin()], 3).to(dtype)
    norms = HeadNorms(*(1 + torch.randn(2, 64, generator=generator) / 2).to(dtype), 5, 1e-6)
    keys, values = torch.full((2, slots, 20, 2, 64), torch.nan, dtype=dtype)
    lengths = torch.tensor([4, 0, 9][:slots])
    with library.decoding():
        qk = rotate(qkv, cos, sin, norms, (keys, values, lengths))
        assert torch.equal(rotate(qkv[:, :, :7], cos, sin, norms), qk)
        assert torch.equal(rotate(qkv[-1:, -1:, :7], cos[-1:, -1:], sin[-1:, -1:], norms), qk[-1:, -1:])
    wanted = reference_rotate(qkv[:, :, :7], cos, sin, norms)
    torch.testing.assert_close(qk, wanted, rtol=0, atol=2 * torch.finfo(dtype).eps * float(wanted.abs().max()))
    for slot, length in enumerate(lengths.tolist()):
        assert torch.equal(keys[slot, length : length + n_rows], qk[slot, :, 5:])
        assert torch.equal(values[slot, length : length + n_rows], qkv[slot, :, 7:])
        others = [i for i in range(20) if not length <= i < length + n_rows]
        assert keys[slot, others].isnan().all() and values[slot, others].isnan().all(), "nothing else is written"


def test_linear_carries_nan_and_infinity():
    x, weight = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16()
    x[0, 3], weight[1, 2], weight[2, 2] = torch.nan, torch.inf, 3e38
    out = linear(x, weight)
    assert out[0].isnan().all() and out[1].tolist()[:2] == [8.0, torch.inf]


# Only products of bf16 pairs treat widths of 16 more than a multiple of 32 differently.
EITHER = torch.float32, torch.bfloat16
SHAPES = [(dtype, *shape) for dtype in EITHER for shape in ((9, 3, 64), (4, 4, 8), (8, 1, 120))]
SHAPES += [(torch.bfloat16, 6, 2, 80), (torch.bfloat16, 3, 1, 16)]


@pytest.mark.parametrize("length", [0, 1, 7, 127, 128, 300, 1000])
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "width"), SHAPES, ids=str)
def test_attention_is_as_close_as_the_dtype_can_be(plain, trees, dtype, length, heads, kv_heads, width):
    generator = torch.Generator().manual_seed(length + width)
    for n in (1, 2, 19):
        q = torch.randn(1, n, heads, width, generator=generator).to(dtype)
        keys, values = torch.randn(2, 1, length + n, kv_heads, width, generator=generator).to(dtype)
        k, v = cache_with(keys, values, length + n + 5 * (n < 19))
        lengths, mask = torch.tensor([length]), trees.random_tree(n, n)[None] | torch.eye(n, dtype=torch.bool)
        sees = torch.cat([torch.ones(1, n, length, dtype=torch.bool), mask], dim=2)
        exact = plain.attention(q.double(), keys.double(), values.double(), sees)
        usual = (plain.attention(q, keys, values, sees).double() - exact).abs().max()
        ours = (rows.attention_rows(q, k, v, lengths, mask).double() - exact).abs().max()
        assert ours <= 2 * usual + 1e-7


def alone(node, q, keys, values, length, mask, window):
    """One node's row alone, over a cache that holds its path as committed rows: other splits, other neighbours."""
    path = length + mask[0, node].nonzero().flatten()
    kept = torch.cat([torch.arange(length), path])
    k, v = cache_with(keys[:, kept], values[:, kept], len(kept) + 3)
    before = torch.tensor([len(kept) - 1])
    return rows.attention_rows(q[:, node : node + 1], k, v, before, None, window)[0, 0]


@pytest.mark.parametrize("window", [None, 1, 6, 120, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 3, 120, 126, 127, 128, 255, 700])
def test_a_tree_row_equals_plain_decodings_row_bit_for_bit(trees, dtype, length, window):
    generator = torch.Generator().manual_seed(length)
    n, heads, kv_heads, width = 12, 6, 2, 64
    q = torch.randn(1, n, heads, width, generator=generator).to(dtype)
    keys, values = torch.randn(2, 1, length + n, kv_heads, width, generator=generator).to(dtype)
    mask = trees.random_tree(n, length)[None] | torch.eye(n, dtype=torch.bool)
    k, v = cache_with(keys, values, length + n)
    together = rows.attention_rows(q, k, v, torch.tensor([length]), mask, window)
    for node in range(n):
        assert torch.equal(alone(node, q, keys, values, length, mask, window), together[0, node])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 8), (8, 1, 24), (5, 1, 120), (7, 1, 48)])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 17, 61, 128])
def test_a_row_does_not_depend_on_how_many_others_there_are(n, heads, kv_heads, width, window):
    """Blocks of every number of queries, a path longer than a split, and a chain's mask against no mask."""
    generator = torch.Generator().manual_seed(n)
    length = 100
    q = torch.randn(1, n, heads, width, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, length + n, kv_heads, width, generator=generator).bfloat16()
    k, v = cache_with(keys, values, length + n)
    chain = torch.ones(1, n, n, dtype=torch.bool).tril()
    together = rows.attention_rows(q, k, v, torch.tensor([length]), None, window)
    assert torch.equal(rows.attention_rows(q, k, v, torch.tensor([length]), chain, window), together)
    for node in {0, n // 2, n - 1}:
        assert torch.equal(alone(node, q, keys, values, length, chain, window), together[0, node])


def test_partial_results_kept_in_several_waves_change_nothing(trees):
    """128 rows at 9000 keys need more memory than one wave keeps of splits; one row does not."""
    generator = torch.Generator().manual_seed(0)
    n, length, width = 128, 9000, 8
    q = torch.randn(1, n, 8, width, generator=generator)
    keys, values = torch.randn(2, 1, length + n, 1, width, generator=generator)
    mask = trees.random_tree(n, 0)[None] | torch.eye(n, dtype=torch.bool)
    together = rows.attention_rows(q, keys, values, torch.tensor([length]), mask)
    for node in (0, 64, 127):
        assert torch.equal(alone(node, q, keys, values, length, mask, None), together[0, node])


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_slots_equal_single_ones(trees, dtype, width, tree):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 5, 4, width, generator=generator).to(dtype)
    keys, values = torch.randn(2, 3, 300, 2, width, generator=generator).to(dtype)
    lengths = torch.tensor([0, 290, 17])
    masks = torch.stack([trees.random_tree(5, seed) for seed in range(3)]) | torch.eye(5, dtype=torch.bool)
    mask = masks if tree else None
    together = rows.attention_rows(q, keys, values, lengths, mask)
    for b in range(3):
        part = slice(b, b + 1)
        single = rows.attention_rows(q[part], keys[part], values[part], lengths[part], mask[part] if tree else None)
        assert torch.equal(single, together[part])


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.bfloat16, 16)], ids=str)
def test_attention_carries_nan(dtype, width):
    q, k = torch.randn(1, 1, 2, width).to(dtype), torch.randn(1, 5, 2, width).to(dtype)
    bad = k.clone()
    bad[0, 2, 0, 3] = torch.nan
    out = rows.attention_rows(q, bad, k, torch.tensor([4]), None)
    assert out[0, 0, 0].isnan().all() and out[0, 0, 1].isfinite().all()


def test_extreme_scores_stay_finite():
    q, k = torch.full((1, 1, 1, 8), 50.0), torch.full((1, 40, 1, 8), 50.0)
    k[:, ::2] = -50.0
    v = torch.arange(40.0).repeat(8, 1).T[None, :, None].contiguous()
    out = rows.attention_rows(q, k, v, torch.tensor([39]), None)
    assert torch.allclose(out, torch.full_like(out, 20.0))
