"""The fused loss against the full-logits formula: loss, gradient, ranks, memory; Liger under Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.kernels.loss_memory import loss_peak_memory
from longdraft.kernels.reference import linear_cross_entropy as reference


def example(rows: int, hidden: int, vocab: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden_MD = torch.randn(rows, hidden, generator=generator).to(dtype).requires_grad_()
    weight_VD = (torch.randn(vocab, hidden, generator=generator) * 0.3).to(dtype)
    labels_M = torch.randint(vocab, (rows,), generator=generator)
    labels_M[::5] = -100
    return hidden_MD, weight_VD, labels_M


def full_formula(hidden_MD: Tensor, weight_VD: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    hidden_MD = hidden_MD.detach().requires_grad_()
    loss = F.cross_entropy((hidden_MD @ weight_VD.T).float(), labels_M, reduction="sum")
    (grad_MD,) = torch.autograd.grad(loss * 0.37, hidden_MD)
    return loss.detach(), grad_MD


@pytest.mark.parametrize("rows", [1, 2, 17, 63, 100])
@pytest.mark.parametrize("chunk_rows", [1, 16, 1000])
def test_loss_and_gradient_equal_the_full_formula(rows, chunk_rows, monkeypatch):
    monkeypatch.setattr(reference, "rows_per_chunk", lambda vocab: chunk_rows)
    hidden_MD, weight_VD, labels_M = example(rows, 24, 301)
    out = linear_cross_entropy(hidden_MD, weight_VD, labels_M)
    (out.loss_sum * 0.37).backward()
    loss, grad_MD = full_formula(hidden_MD, weight_VD, labels_M)
    torch.testing.assert_close(out.loss_sum.detach(), loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden_MD.grad, grad_MD, rtol=1e-5, atol=1e-6)
    assert out.n_labels == (labels_M >= 0).sum()
    assert out.rank_counts.shape == (0,) and out.n_ranked == 0


def test_bf16_is_as_close_to_fp32_as_the_full_formula_in_bf16():
    hidden_MD, weight_VD, labels_M = example(256, 64, 500, torch.bfloat16)
    exact_loss, exact_grad = full_formula(hidden_MD.float(), weight_VD.float(), labels_M)
    plain_loss, plain_grad = full_formula(hidden_MD, weight_VD, labels_M)
    out = linear_cross_entropy(hidden_MD, weight_VD, labels_M)
    (out.loss_sum * 0.37).backward()
    assert hidden_MD.grad is not None and hidden_MD.grad.dtype == torch.bfloat16
    assert (out.loss_sum - exact_loss).abs() <= 2 * (plain_loss - exact_loss).abs() + 1e-6 * exact_loss
    assert (hidden_MD.grad - exact_grad).norm() <= 3 * (plain_grad - exact_grad).norm()


def test_frozen_weight_gets_no_gradient_and_no_rows_give_zero():
    hidden_MD, weight_VD, labels_M = example(8, 16, 50)
    weight_VD.requires_grad_()
    linear_cross_entropy(hidden_MD, weight_VD, labels_M).loss_sum.backward()
    assert weight_VD.grad is None

    hidden_MD.grad = None
    out = linear_cross_entropy(hidden_MD, weight_VD, torch.full_like(labels_M, -100), top_k=3)
    out.loss_sum.backward()
    assert out.loss_sum == 0 and out.n_labels == 0 and out.rank_counts.tolist() == [0, 0, 0]
    assert hidden_MD.grad is not None and not hidden_MD.grad.any()


def test_rank_counts_equal_topk():
    hidden_MD, weight_VD, labels_M = example(2000, 16, 12)
    out = linear_cross_entropy(hidden_MD, weight_VD, labels_M, top_k=3)
    top_MK = (hidden_MD @ weight_VD.T).topk(3, dim=1).indices
    expected = ((top_MK == labels_M[:, None]) & (labels_M[:, None] >= 0)).sum(0)
    assert out.rank_counts.tolist() == expected.tolist() and out.n_ranked == out.n_labels
    assert expected.sum() < out.n_labels, "the example has no label outside the top 3"


def test_rank_of_equal_logits_is_by_token_id():
    logits_CV = torch.tensor([[1.0, 2.0, 2.0, 0.0]]).expand(4, 4)
    counts = [reference.count_ranks(logits_CV[:1], torch.tensor([label]), 3).tolist() for label in (1, 2, 0, 3)]
    assert counts == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_errors_name_the_argument():
    hidden_MD, weight_VD, labels_M = example(4, 8, 20)
    with pytest.raises(ValueError, match="implementation: 'cuda' is none of auto, liger, torch"):
        linear_cross_entropy(hidden_MD, weight_VD, labels_M, implementation="cuda")
    with pytest.raises(ValueError, match="weight_VD: torch"):
        linear_cross_entropy(hidden_MD, weight_VD.bfloat16(), labels_M)


def test_peak_memory_does_not_grow_with_heads_tokens_and_vocabulary(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * 2**20)
    vocab, hidden = 8000, 32
    short = loss_peak_memory(1024, hidden, vocab, n_heads=1)
    long = loss_peak_memory(4096, hidden, vocab, n_heads=3)
    # What may grow: the kept rows, the gradient, its scaled copy, its sum over the heads; and the labels.
    assert long - short <= (4096 - 1024) * (5 * hidden * 4 + 32), f"{short} bytes at 1024 rows, {long} at 3 x 4096"
    assert long < 4096 * vocab * 4 / 4, "more than a quarter of one head's logits"


LIGER = """
import sys, torch
from longdraft.kernels import linear_cross_entropy as kernel
kernel.RANKED_ROWS_BESIDE_LIGER = 32
hidden_MD, weight_VD, labels_M = torch.load(sys.argv[1], weights_only=True)
hidden_MD.requires_grad_()
out = kernel.linear_cross_entropy(hidden_MD, weight_VD, labels_M, top_k=3, implementation="liger")
(out.loss_sum * 0.37).backward()
torch.save([out.loss_sum.detach(), hidden_MD.grad, out.rank_counts, out.n_ranked], sys.argv[1])
"""


def test_liger_equals_the_full_formula(tmp_path):
    hidden_MD, weight_VD, labels_M = example(41, 16, 64)  # above 32 rows every second one is ranked
    torch.save([hidden_MD.detach(), weight_VD, labels_M], tmp_path / "x.pt")
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when Triton is imported
    subprocess.run([sys.executable, "-c", LIGER, str(tmp_path / "x.pt")], check=True, env=environment, timeout=120)
    loss, grad_MD, rank_counts, n_ranked = torch.load(tmp_path / "x.pt", weights_only=True)
    expected_loss, expected_grad_MD = full_formula(hidden_MD, weight_VD, labels_M)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad_MD, expected_grad_MD, rtol=1e-5, atol=1e-6)
    sampled = linear_cross_entropy(hidden_MD[::2], weight_VD, labels_M[::2], top_k=3)
    assert rank_counts.tolist() == sampled.rank_counts.tolist() and n_ranked == sampled.n_labels
