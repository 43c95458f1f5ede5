"""kernels/triton/linear_loss.py against the reference on hostile chunks, in Triton's interpreter or on a
GPU; and the whole loss with this kernel against the full-logits formula."""

import pytest
import torch
from torch import Tensor

from longdraft.kernels import backend
from longdraft.kernels import linear_loss as kernel
from longdraft.kernels.linear_loss import chunk_losses
from longdraft.kernels.triton import linear_loss as triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
K = 5


@pytest.fixture
def made(shared, monkeypatch):
    """Builders of test_linear_loss.py (`examples`, `parts_of`, `ranks_of`), for Triton's kernel."""
    monkeypatch.setattr(backend, "triton_kernels", lambda name, device_type: triton)
    return shared("kernels/test_linear_loss.py")


def run(chunk_losses, logits: Tensor, labels: Tensor, top_k=K, gradient=True, device="cpu"):
    """(Loss, logits before the label's up to K, what has replaced the logits). Outputs are NaN at first, and NaN beside
    each row of logits must stay."""
    n_rows, n_words = logits.shape
    wide = torch.full((n_rows, 2 * n_words + 1), NAN, dtype=logits.dtype, device=device)
    wide[:, :n_words] = logits
    loss = torch.full((n_rows,), NAN, device=device)
    before = torch.full((n_rows if top_k else 0,), -7, dtype=torch.int32, device=device)
    chunk_losses(wide[:, :n_words], labels.to(device), loss, before, top_k, gradient)
    assert wide[:, n_words:].isnan().all()
    return loss.cpu(), before.clamp(max=top_k).cpu(), wide[:, :n_words].cpu()


def same(logits: Tensor, labels: Tensor, **options) -> None:
    """Triton gives what the reference gives; the gradient of rows without a label is arbitrary."""
    wanted = run(chunk_losses, logits, labels, **options)
    found = run(triton.chunk_losses, logits, labels, **options, device=DEVICE)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(found[1], wanted[1])
    kept = labels != -100
    tolerance = {torch.float32: 2e-7, torch.float16: 2**-11}[logits.dtype]
    torch.testing.assert_close(found[2][kept], wanted[2][kept], rtol=tolerance, atol=tolerance, equal_nan=True)


def drawn(n_rows: int, n_words: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_words)
    logits = 4 * torch.randn(n_rows, n_words, generator=generator)
    return logits.to(dtype), torch.randint(n_words, (n_rows,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("n_words", [1, 3, 64, 127, 129, 300])
def test_chunks_are_the_references(n_words, dtype, monkeypatch):
    monkeypatch.setattr(triton, "MOST_BLOCK", 64)
    logits, labels = drawn(9, n_words, dtype)
    labels[1], labels[2], labels[4] = 0, n_words - 1, -100
    same(logits, labels)
    same(logits, labels, top_k=0)
    same(logits[:1], labels[:1], gradient=False)
    assert torch.equal(run(triton.chunk_losses, logits, labels, gradient=False, device=DEVICE)[2], logits)


@pytest.mark.parametrize("block", [64, 8192])
def test_equal_infinite_and_large_logits(block, monkeypatch):
    monkeypatch.setattr(triton, "MOST_BLOCK", block)
    logits, labels = drawn(10, 150)
    labels[[0, 5, 6]] = 75
    logits[0] = 2.5  # all equal, the label in the middle
    logits[1], logits[1, 149], labels[1] = 0.0, 1.0, 148  # after 148 equal logits and a larger one
    logits[2, :100], labels[2] = -INF, 120  # whole blocks of nothing
    logits[3], logits[3, 130], labels[3] = -INF, 7.0, 130  # one open word
    logits[4, labels[4]] = -INF  # the label has no chance: infinite loss
    logits[5] *= 1e30
    logits[6] += 1e4
    logits[7] = -INF  # no word at all: NaN
    logits[8, 3] = INF
    logits[9, 140] = NAN
    same(logits, labels)
    loss = run(triton.chunk_losses, logits, labels, device=DEVICE)[0]
    assert loss[3] == 0 and loss[4] == INF and loss[[0, 1, 2, 5, 6]].isfinite().all() and loss[7:].isnan().all()


def test_ranks_of_ties_are_those_of_a_stable_sort(monkeypatch):
    monkeypatch.setattr(triton, "MOST_BLOCK", 64)
    logits = torch.randint(3, (40, 100), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(40) * 100 // 40
    before = run(triton.chunk_losses, logits, labels, top_k=100, device=DEVICE)[1]
    order = logits.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(before.long(), (order == labels[:, None]).int().argmax(1))


def test_all_ignored_rows_are_not_read():
    loss, before, _ = run(triton.chunk_losses, torch.full((3, 70), NAN), torch.full((3,), -100), device=DEVICE)
    assert loss.tolist() == [0, 0, 0] and before.tolist() == [K] * 3


def test_a_label_outside_the_vocabulary_gives_nan():
    logits, _ = drawn(3, 70)
    loss = run(triton.chunk_losses, logits, torch.tensor([70, -1, 69]), device=DEVICE)[0]
    assert loss[:2].isnan().all() and loss[2].isfinite()


def loss_and_gradients(made, hiddens, weight_VD, labels, dtype):
    """From the public function, for strided states and a padded weight, with NaN in all that must not be read."""
    wide = [torch.full((len(h), 2 * h.shape[1]), NAN, dtype=dtype, device=DEVICE) for h in hiddens]
    for into, hidden, labels_M in zip(wide, hiddens, labels, strict=True):
        into[:, 1::2] = hidden.detach().to(DEVICE)
        into[labels_M.to(DEVICE) == -100] = NAN
    leaves = [x.requires_grad_() for x in wide]
    padded = torch.full((len(weight_VD), weight_VD.shape[1] + 3), NAN, dtype=dtype, device=DEVICE)
    padded[:, :-3] = weight_VD.to(DEVICE)
    given = [x[:, 1::2] for x in leaves], padded[:, :-3], made.parts_of([x.to(DEVICE) for x in labels])
    out = kernel.linear_loss(*given, top_k=K)
    (out.sums * torch.tensor(made.SCALES[: len(hiddens)], device=DEVICE)).sum().backward()
    assert all(not x.grad[:, ::2].any() for x in leaves if x.grad is not None)
    return out, [x.grad[:, 1::2].cpu() for x in leaves if x.grad is not None]


# bf16 runs the same code as fp16 with another rounding; tests/gpu tests it.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("sizes", [[1], [30], [23, 0, 11], [0]], ids=str)
def test_losses_and_gradients_are_as_close_as_plain_arithmetics(made, plain, sizes, dtype, monkeypatch):
    """Losses within twice, gradients within three times the error of plain.py's formula in the same precision, both
    against fp64; plus one rounding of fp32, as plain.py's sum can be exact by chance."""
    monkeypatch.setattr(kernel, "rows_per_chunk", lambda *_: 10)  # parts in several chunks
    monkeypatch.setattr(triton, "MOST_BLOCK", 128)
    hiddens, weight_VD, labels = made.examples(sizes, 24, 301, dtype)
    out, grads = loss_and_gradients(made, hiddens, weight_VD, labels, dtype)
    for i, (hidden_MD, labels_M) in enumerate(zip(hiddens, labels, strict=True)):
        truth = plain.cross_entropy(hidden_MD.double(), weight_VD.double(), labels_M, made.SCALES[i])
        usual = plain.cross_entropy(hidden_MD, weight_VD, labels_M, made.SCALES[i])
        for factor, ours, theirs, exact in zip((2, 3), (out.sums[i].cpu(), grads[i]), usual, truth, strict=True):
            allowed = factor * (theirs - exact).norm() + 1e-6 * exact.norm()
            assert (ours.detach() - exact).norm() <= allowed
        assert out.n_labels[i] == (labels_M >= 0).sum()
        if dtype == torch.float32:  # in fp16 some logits are equal, and rounding decides which is first
            assert out.top_k_counts[i].tolist() == made.ranks_of(hidden_MD, weight_VD, labels_M, K)
