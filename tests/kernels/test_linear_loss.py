"""The heads' fused loss, by PyTorch and by Triton, against the full formula: losses, gradients, ranks, memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels import linear_loss as kernel
from longdraft.kernels.linear_loss import LossPart, chunk_losses, linear_loss, rows_per_chunk
from longdraft.kernels.triton import linear_loss as triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES, K, NAN = (0.37, -2.0, 5.0), 20, float("nan")


def example(rows: int, hidden: int, vocab: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """One part, in which every fifth label is missing."""
    generator = torch.Generator().manual_seed(rows)
    hidden_MD = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocab, hidden, generator=generator) * 0.3).to(dtype)
    labels_M = torch.randint(vocab, (rows,), generator=generator)
    labels_M[::5] = -100
    return hidden_MD, weight_VD, labels_M


def examples(sizes, hidden: int, vocab: int, dtype=torch.float32) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Several parts that share the LM head; the vocabulary's last id is a label of the last one."""
    parts = [example(rows, hidden, vocab, dtype) for rows in sizes]
    hiddens, labels = [part[0] for part in parts], [part[2] for part in parts]
    labels[-1][-1:] = vocab - 1
    return hiddens, example(1, hidden, vocab, dtype)[1], labels


def parts_of(labels: list[Tensor]) -> list[LossPart]:
    """Parts in which label i is of state i."""
    return [LossPart(torch.arange(len(labels_M), device=labels_M.device), labels_M) for labels_M in labels]


def ranks_of(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor, top_k: int) -> list[int]:
    """Rank counts by sorting; there are no ties."""
    top_MK = (hidden_MD @ weight_VD.T).topk(top_k, dim=1).indices
    return (top_MK == labels_M[:, None]).sum(0).tolist()


@pytest.fixture(params=["torch", "triton"])
def implementation(request, monkeypatch) -> tuple[Callable, str]:
    """Who computes the losses of a chunk, and on which device: PyTorch, or Triton, on a CPU in its interpreter."""
    kernels = triton if request.param == "triton" else None
    monkeypatch.setattr(backend, "triton_kernels", lambda name, device_type: kernels)
    return (triton.chunk_losses, DEVICE) if kernels else (chunk_losses, "cpu")


# Parts in several chunks and blocks. Triton computes bf16 on a GPU only (tests/gpu), by the code of fp16.
COMBINED = [
    ("torch", torch.float32, sizes, *rows)
    for sizes in ([1], [2], [17], [63, 1, 100], [0, 5], [3, 0, 4], [0])
    for rows in ((1, 1), (16, 1), (16, 7), (1000, 7), (1000, 1000))
]
COMBINED += [("torch", torch.bfloat16, [256, 40], 64, 10)]
COMBINED += [
    ("triton", dtype, sizes, 10, 1)
    for dtype in (torch.float32, torch.float16)
    for sizes in ([1], [30], [23, 0, 11], [0])
]


@pytest.mark.parametrize(
    ("implementation", "dtype", "sizes", "chunk_rows", "block_rows"), COMBINED, ids=str, indirect=["implementation"]
)
def test_losses_gradients_and_ranks_are_those_of_the_full_formula(
    plain, implementation, dtype, sizes, chunk_rows, block_rows, monkeypatch
):
    """For strided states and a padded weight, with NaN in all that must not be read. Losses are within twice, gradients
    within three times the error of plain.py's formula in the same precision, both against fp64; plus one rounding of
    fp32, as plain.py's sum can be exact by chance."""
    monkeypatch.setattr(kernel, "rows_per_chunk", lambda *_: chunk_rows)
    monkeypatch.setattr(kernel, "rows_per_block", lambda *_: block_rows)
    monkeypatch.setattr(triton, "MOST_BLOCK", 128)
    (hiddens, weight_VD, labels), (_, device) = examples(sizes, 24, 301, dtype), implementation
    leaves = [torch.full((len(h), 2 * h.shape[1]), NAN, dtype=dtype, device=device) for h in hiddens]
    for into, hidden, labels_M in zip(leaves, hiddens, labels, strict=True):
        into[:, 1::2] = hidden.detach().to(device)
        into[labels_M.to(device) == -100] = NAN
        into.requires_grad_()
    padded = torch.full((len(weight_VD), weight_VD.shape[1] + 3), NAN, dtype=dtype, device=device)
    padded[:, :-3] = weight_VD.to(device)
    given = [x[:, 1::2] for x in leaves], padded[:, :-3], parts_of([x.to(device) for x in labels])
    out = linear_loss(*given, top_k=K)
    (out.sums * torch.tensor(SCALES[: len(sizes)], device=device)).sum().backward()
    for i, (hidden_MD, labels_M) in enumerate(zip(hiddens, labels, strict=True)):
        grad = leaves[i].grad.cpu()
        assert not grad[:, ::2].any() and grad.dtype == dtype
        truth = plain.cross_entropy(hidden_MD.double(), weight_VD.double(), labels_M, SCALES[i])
        usual = plain.cross_entropy(hidden_MD, weight_VD, labels_M, SCALES[i])
        for factor, ours, theirs, exact in zip((2, 3), (out.sums[i].cpu(), grad[:, 1::2]), usual, truth, strict=True):
            assert (ours.detach() - exact).norm() <= factor * (theirs - exact).norm() + 1e-6 * exact.norm()
        assert out.n_labels[i] == (labels_M >= 0).sum()
        if dtype == torch.float32:  # in half precision some logits are equal, and rounding decides which is first
            assert out.top_k_counts[i].tolist() == ranks_of(hidden_MD, weight_VD, labels_M, K)


def test_the_gradients_scale_is_not_rounded_to_bf16():
    """1 / 3 in bf16 is off by 0.2 %, for all rows in the same direction."""
    grads = []
    for scale in (1.0, 1 / 3):
        hidden_MD, weight_VD, labels_M = example(64, 16, 50, torch.bfloat16)
        (linear_loss([hidden_MD], weight_VD, parts_of([labels_M])).sums * scale).sum().backward()
        assert hidden_MD.grad is not None
        grads.append(hidden_MD.grad)
    assert torch.equal(grads[1], (grads[0].float() * torch.tensor(1 / 3)).bfloat16())


def test_frozen_weight_gets_no_gradient_and_no_labels_give_zero():
    hiddens, weight_VD, labels = examples([8, 6], 16, 50)
    weight_VD.requires_grad_()
    labels[1].fill_(-100)
    hiddens[1].data.fill_(float("nan"))
    out = linear_loss(hiddens, weight_VD, parts_of(labels), top_k=3)
    out.sums.sum().backward()
    assert weight_VD.grad is None
    assert out.sums[1] == 0 and out.n_labels[1] == 0 and out.top_k_counts[1].tolist() == [0, 0, 0]
    assert hiddens[0].grad is not None and hiddens[0].grad.any()
    assert hiddens[1].grad is not None and not hiddens[1].grad.any()


def test_rows_say_which_states_the_labels_are_of(plain):
    """Rows in any order, some states twice and others never, which are not read."""
    hidden_ND, weight_VD, _ = example(12, 8, 40)
    hidden_ND.data[5] = float("nan")
    rows, labels = torch.tensor([3, 11, 3, 0]), torch.tensor([7, 39, 8, 0])
    out = linear_loss([hidden_ND, hidden_ND], weight_VD, [LossPart(rows, labels), LossPart(rows[:1], labels[:1])])
    (out.sums * torch.tensor([1.0, 2.0])).sum().backward()
    loss, grad_MD = plain.cross_entropy(hidden_ND[rows], weight_VD, labels)
    torch.testing.assert_close(out.sums[0].detach(), loss)
    expected_ND = torch.zeros(12, 8).index_add_(0, rows, grad_MD)
    expected_ND[3] += 2 * grad_MD[0]
    torch.testing.assert_close(hidden_ND.grad, expected_ND)


def test_gradient_only_where_it_is_needed_and_once(implementation):
    hiddens, weight_VD, labels = examples([5, 6], 8, 30)
    hiddens[0].requires_grad_(False)
    device = implementation[1]
    given = [h.detach().to(device).requires_grad_(h.requires_grad) for h in hiddens]
    on_device = weight_VD.to(device), parts_of([x.to(device) for x in labels])
    with torch.no_grad():
        blind = linear_loss(given, *on_device).sums
    assert not blind.requires_grad
    out = linear_loss(given, *on_device)
    assert torch.equal(out.sums, blind)
    out.sums.sum().backward(retain_graph=True)
    assert given[0].grad is None and given[1].grad is not None
    with pytest.raises(RuntimeError, match="used up by an earlier backward pass"):
        out.sums.sum().backward()


def test_ranks_of_ties_are_those_of_a_stable_sort(implementation, monkeypatch):
    monkeypatch.setattr(triton, "MOST_BLOCK", 64)
    compute, device = implementation
    logits = torch.randint(3, (40, 100), generator=torch.Generator().manual_seed(0)).float().to(device)
    labels = torch.arange(40, device=device) * 100 // 40
    before = torch.empty(40, dtype=torch.int32, device=device)
    compute(logits, labels, torch.empty(40, device=device), before, 100, False)
    order = logits.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(before, (order == labels[:, None]).int().argmax(1).int())


def test_chunks_have_a_bound_in_bytes():
    assert rows_per_chunk(49152, 4, gpu=False) == 320 and rows_per_chunk(128256, 2, gpu=True) == 1024
    for vocab, size, gpu in ((128256, 4, False), (49152, 2, False), (152064, 2, True), (128256, 4, True)):
        budget = kernel.GPU_CHUNK_BYTES if gpu else kernel.CHUNK_BYTES
        assert 0.7 * budget < rows_per_chunk(vocab, size, gpu) * vocab * size <= budget
    assert rows_per_chunk(1 << 30, 4, gpu=False) == 16


def test_peak_memory_does_not_grow_with_heads_tokens_and_vocabulary(monkeypatch, shared):
    monkeypatch.setattr(kernel, "CHUNK_BYTES", 4 * 2**20)
    vocab, hidden = 8000, 32
    loss_peak_memory = shared("loss_memory.py").loss_peak_memory
    short = loss_peak_memory(1024, hidden, vocab, n_heads=1)
    long = loss_peak_memory(4096, hidden, vocab, n_heads=3)
    # What may grow: each head's gradient, one more while they are handed over, labels, losses, indices and ranks.
    more = 3 * 4096 - 1024
    allowed = more * (4 * hidden + 64) + 4096 * 4 * hidden
    assert long - short <= allowed, f"{short} bytes at 1024 rows, {long} at 3 x 4096"
    assert short < 1.8 * 4 * 2**20, "more than a chunk and one block of it"
    assert long < 3 * 4096 * vocab * 4 / 30
