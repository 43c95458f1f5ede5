"""kernels/selection.py against the formula, on rows with NaN between them."""

import pytest
import torch

from longdraft.kernels import selection

# layers, rows, query heads, key heads, width
SHAPES = [(1, 1, 1, 1, 8), (2, 130, 4, 2, 16), (3, 67, 6, 1, 80), (2, 70, 8, 4, 64), (1, 33, 2, 2, 256)]


def poisoned(layers, rows, n_kv, width, seed, dtype=torch.float32):
    """[L, S, K, d] as a part of a larger cache (slot 1 of 3, from row 2 on), with NaN in all the rest."""
    drawn = torch.randn(layers, rows, n_kv, width, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((layers, 3, rows + 5, n_kv, width + 1), float("nan"), dtype=dtype)
    inside = cache[:, 1, 2 : rows + 2, :, :width]
    inside.copy_(drawn)
    return inside


def queries(layers, heads, width, seed=9):
    return torch.randn(layers, heads, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(monkeypatch, shape, dtype):
    """In fp32, in which products of half precision are exact, with blocks of keys that do not divide the rows."""
    monkeypatch.setattr(selection, "BLOCK", 7)
    layers, rows, heads, n_kv, width = shape
    q, keys = queries(layers, heads, width).to(dtype), poisoned(layers, rows, n_kv, width, 1, dtype)
    scores = selection.key_scores(q, keys)
    assert scores.dtype == torch.float32 and scores.shape == (layers, n_kv, rows)
    keys_LSHd = keys.double().repeat_interleave(heads // n_kv, 2)
    exact = torch.einsum("lhd,lshd->lhs", q.double(), keys_LSHd).unflatten(1, (n_kv, -1)).sum(2).float()
    torch.testing.assert_close(scores, exact, rtol=2e-6, atol=1e-5 if dtype != torch.float32 else 2e-5)


@pytest.mark.parametrize("count", [1, 17, 130])
def test_the_best_keys_are_the_best_scores_in_order(count):
    q, keys = queries(2, 4, 16), poisoned(2, 130, 2, 16, 5)
    best = selection.top_keys(q, keys, count)
    scores = selection.key_scores(q, keys)
    assert best.shape == (2, 2, count) and best.dtype == torch.int64
    assert torch.equal(best, scores.sort(dim=2, descending=True).indices[..., :count])


@pytest.mark.parametrize(("chunks", "chunk"), [(1, 1), (1, 8), (5, 3), (90, 4), (3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_of_chunks(chunks, chunk, dtype):
    keys = poisoned(2, chunks * chunk, 3, 24, 7, dtype)
    # The output is part of a larger tensor, the rest of which must not change.
    whole = torch.full((2, 2, chunks + 4, 3, 24), 5.0, dtype=dtype)
    out = whole[:, 1, 3 : chunks + 3]
    selection.chunk_means(keys, chunk, out)
    loop = torch.stack([part.double().mean(1) for part in keys.split(chunk, dim=1)], 1)
    steps = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # half a unit in the last place, and a little
    torch.testing.assert_close(out.double(), loop, rtol=steps, atol=1e-6)
    assert int((whole != 5.0).sum()) == out.numel()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_each_heads_own(shape, dtype):
    layers, rows, _, n_kv, width = shape
    keys = poisoned(layers, rows, n_kv, width, 1, dtype)
    values = poisoned(layers, n_kv, rows, width, 2, dtype).transpose(1, 2)  # heads before rows
    picked = 2 * rows + 3
    index = torch.randint(rows, (layers, picked, n_kv), generator=torch.Generator().manual_seed(3))
    index[:, 0], index[:, 1] = rows - 1, 0
    made = torch.full((2, layers, 2, picked + 1, n_kv, width), 5.0, dtype=dtype)
    out = [part[:, 1, :picked] for part in made]
    there = index.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    selection.gather_rows(keys, values, there, *out)
    layers_L11, heads_K = torch.arange(layers)[:, None, None], torch.arange(n_kv)
    for source, found in zip((keys, values), out, strict=True):
        assert torch.equal(found, source[layers_L11, index, heads_K])
    assert (made[:, :, 0] == 5.0).all() and (made[:, :, 1, picked] == 5.0).all()
