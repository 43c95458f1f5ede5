"""kernels/selection.py: every implementation against the formula, on rows with NaN between them."""

from importlib import import_module

import pytest
import torch

from longdraft.kernels import backend, selection
from longdraft.kernels.selection import key_scores_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# layers, rows, query heads, key heads, width
SHAPES = [(1, 1, 1, 1, 8), (2, 130, 4, 2, 16), (3, 67, 6, 1, 80), (2, 70, 8, 4, 64), (1, 33, 2, 2, 256)]


@pytest.fixture(params=["layer by layer", "triton"])
def implementation(request, monkeypatch):
    """Selects the implementation; returns the device where it runs."""
    if request.param == "triton":
        found = import_module("longdraft.kernels.triton.selection")
        monkeypatch.setattr(backend, "triton_kernels", lambda name, device_type: found)
        return DEVICE
    return "cpu"


def poisoned(layers, rows, n_kv, width, seed, device="cpu", dtype=torch.float32):
    """[L, S, K, d] as a part of a larger cache (slot 1 of 3, from row 2 on), with NaN in all the rest."""
    drawn = torch.randn(layers, rows, n_kv, width, generator=torch.Generator().manual_seed(seed))
    cache = torch.full((layers, 3, rows + 5, n_kv, width + 1), float("nan"), dtype=dtype, device=device)
    inside = cache[:, 1, 2 : rows + 2, :, :width]
    inside.copy_(drawn)
    return inside


def queries(layers, heads, width, seed=9):
    return torch.randn(layers, heads, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores(implementation, monkeypatch, shape):
    """In fp32, with blocks of keys that do not divide the rows."""
    monkeypatch.setattr(selection, "BLOCK", 7)
    layers, rows, heads, n_kv, width = shape
    q, keys = queries(layers, heads, width), poisoned(layers, rows, n_kv, width, 1, implementation)
    scores = selection.key_scores(q.to(implementation), keys)
    assert scores.dtype == torch.float32 and scores.shape == (layers, n_kv, rows)
    keys_LSHd = keys.cpu().double().repeat_interleave(heads // n_kv, 2)
    exact = torch.einsum("lhd,lshd->lhs", q.double(), keys_LSHd).unflatten(1, (n_kv, -1)).sum(2).float()
    torch.testing.assert_close(scores.cpu(), exact, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_keys_in_half_precision_are_in_fp32(implementation, dtype):
    """Products of these numbers are exact in fp32, so only the order of sums can differ."""
    q, keys = queries(2, 4, 16).to(dtype), poisoned(2, 70, 2, 16, 1, implementation, dtype)
    scores = selection.key_scores(q.to(implementation), keys)
    want = torch.zeros(2, 2, 70)
    for layer, keys_SKd in enumerate(keys.cpu().float()):
        for head in range(4):
            want[layer, head // 2] += keys_SKd[:, head // 2] @ q[layer, head].float()
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.cpu(), want, rtol=2e-6, atol=1e-5)


def test_a_pass_over_the_keys_of_a_group_reads_each_once_for_all_heads(implementation):
    """Scores are linear in the queries: if all queries of a group but one are 0, its scores are that query's."""
    keys = poisoned(2, 40, 2, 16, 3, implementation)
    q = queries(2, 6, 16)
    alone = torch.zeros_like(q)
    alone[:, 4] = q[:, 4]
    scores = selection.key_scores(alone.to(implementation), keys).cpu()
    assert not scores[:, 0].any()
    torch.testing.assert_close(scores[:, 1], torch.einsum("ld,lsd->ls", q[:, 4], keys[:, :, 1].cpu()))


@pytest.mark.parametrize("count", [1, 17, 130])
def test_the_best_keys_are_the_best_scores_in_order(implementation, count):
    q, keys = queries(2, 4, 16), poisoned(2, 130, 2, 16, 5, implementation)
    best = selection.top_keys(q.to(implementation), keys, count).cpu()
    scores = key_scores_reference(q, keys.cpu())
    assert best.shape == (2, 2, count) and best.dtype == torch.int64
    assert torch.equal(best, scores.sort(dim=2, descending=True).indices[..., :count])


@pytest.mark.parametrize(("chunks", "chunk"), [(1, 1), (1, 8), (5, 3), (90, 4), (3, 64)])
# Triton's interpreter truncates when it stores bf16; tests/gpu tests bf16 on a GPU.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_means_of_chunks(implementation, chunks, chunk, dtype):
    keys = poisoned(2, chunks * chunk, 3, 24, 7, implementation, dtype)
    # The output is part of a larger tensor, the rest of which must not change.
    whole = torch.full((2, 2, chunks + 4, 3, 24), 5.0, dtype=dtype, device=implementation)
    out = whole[:, 1, 3 : chunks + 3]
    selection.chunk_means(keys, chunk, out)
    loop = torch.stack([part.double().mean(1) for part in keys.cpu().split(chunk, dim=1)], 1)
    steps = {torch.float32: 1e-6, torch.float16: 2**-10}[dtype]  # half a unit in the last place, and a little
    torch.testing.assert_close(out.cpu().double(), loop, rtol=steps, atol=1e-6)
    assert int((whole != 5.0).sum()) == out.numel()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_are_each_heads_own(implementation, shape, dtype):
    layers, rows, _, n_kv, width = shape
    keys = poisoned(layers, rows, n_kv, width, 1, implementation, dtype)
    values = poisoned(layers, n_kv, rows, width, 2, implementation, dtype).transpose(1, 2)  # heads before rows
    picked = 2 * rows + 3
    index = torch.randint(rows, (layers, picked, n_kv), generator=torch.Generator().manual_seed(3))
    index[:, 0], index[:, 1] = rows - 1, 0
    made = torch.full((2, layers, 2, picked + 1, n_kv, width), 5.0, dtype=dtype, device=implementation)
    out = [part[:, 1, :picked] for part in made]
    there = index.permute(2, 0, 1).contiguous().permute(1, 2, 0).to(implementation)
    selection.gather_rows(keys, values, there, *out)
    layers_L11, heads_K = torch.arange(layers)[:, None, None], torch.arange(n_kv)
    for source, found in zip((keys, values), out, strict=True):
        assert torch.equal(found.cpu(), source.cpu()[layers_L11, index, heads_K])
    assert (made[:, :, 0] == 5.0).all() and (made[:, :, 1, picked] == 5.0).all()


def test_an_index_that_all_layers_and_heads_share_takes_no_memory_of_its_own(implementation):
    keys, values = (poisoned(2, 20, 3, 8, seed, implementation) for seed in (1, 2))
    shared = torch.tensor([3, 19, 0, 3], device=implementation)[None, :, None].expand(2, -1, 3)
    out = [torch.empty(2, 4, 3, 8, device=implementation) for _ in range(2)]
    selection.gather_rows(keys, values, shared, *out)
    assert torch.equal(out[0], keys[:, [3, 19, 0, 3]]) and torch.equal(out[1], values[:, [3, 19, 0, 3]])
