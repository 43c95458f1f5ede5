"""kernels/triton/linear_loss.py against the reference on hostile chunks, in Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from longdraft.kernels.linear_loss import chunk_losses
from longdraft.kernels.triton import linear_loss as triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")
K = 5


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


def test_all_ignored_rows_are_not_read():
    loss, before, _ = run(triton.chunk_losses, torch.full((3, 70), NAN), torch.full((3,), -100), device=DEVICE)
    assert loss.tolist() == [0, 0, 0] and before.tolist() == [K] * 3


def test_a_label_outside_the_vocabulary_gives_nan():
    logits, _ = drawn(3, 70)
    loss = run(triton.chunk_losses, logits, torch.tensor([70, -1, 69]), device=DEVICE)[0]
    assert loss[:2].isnan().all() and loss[2].isfinite()
