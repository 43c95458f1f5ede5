"""kernels/rotate.py, in Triton's interpreter or on a GPU, against the reference, and that against RoPE by hand."""

from importlib import import_module

import pytest
import torch
from torch.utils._pytree import tree_map_only

from longdraft.kernels import backend
from longdraft.kernels import rotate as rotate_module
from longdraft.kernels.rotate import HeadNorms, rotate, rotate_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter truncates to bf16, where a GPU rounds.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
NAN = float("nan")
# query heads, key heads, width: several blocks of heads, a width that is not a power of two, one head alone
HEADS = [(9, 3, 64), (4, 2, 20), (1, 1, 2), (8, 1, 128)]
# lengths, rows, whether slots share their tables
PASSES = [([0], 1, False), ([5], 6, True), ([7, 0, 3], 4 if DEVICE == "cpu" else 300, False)]
# Half of all combinations: any three values meet.
COMBINED = [
    (heads, *shape, dtype, (i + j + k) % 2 == 1)
    for i, heads in enumerate(HEADS)
    for j, shape in enumerate(PASSES)
    for k, dtype in enumerate(DTYPES)
]


@pytest.fixture
def triton(monkeypatch) -> list[str]:
    """Makes rotations use Triton's kernels; returns a list that grows with the calls."""
    found, calls = import_module("longdraft.kernels.triton.rotate"), []

    def kernels(name, device_type):
        calls.append(name)
        return found

    monkeypatch.setattr(backend, "triton_kernels", kernels)
    return calls


def drawn(heads, lengths, n_rows, dtype, shared=False):
    """(qkv with NaN around it, cosines, sines, norms) on the device. `shared`: one slot's tables serve all slots."""
    n_heads, n_kv, width = heads
    generator = torch.Generator().manual_seed(width + n_rows)
    wide = torch.full((len(lengths), n_rows, n_heads + 2 * n_kv + 2, width), NAN)
    wide[:, :, 1:-1] = torch.randn(*wide[:, :, 1:-1].shape, generator=generator)
    angles = 3 * torch.randn(1 if shared else len(lengths), n_rows, width // 2, generator=generator)
    cos, sin = angles.cos()[:, :, None, None], torch.stack((-angles.sin(), angles.sin()), 2)[:, :, None]
    weights = 1 + torch.randn(2, width, generator=generator) / 2
    given = [x.to(DEVICE, dtype) for x in (wide, cos, sin, weights)]
    return given[0][:, :, 1:-1], given[1], given[2], HeadNorms(*given[3], n_heads, 1e-5)


def caches(heads, lengths, n_rows, dtype):
    """Keys and values of different strides, full of NaN."""
    shape = len(lengths), max(lengths) + n_rows + 2, heads[1], heads[2]
    keys = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    values = torch.full((shape[1], shape[0], shape[2], shape[3] + 3), NAN, dtype=dtype, device=DEVICE)
    return keys, values.transpose(0, 1)[..., 1:-2]


def exact(*given):
    """The reference. fp32 arguments become fp64, as PyTorch's error in a norm's sum differs by processor. Half
    precision stays, since rounding is far coarser than that error."""
    widened = tree_map_only(torch.Tensor, lambda x: x.double() if x.dtype == torch.float32 else x, given)
    return rotate_reference(*widened)


def close(found, wanted):
    """Equal but for the order of a norm's sum and whether a product and a sum are rounded once or twice: two units of
    the largest number are allowed, one for its norm and one for its rotation."""
    wanted = wanted.to(found.dtype)
    allowed = 2 * torch.finfo(found.dtype).eps * float(wanted.nan_to_num().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=allowed, equal_nan=True)


@pytest.mark.parametrize(("heads", "lengths", "n_rows", "shared", "dtype", "with_norms"), COMBINED, ids=str)
def test_rotation_and_rows_are_the_references(triton, heads, lengths, n_rows, shared, dtype, with_norms):
    qkv, cos, sin, norms = drawn(heads, lengths, n_rows, dtype, shared)
    norms = norms if with_norms else None
    lengths_B = torch.tensor(lengths, device=DEVICE)
    found, wanted = (caches(heads, lengths, n_rows, dtype) for _ in range(2))
    qk = rotate(qkv, cos, sin, norms, (*found, lengths_B))
    assert triton == ["rotate"] and lengths_B.tolist() == lengths
    wanted = [cache.double() if dtype == torch.float32 else cache for cache in wanted]
    want = exact(qkv, cos, sin, norms, (*wanted, lengths_B))
    close(qk, want)
    for ours, theirs in zip(found, wanted, strict=True):  # NaN where nothing was written
        close(ours, theirs)
    # A pass without a cache gives the same bits, and so does a row alone.
    assert torch.equal(rotate(qkv[:, :, : -heads[1]], cos, sin, norms), qk)
    alone = rotate(qkv[:, -1:, : -heads[1]], cos[:, -1:], sin[:, -1:], norms)
    assert torch.equal(alone, qk[:, -1:])


def test_reference_is_rope_written_out():
    qkv, cos, sin, norms = drawn((4, 2, 20), [2, 0], 3, torch.float32)
    keys, values = caches((4, 2, 20), [2, 0], 3, torch.float32)
    qk = rotate_reference(qkv, cos, sin, norms, (keys, values, torch.tensor([2, 0], device=DEVICE)))
    for slot, row, head in ((0, 0, 0), (1, 2, 3), (0, 1, 4), (1, 0, 5)):
        x, weight = qkv[slot, row, head].double(), norms.q_d if head < 4 else norms.k_d
        x = x / (x.square().mean() + norms.eps).sqrt() * weight
        c, s = cos[slot, row, 0, 0], sin[slot, row, 0, 1]
        want = torch.cat([x[:10] * c - x[10:] * s, x[10:] * c + x[:10] * s])
        torch.testing.assert_close(qk[slot, row, head].double(), want, rtol=1e-5, atol=1e-5)
    for slot, length in enumerate((2, 0)):
        assert torch.equal(keys[slot, length : length + 3], qk[slot, :, 4:])
        assert torch.equal(values[slot, length : length + 3], qkv[slot, :, 6:])
        assert keys[slot, :length].isnan().all() and values[slot, length + 3 :].isnan().all()


def test_gradients_go_another_way(triton):
    """With a gradient PyTorch's operations run, as they do if tables have another dtype than the heads."""
    qkv, cos, sin, _ = drawn((4, 2, 20), [1], 3, torch.float32)
    leaf = qkv.clone().requires_grad_()
    rotate(leaf, cos, sin).sum().backward()
    assert leaf.grad is not None and triton == []
    with torch.no_grad():
        assert rotate_module.triton_for(leaf, cos) is not None
        assert rotate_module.triton_for(leaf, cos.double()) is None


def one_table(n_slots, width=64):
    """(heads of 5 rows per slot, cosines and sines of one row per slot), as a cache's sinks are rotated."""
    qkv, _, _, _ = drawn((3, 1, width), [0] * n_slots, 5, torch.float32)
    _, cos, sin, _ = drawn((3, 1, width), [0] * n_slots, 1, torch.float32)
    return qkv[:, :, :4], cos, sin


@pytest.mark.parametrize("n_slots", [1, 2])
def test_one_table_for_all_rows_of_a_slot(triton, n_slots):
    x, cos, sin = one_table(n_slots)
    close(rotate(x, cos, sin), exact(x, cos, sin))
    assert triton == ["rotate"]


def test_rows_beyond_the_capacity_are_dropped(triton):
    """They must not be written into the next slot, which follows in memory."""
    heads, lengths, n_rows = (4, 2, 20), [9, 3], 4
    qkv, cos, sin, norms = drawn(heads, lengths, n_rows, torch.float32)
    lengths = torch.tensor(lengths, device=DEVICE)
    wide, narrow = torch.full((2, 2, 2, 16, 2, 20), NAN, device=DEVICE)
    cut = narrow.flatten(1, 2)[:, :22].unflatten(1, (2, 11))  # 11 rows per slot, one slot after the other
    for keys, values in (wide, cut):
        rotate(qkv, cos, sin, norms, (keys, values, lengths))
    torch.testing.assert_close(cut, wide[:, :, :11], rtol=0, atol=0, equal_nan=True)
    assert not wide[:, 0, 11:13].isnan().any() and narrow.flatten(1, 2)[:, 22:].isnan().all()
