"""Kernels on a GPU: the noise and the choice against the CPU's, all others against their references.

Memory that must not be read holds NaN. In fp32 (without TF32) the error has a fixed bound. In bf16 it is at most twice
(gradients: three times) that of tests/plain.py with the same numbers.
"""

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from longdraft.kernels import backend
from longdraft.kernels.choice import choose, gumbel_noise, top_p_border
from longdraft.kernels.delta_chunks import chain
from longdraft.kernels.delta_layer import DeltaWeights, delta_tokens, gated_norm
from longdraft.kernels.gate import gate, gate_reference
from longdraft.kernels.gated_delta import DeltaTokens, advance
from longdraft.kernels.gated_delta import tree as delta_tree
from longdraft.kernels.linear import linear
from longdraft.kernels.linear_loss import GPU_CHUNK_BYTES, linear_loss
from longdraft.kernels.rank_sum import rank_sum
from longdraft.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from longdraft.kernels.rotate import rotate
from longdraft.kernels.segment_attention import Segment, read_keys, segment_attention
from longdraft.kernels.segment_attention import segment_attention_reference as segment_reference
from longdraft.kernels.selection import chunk_means, gather_rows, key_scores, top_keys
from longdraft.kernels.tree import PassPlan, accepted_path, attended_rows, keep_rows
from longdraft.kernels.tree_attention import cross_attention, tree_attention, tune
from longdraft.kernels.tree_attention import cross_attention_reference as cross_reference
from longdraft.kernels.tree_attention import tree_attention_reference as tree_reference

if "LONGDRAFT_TEST_DEVICE" not in os.environ and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device; LONGDRAFT_TEST_DEVICE=cpu runs the same on the CPU", allow_module_level=True)

# PyTorch's fp32 attention may split a product into several for the tensor cores.
FP32 = 2e-5
HEADS = [(4, 4, 16), (6, 2, 64), (8, 1, 128)]
LENGTHS = ([0], [1], [0, 7, 100], [1030, 3])
# Whole blocks of committed keys, one key less and one more.
BORDERS = ([0, 15, 16, 17], [63, 64, 65], [1023, 1024, 1025])


def place(x: Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A copy on the device, as a slice of rows twice as wide, with NaN in the rest."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), device=device, dtype=dtype)
    wide[..., : x.shape[-1]] = x.to(device, dtype)
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("vocab", [3, 256, 1003, 128_256])
def test_noise_is_the_cpus_up_to_the_logarithms(device, vocab):
    """The words are equal bit for bit. Two logarithms follow, each of which may differ in its last bits."""
    seeds = torch.tensor([0, -1, 2**63 - 1, 77])
    positions = torch.tensor([[0, 1], [2**31, 2**32 - 1], [5, 6], [131_072, 9]])
    here = gumbel_noise(seeds, positions, vocab)
    there = gumbel_noise(seeds.to(device), positions.to(device), vocab)
    assert there.device.type == device.type and there.dtype == torch.float32
    torch.testing.assert_close(there.cpu(), here, rtol=5e-7, atol=1e-6)


def check_attention(plain, out: Tensor, want: Tensor, low: tuple[Tensor, ...], opened: list[Tensor]) -> None:
    """Hold attention's output for `low` (q, keys, values) to the bounds above. opened: bool [1, N, S] of each slot."""
    assert out.dtype == low[0].dtype
    out = out.float().cpu()
    if low[0].dtype == torch.float32:
        torch.testing.assert_close(out, want, rtol=0, atol=FP32)
        return
    for slot, mask in enumerate(opened):
        own, stop = slice(slot, slot + 1), mask.shape[2]
        if stop == 0:
            assert torch.equal(out[own], want[own])
            continue
        usual = plain.attention(low[0][own], low[1][own, :stop], low[2][own, :stop], mask.to(low[0].device))
        allowed = 2 * (usual.float().cpu() - want[own]).abs().max()
        assert (out[own] - want[own]).abs().max() <= allowed, slot


@pytest.mark.parametrize(("tree", "window"), [(False, None), (True, None), (False, 5), (True, 300)])
@pytest.mark.parametrize("n_rows", [1, 13, 64, 128])
@pytest.mark.parametrize("lengths", [*LENGTHS, *BORDERS], ids=str)
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 64), (8, 1, 128), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tree_attention(device, trees, plain, dtype, heads, lengths, n_rows, tree, window):
    n_heads, n_kv_heads, width = heads
    keys, values = trees.poisoned(lengths, n_rows, max(lengths) + n_rows + 5, n_kv_heads, width)
    q, lengths_B = trees.draw(len(lengths), n_rows, n_heads, width, seed=7), torch.tensor(lengths)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(len(lengths))]) if tree else None
    if masks is not None and dtype != torch.float32:
        masks[:, -1, -1] = True  # plain attention has NaN for padding
    q, keys, values = (x.to(dtype).float() for x in (q, keys, values))
    want = tree_reference(q, keys, values, lengths_B, masks, window)[0]
    there = None if masks is None else masks.to(device)
    low = q.to(device, dtype), keys.to(device, dtype), place(values, device, dtype)
    out = tree_attention(*low, lengths_B.to(device), there, window)
    if masks is not None and window is not None:
        # Padding has no place in a history, so its output under a window is undefined, but finite.
        assert bool(out.isfinite().all())
        padding = ~masks.any(-1)[:, :, None, None]
        out, want = out.masked_fill(padding.to(device), 0.0), want.masked_fill(padding, 0.0)
    opened = []
    for slot, length in enumerate(lengths):
        tree_1NN = None if masks is None else masks[slot : slot + 1]
        opened.append(attended_rows(lengths_B[slot : slot + 1], n_rows, length + n_rows, tree_1NN, window))
    check_attention(plain, out, want, low, opened)


@pytest.mark.skipif("LONGDRAFT_TESTS_UNTIL" in os.environ, reason="compiles for a minute, longer than a sample has")
def test_tuned_tree_attention(device, trees, plain, monkeypatch, tmp_path):
    """Measuring writes one file and is done once in a process. What it chooses is right, and so is every variant."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes, capacity, widths, lines = (8, 2, 128), 8210, (1, 13, 100), []
    for _ in range(2):
        tune(*sizes, [None], torch.bfloat16, device, capacity, 1, widths, lines.append)
    kernels: Any = backend.triton_kernels("tree_attention", device.type)
    on_gpu = kernels is not None
    assert len(lines) == 2 * on_gpu and len(list(tmp_path.rglob("tree_attention-*.json"))) == on_gpu
    memory = kernels._device(device)[1] if on_gpu else 0
    for n_rows in widths:
        length = capacity - 2 * n_rows
        keys, values = trees.poisoned([length], n_rows, capacity, 2, 128)
        mask = trees.random_tree(n_rows, 3)[None]
        mask[:, -1, -1] = True
        q = trees.draw(1, n_rows, 8, 128, seed=7).bfloat16().float()
        keys, values = keys.bfloat16().float(), values.bfloat16().float()
        want = tree_reference(q, keys, values, torch.tensor([length]), mask)[0]
        low = [x.to(device, torch.bfloat16) for x in (q, keys, values)]
        lengths, there = torch.tensor([length], device=device), mask.to(device)
        opened = [attended_rows(torch.tensor([length]), n_rows, length + n_rows, mask, None)]
        check_attention(plain, tree_attention(*low, lengths, there), want, tuple(low), opened)
        if not on_gpu:
            continue
        shape = kernels.tuning.shape_of(torch.bfloat16, 1, n_rows, *sizes, capacity, None)
        plan = PassPlan(lengths, n_rows, there)
        for choice in kernels.tuning.variants(shape, memory):
            out = kernels.tree_attention(*low, lengths, plan.bits_BT2, plan.depth_BT, choice=choice)[0]
            check_attention(plain, out, want, tuple(low), opened)


@pytest.mark.parametrize("n_rows", [1, 16, 63])
@pytest.mark.parametrize("lengths", [*LENGTHS, [1030, 3, 0]], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_cross_attention(device, trees, plain, dtype, heads, lengths, n_rows):
    n_heads, n_kv_heads, width = heads
    keys, values = trees.poisoned(lengths, 0, max(lengths) + 9, n_kv_heads, width)
    q, lengths_B = trees.draw(len(lengths), n_rows, n_heads, width, seed=7), torch.tensor(lengths)
    q, keys, values = (x.to(dtype).float() for x in (q, keys, values))
    want = cross_reference(q, keys, values, lengths_B)[0]
    low = q.to(device, dtype), keys.to(device, dtype), place(values, device, dtype)
    opened = [torch.ones(1, n_rows, length, dtype=torch.bool) for length in lengths]
    check_attention(plain, cross_attention(*low, lengths_B.to(device)), want, low, opened)


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
    """The output and the gradients of q and, unless they are frozen, k and v, in fp32."""
    leaves = [x.detach().requires_grad_(i == 0 or not frozen_keys) for i, x in enumerate(given)]
    out = attention(leaves[0], leaves[1], leaves[2][..., : leaves[1].shape[2]])
    (out.float() * weights).sum().backward()
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("name", SEGMENTS)
@pytest.mark.parametrize("heads", [*HEADS, (4, 1, 80), (2, 2, 256)], ids=str)
@pytest.mark.parametrize("way", [
    "one kernel in bf16", "one kernel in bf16, frozen keys", "one kernel in fp16", "one by one in bf16",
    "one by one in fp32",
])  # fmt: skip
def test_segment_attention(device, trees, plain, monkeypatch, way, heads, name, window):
    if "one by one" in way:
        monkeypatch.setattr(backend, "varlen_attention", lambda: None)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[way.split(" in ")[1][:4]]
    segments, (n_heads, n_kv_heads, width) = [Segment(*segment) for segment in SEGMENTS[name]], heads
    shapes = (n_heads, width), (n_kv_heads, width), (n_kv_heads, 2 * width)
    given = [trees.draw(N, *shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    weights = trees.draw(N, n_heads, width, seed=3).to(device)
    mask = read_keys(N, N, segments, window).to(device)
    # Gradients of keys that many segments read would be sums in bf16. Only the target's are such, and need no gradient.
    options = weights, name == "shared by many" or "frozen" in way
    wide = [x.float() for x in given]
    exact = with_gradients(lambda *rows: segment_reference(*rows, segments, window)[0], wide, *options)
    found = with_gradients(lambda *rows: segment_attention(*rows, segments, window), given, *options)
    rows = given[0], given[1], given[2][..., :width]
    dq, dk, dv = plain.attention_gradients(*rows, mask, weights.to(dtype))
    gradients = dq, dk, pad(dv, (0, width))  # of rows twice as wide
    usual = plain.attention(*rows, mask).float(), *(x.float() for x in gradients[: len(found) - 1])
    for part, (ours, theirs, truth) in enumerate(zip(found, usual, exact, strict=True)):
        if part > 1 and device.type == "cpu" and dtype != torch.float32:
            continue  # not our arithmetic: PyTorch's backward on a CPU sums dk and dv in half precision, block by block
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


@pytest.mark.parametrize("n_rows", [1, 13, 64])
def test_linear_attention_is_the_cpus_and_a_node_has_the_bits_of_its_path(device, trees, n_rows):
    """What a tree's nodes read, and the memory after some rows, as recorded work computes them."""
    heads, keys, values = 4, 128, 96
    q, k = (normalize(trees.draw(2, n_rows, heads, keys, seed=seed), dim=-1) for seed in (1, 2))
    rest = trees.draw(2, n_rows, heads, 2, seed=3).sigmoid()
    tokens = DeltaTokens(q, k, trees.draw(2, n_rows, heads, values, seed=4), -4 * rest[..., 0], rest[..., 1])
    memory, mask = (
        trees.draw(2, heads, keys, values, seed=5),
        torch.stack([trees.random_tree(n_rows, seed=seed) for seed in (6, 7)]),
    )
    there, memory_there = DeltaTokens(*(x.to(device) for x in tokens)), memory.to(device)
    lengths, counts = torch.zeros(2, dtype=torch.int64), torch.tensor([n_rows, n_rows // 2])
    read = delta_tree(there, memory_there, PassPlan(lengths.to(device), n_rows, mask.to(device)))
    pairs = [(read, delta_tree(tokens, memory, PassPlan(lengths, n_rows, mask)))]
    pairs += [(advance(there, memory_there, counts.to(device)), advance(tokens, memory, counts))]
    for found, wanted in pairs:
        assert (found.cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    one, plan = torch.ones(1, dtype=torch.int64, device=device), PassPlan(lengths[:1].to(device), 1)
    for node in {0, n_rows // 2, max(0, n_rows - 2)}:  # the last one is padding
        state = memory_there[1:]
        for ancestor in mask[1, node].nonzero()[:, 0].tolist():
            row = there.at((slice(1, 2), slice(ancestor, ancestor + 1)))
            alone, state = delta_tree(row, state, plan), advance(row, state, one)
        assert torch.equal(alone[0, 0], read[1, node]), node


@pytest.mark.parametrize("sizes", [None, (150, 3, 47, 100)], ids=["one text", "pieces"])
@pytest.mark.parametrize("strongest", [0.1, 40])
def test_texts_of_linear_attention_are_the_cpus(device, trees, sizes, strongest):
    n_tokens, heads, keys, values = 300, 4, 128, 96
    q, k = (normalize(trees.draw(2, n_tokens, heads, keys, seed=seed), dim=-1) for seed in (1, 2))
    rest = trees.draw(2, n_tokens, heads, 2, seed=3).sigmoid()
    v, memory = trees.draw(2, n_tokens, heads, values, seed=4), trees.draw(2, heads, keys, values, seed=5)
    tokens, pieces = DeltaTokens(q, k, v, -strongest * rest[..., 0] ** 4, rest[..., 1]), None
    if sizes is not None:
        pieces = torch.arange(len(sizes)).repeat_interleave(torch.tensor([1 + sizes[0], *sizes[1:]]))
    there = (
        DeltaTokens(*(x.to(device) for x in tokens)),
        memory.to(device),
        None if pieces is None else pieces.to(device),
    )
    for found, wanted in zip(chain(*there), chain(tokens, memory, pieces), strict=True):
        assert (found.cpu() - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_rows", [1, 13, 64])
def test_what_is_around_linear_attention_is_the_cpus(device, trees, n_rows, dtype):
    """Convolution, norms and gates of a chain's and of a tree's nodes."""
    key_heads, heads, keys, values, taps = 2, 4, 128, 96, 4
    channels = 2 * key_heads * keys + heads * values
    projected = trees.draw(2, n_rows, channels + heads * values + 2 * heads, seed=1).to(dtype)
    before, conv = trees.draw(2, taps - 1, channels, seed=2).to(dtype), trees.draw(channels, taps, seed=3).to(dtype)
    rates = [trees.draw(heads, seed=seed).to(dtype) for seed in (4, 5)]
    read, weight = trees.draw(2, n_rows, heads, values, seed=6), trees.draw(values, seed=7).to(dtype)
    mask = torch.stack([trees.random_tree(n_rows, seed=seed) for seed in (8, 9)])

    def both(recent, to):
        weights = DeltaWeights(*(x.to(to) for x in (conv, *rates)), key_heads, keys)
        given = projected.to(to)
        gate = given[..., channels : -2 * heads]
        tokens = delta_tokens(given, before.to(to), None if recent is None else recent.to(to), weights)
        return *tokens, gated_norm(read.to(to), gate, weight.to(to), 1e-6)

    for recent in (None, PassPlan(torch.zeros(2, dtype=torch.int64), n_rows, mask).recent_rows(taps)):
        for found, wanted in zip(both(recent, device), both(recent, "cpu"), strict=True):
            assert found.dtype == wanted.dtype
            few_roundings(found.to(dtype), wanted.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_sum_over_ranks_is_in_their_order(device, trees, dtype):
    parts = trees.draw(8, 2, 33, 700, seed=1).to(dtype)
    assert torch.equal(rank_sum(parts.to(device)).cpu(), rank_sum(parts))


def few_roundings(found: Tensor, wanted: Tensor) -> None:
    """Equal up to four roundings of the largest number."""
    allowed = 4 * torch.finfo(found.dtype).eps * float(wanted.nan_to_num().float().abs().max())
    torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=0, atol=allowed, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [16, 576, 4096])
def test_what_a_layer_does_between_products(device, trees, width, dtype):
    """Norms, addition and gate: values, gradients, and the same bits for a row alone and without an addition."""
    x, added, weight = (trees.draw(*shape, width, seed=i).to(dtype) for i, shape in enumerate([(2, 33), (2, 33), ()]))
    wide = trees.draw(2, 33, 2 * width, seed=4).to(dtype)
    there = [part.to(device) for part in (x, added, weight, wide)]
    with torch.no_grad():
        normed, total = add_rms_norm(*there[:3], 1e-5)
        wanted = add_rms_norm_reference(x, added, weight, 1e-5)
        assert torch.equal(total.cpu(), wanted[1])
        few_roundings(normed, wanted[0])
        few_roundings(gate(there[3]), gate_reference(wide))
        if device.type == "cuda":
            assert torch.equal(rms_norm(total, there[2], 1e-5), normed)
            alone = add_rms_norm(there[0][1:, 5:6], there[1][1:, 5:6], there[2], 1e-5)
            assert torch.equal(alone[0], normed[1:, 5:6])
            assert torch.equal(gate(there[3])[1:, 5:6], gate(there[3][1:, 5:6]))
    exact, found = [], []
    for parts, of in (([part.float().to(device) for part in there], exact), (there, found)):
        leaves = [part.clone().requires_grad_() for part in parts]
        normed, total = add_rms_norm(*leaves[:3], 1e-5)
        (normed.float().square().sum() + total.float().sum() + gate(leaves[3]).float().square().sum()).backward()
        of += [leaf.grad.float() for leaf in leaves]
    for ours, truth in zip(found, exact, strict=True):
        assert (ours - truth).norm() <= 8 * torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_loss(device, shared, plain, monkeypatch, implementation, dtype):
    """Each head against the full formula."""
    if implementation == "torch":
        monkeypatch.setattr(backend, "triton_kernels", lambda name, device_type: None)
    elif backend.triton_kernels("linear_loss", device.type) is None:
        pytest.skip("needs a CUDA device and triton (install longdraft[gpu])")
    builders = shared("kernels/test_linear_loss.py")
    drawn, weight, labels = builders.examples([256, 0, 1100], 64, 9001, dtype)
    labels[0][1::3] = (drawn[0] @ weight.T).argmax(1)[1::3]
    hiddens = [hidden.detach().to(device).requires_grad_() for hidden in drawn]
    weight, labels = weight.to(device), [part.to(device) for part in labels]
    out = linear_loss(hiddens, weight, builders.parts_of(labels), top_k=3)
    (out.sums * torch.tensor(builders.SCALES, device=device)).sum().backward()
    for i, (hidden, part) in enumerate(zip(hiddens, labels, strict=True)):
        exact_loss, exact_grad = plain.cross_entropy(hidden.double(), weight.double(), part, builders.SCALES[i])
        usual_loss, usual_grad = plain.cross_entropy(hidden, weight, part, builders.SCALES[i])
        assert hidden.grad is not None and hidden.grad.dtype == dtype
        assert (out.sums[i] - exact_loss).abs() <= 2 * (usual_loss - exact_loss).abs() + 1e-5 * exact_loss
        allowed = 3 * (usual_grad - exact_grad).norm() + 1e-5 * exact_grad.norm()
        assert (hidden.grad - exact_grad).norm() <= allowed
        assert out.n_labels[i] == (part >= 0).sum()
        if dtype == torch.float32:  # in bf16 some logits are equal, and rounding decides which is first
            assert out.top_k_counts[i].tolist() == builders.ranks_of(hidden.detach(), weight, part, 3)


def test_fused_loss_holds_no_logits(device, shared):
    """Three heads of 8192 tokens, width 1024, V = 128,256, bf16 take a chunk, gradients and workspaces."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device; tests/kernels holds the CPU's memory")
    peak = shared("loss_memory.py").loss_peak_memory(8192, 1024, 128_256, 3, torch.bfloat16, device)
    gradients = 3 * 8192 * 1024 * 2
    assert peak < GPU_CHUNK_BYTES + 2 * gradients + 64 * 2**20, f"{peak} bytes, the logits alone are 6.3e9"


def test_fused_loss_never_waits_for_the_device(device, shared):
    if device.type != "cuda" or backend.triton_kernels("linear_loss", device.type) is None:
        pytest.skip("needs a CUDA device and triton (install longdraft[gpu])")
    builders = shared("kernels/test_linear_loss.py")
    drawn, weight, labels = builders.examples([70, 0, 40], 64, 500)
    hiddens = [hidden.detach().to(device).requires_grad_() for hidden in drawn]
    weight, labels = weight.to(device), [part.to(device) for part in labels]
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_loss(hiddens, weight, builders.parts_of(labels), top_k=3).sums.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hiddens[0].grad is not None and bool(hiddens[0].grad.any())


KEPT = ["nothing", "in place", "each into the one before", "ragged", "all"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(3, 5), (8, 128), (13, 80)], ids=str)
@pytest.mark.parametrize("name", KEPT)
def test_kept_rows(device, shared, name, heads, dtype):
    builders = shared("kernels/test_tree.py")
    lengths, rows, counts = builders.CASES[name]
    caches = builders.made(lengths, *heads, dtype)
    wanted = [builders.moved(cache, lengths, rows, counts) for cache in caches]
    there = caches[0].to(device), place(caches[1], device, dtype)
    keep_rows(*there, *(torch.tensor(part, device=device) for part in (lengths, rows, counts)))
    for want, moved in zip(wanted, there, strict=True):
        torch.testing.assert_close(moved.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n_nodes", "max_depth", "chain"), [
    (1, 0, False), (1, 3, False), (2, 1, True), (40, 4, False), (64, 9, False), (65, 64, True), (128, 8, False),
])  # fmt: skip
def test_the_accepted_path(device, shared, n_nodes, max_depth, chain):
    given = shared("kernels/test_tree.py").tries(6, n_nodes, seed=n_nodes, chain=chain)
    active = torch.tensor([True, False, True, True, True, False])
    found = accepted_path(*(part.to(device) for part in (*given, active)), max_depth)
    for ours, want in zip(found, accepted_path(*given, active, max_depth), strict=True):
        assert ours.device.type == device.type and torch.equal(ours.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n_nodes", "vocab"), [(1, 3), (128, 1003), (1, 128_256), (16, 128_256)])
def test_choices(device, n_nodes, vocab, dtype):
    """Greedy choices are the CPU's; the others are within the noise's last bits of the CPU's best score."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (2 * torch.randn(3, n_nodes, vocab, generator=generator)).to(dtype)
    seeds, temperatures = torch.tensor([0, -1, 2**63 - 1]), torch.tensor([0.7, 0.0, 1.3])
    positions = torch.randint(2**32, (3, n_nodes), generator=generator)
    given = place(logits, device, dtype), seeds.to(device), positions.to(device), temperatures.to(device)
    chosen = choose(*given).cpu()
    assert torch.equal(chosen[1], logits[1].float().argmax(-1))
    for slot in (0, 2):
        scores = logits[slot].float() / temperatures[slot]
        scores += gumbel_noise(seeds[slot : slot + 1], positions[slot : slot + 1], vocab)[0]
        missed = scores.amax(-1) - scores.gather(1, chosen[slot, :, None])[:, 0]
        assert missed.max() <= 8e-6  # scores of up to 40, whose fp32 steps are 4e-6
    # Plain decoding computes one row, a tree many: the bits must be the same.
    one = [given[0][2:, -1:], given[1][2:], given[2][2:, -1:], given[3][2:]]
    assert choose(*one).cpu().tolist() == chosen[2:, -1:].tolist()


@pytest.mark.parametrize("vocab", [1003, 128_256])
def test_top_ps_border(device, vocab):
    """It keeps no less than top_p and not a token more, and a row's is the same alone and in a tree."""
    scores = (4 * torch.randn(2, 16, vocab, generator=torch.Generator().manual_seed(vocab))).to(device)
    top_p_B11 = torch.tensor([0.9, 0.5], device=device)[:, None, None]
    found, probs = top_p_border(scores, top_p_B11), scores.double().softmax(-1)
    kept, above = ((probs * mask).sum(-1, keepdim=True) for mask in (scores >= found, scores > found))
    bound = torch.full_like(kept, 2e-6)
    if device.type == "cpu":  # its fp32 softmax adds up a row in order; all probabilities share the error of that sum
        bound += (scores.softmax(-1).double().sum(-1, keepdim=True) - 1).abs()
    assert (kept > top_p_B11 - bound).all() and (above < top_p_B11 + bound).all()
    assert torch.equal(top_p_border(scores[1:, -1:].contiguous(), top_p_B11[1:]), found[1:, -1:])


def test_offsets_beyond_31_bits(device):
    """The last rows of a cache of more than 2**31 numbers are scored, picked and kept."""
    rows, n_kv, width = 2**21 + 64, 8, 128
    if device.type != "cuda" or torch.cuda.mem_get_info()[0] < 3 * 2 * rows * n_kv * width:
        pytest.skip("needs a CUDA device with 13 GB free")
    cache = torch.zeros(2, 1, 1, rows, n_kv, width, dtype=torch.bfloat16, device=device)  # keys and values
    numbers = torch.arange(1, 9, device=device, dtype=torch.bfloat16)
    cache[:, :, :, -8:] = numbers[:, None, None]
    keys, values = cache[0, :, 0], cache[1, :, 0]
    q = torch.ones(1, n_kv, width, dtype=torch.bfloat16, device=device)
    scores = key_scores(q, keys)
    assert torch.equal(scores[0, :, -8:], (width * numbers).float().expand(n_kv, -1))
    best = torch.arange(rows - 1, rows - 9, -1, device=device)
    assert torch.equal(top_keys(q, keys, 8), best.expand(1, n_kv, -1))
    out = [torch.empty(1, 8, n_kv, width, dtype=torch.bfloat16, device=device) for _ in range(2)]
    gather_rows(keys, values, best[None, :, None].expand(-1, -1, n_kv), *out)
    assert all(torch.equal(part, numbers.flip(0)[None, :, None, None].expand_as(part)) for part in out)
    means = torch.empty(1, rows // 8, n_kv, width, dtype=torch.bfloat16, device=device)
    chunk_means(keys, 8, means)
    assert bool((means[0, -1] == 4.5).all()) and not means[0, :-1].any()
    lengths, kept = torch.tensor([rows - 8], device=device), torch.tensor([[1, 4, 7]], device=device)
    keep_rows(cache[0], cache[1], lengths, kept, torch.tensor([3], device=device))
    assert cache[0, 0, 0, -8:, 3, 77].tolist() == cache[1, 0, 0, -8:, 0, 0].tolist() == [2, 5, 8, 4, 5, 6, 7, 8]
