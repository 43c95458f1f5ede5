"""The distillation losses against their definitions with full logits and autograd, and against draws."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longdraft.kernels import backend
from longdraft.kernels import linear_loss as chunks
from longdraft.kernels.distillation import LOSSES, Distillation, TargetChunk, acceptance
from longdraft.kernels.linear_loss import LossPart, linear_loss
from longdraft.kernels.triton import linear_loss as triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OBJECTIVES = ["kl", "overlap", "acceptance"]
D, V, STATES = 12, 50, 40


def example(sizes, dtype=torch.float32, seed=0, device="cpu"):
    """Parts with rows in any order, some of them twice; every fifth label is missing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hiddens = [draw(STATES, D).requires_grad_() for _ in sizes]
    weight, states = draw(V, D) * 0.6, draw(STATES, D)

    def indices(most: int) -> list[Tensor]:
        return [torch.randint(most, (n,), generator=generator).to(device) for n in sizes]

    rows, taught, labels = indices(STATES), indices(STATES), indices(V)
    for part in labels:
        part[::5] = -100
    parts = [LossPart(*part) for part in zip(rows, labels, strict=True)]
    return hiddens, weight, parts, Distillation(states, taught, "kl")


def by_definition(objective: str, q_MV: Tensor, p_MV: Tensor) -> Tensor:
    """The loss term by term. p may lack the probability of tokens that the draft does not have."""
    if objective == "kl":
        return (p_MV * (p_MV / q_MV).log()).sum(1)
    if objective == "overlap":
        return -torch.minimum(p_MV, q_MV).sum(1).log()
    ratio_p, ratio_q = (x_MV[:, None, :] / x_MV[:, :, None] for x_MV in (p_MV, q_MV))
    lost = (1 - p_MV.sum(1, keepdim=True)) / p_MV
    return -(1 / (torch.maximum(ratio_p, ratio_q).sum(2) + lost)).sum(1).log()


def full_formula(hidden, weight, part, states, taught, totals, objective, text_weight, scale):
    """The summed loss of the rows with a label, and the gradient of the states, in fp64."""
    hidden, (rows, labels) = hidden.detach().double().requires_grad_(), part
    kept = labels != -100
    logits = hidden[rows[kept]] @ weight.double().T
    target = states.double()[taught[kept]] @ weight.double().T
    total = target.logsumexp(1) if totals is None else totals.double()[taught[kept]]
    loss = by_definition(objective, logits.softmax(1), (target - total[:, None]).exp()).sum() * (1 - text_weight)
    loss = loss + text_weight * F.cross_entropy(logits, labels[kept], reduction="sum")
    (gradient,) = torch.autograd.grad(loss * scale, hidden)
    return loss.detach(), gradient


# Half of all combinations: any three values meet.
COMBINED = [
    (implementation, objective, *sizes, *((False, 0.0), (True, 0.3))[(i + j + k) % 2])
    for i, implementation in enumerate(("torch", "triton"))
    for j, objective in enumerate(OBJECTIVES)
    for k, sizes in enumerate((([7], 100, 100), ([17, 1, 30], 8, 3), ([0, 5], 1, 1)))
]


@pytest.mark.parametrize(
    ("implementation", "objective", "sizes", "chunk", "block", "rest", "text_weight"), COMBINED, ids=str
)
def test_losses_and_gradients_equal_the_definitions(
    implementation, objective, sizes, chunk, block, rest, text_weight, monkeypatch
):
    """`block`: rows of PyTorch's blocks; Triton's program takes 16 of a row's numbers at a time, on a GPU if there is
    one."""
    device = DEVICE if implementation == "triton" else "cpu"
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *_: chunk)
    monkeypatch.setattr(chunks, "rows_per_block", lambda *_: block)
    monkeypatch.setattr(triton, "MOST_DISTILLED_BLOCK", 16)
    monkeypatch.setattr(backend, "triton_kernels", lambda *_: triton if implementation == "triton" else None)
    hiddens, weight, parts, target = example(sizes, device=device)
    if rest:
        target = target._replace(log_totals=(target.states @ weight.T).logsumexp(1) + 0.2)
    target = target._replace(objective=objective, text_weight=text_weight, measure=True)
    out = linear_loss(hiddens, weight, parts, 3, target)
    scales = torch.tensor([0.4, -2.0, 5.0], device=device)[: len(sizes)]
    (out.sums * scales).sum().backward()
    for i, hidden in enumerate(hiddens):
        loss, gradient = full_formula(
            hidden, weight, parts[i], target.states, target.rows[i], target.log_totals,
            objective, text_weight, scales[i],
        )  # fmt: skip
        torch.testing.assert_close(out.sums[i].detach().double(), loss, rtol=2e-5, atol=1e-5)
        torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-4, atol=2e-6)
        logits = hidden.detach()[parts[i].rows] @ weight.T
        ranked = logits.topk(3, 1).indices == parts[i].labels[:, None]
        assert out.top_k_counts[i].tolist() == ranked.sum(0).tolist()
        shared = torch.tensor(0.0, device=device)
        for row, taught in zip(logits, target.rows[i], strict=True):  # for any label
            seen = target.states[taught] @ weight.T
            p = seen.softmax(0) if target.log_totals is None else (seen - target.log_totals[taught]).exp()
            both = row.softmax(0)[None], p[None]
            shared += torch.minimum(*both).sum()
        torch.testing.assert_close(out.overlaps[i], shared, rtol=1e-4, atol=1e-5)


def test_acceptance_is_how_often_both_choose_the_same_under_the_same_noise():
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(1, 30, generator=generator).mul(1.5).softmax(1) for _ in range(2))
    value = (-acceptance(p.log(), q.log(), p, q)[0]).exp().item()
    n = 200_000
    noise = -torch.empty(n, 30).exponential_(generator=generator).log()
    counted = ((p.log() + noise).argmax(1) == (q.log() + noise).argmax(1)).float().mean().item()
    assert abs(value - counted) < 5 * (value * (1 - value) / n) ** 0.5
    tv = 0.5 * (p - q).abs().sum().item()
    assert (1 - tv) / (1 + tv) <= value <= 1 - tv


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_distributions_far_apart_give_numbers(objective):
    """Peaks of probability 1, on the same token and on different ones; opposite orders; ties everywhere."""
    logits = torch.zeros(4, 9)
    logits[0, 3], logits[1, 3], logits[2] = 200.0, 200.0, torch.arange(9) * 40.0
    target = torch.zeros(4, 9)
    target[0, 3], target[1, 5], target[2] = 200.0, 200.0, torch.arange(9).flip(0) * 40.0
    log_p, log_q = target.log_softmax(1), logits.log_softmax(1)
    loss, gradient = LOSSES[objective](log_p, log_q, log_p.exp(), log_q.exp())
    assert loss.isfinite().all() and gradient.isfinite().all()
    torch.testing.assert_close(loss[[0, 3]], torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient[0], torch.zeros(9), atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient.sum(1), torch.zeros(4), atol=1e-5, rtol=0)
    assert gradient[3].abs().max() < 0.1  # equal distributions are a kink of the acceptance: any of its slopes is right
    assert loss[1] > 50 and loss[2] > 50
    like, logits, target = Distillation(target, [], objective), logits.to(DEVICE), target.to(DEVICE)
    labels, found, before = torch.tensor([3, 5, 0, -100], device=DEVICE), logits.new_empty(4), logits.new_empty(0)
    triton.chunk_losses(logits, labels, found, before, 0, True, TargetChunk(like, target, None, None))
    torch.testing.assert_close(found.cpu(), loss * torch.tensor([1, 1, 1, 0]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[:3].cpu(), gradient[:3], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compute", [chunks.chunk_losses, triton.chunk_losses], ids=["torch", "triton"])
@pytest.mark.parametrize("objective", ["kl", "overlap"])
@pytest.mark.parametrize("of_target", [True, False])
def test_a_row_that_is_not_a_number_has_such_a_loss(objective, of_target, compute):
    """By it training leaves its pass out."""
    device = DEVICE if compute is triton.chunk_losses else "cpu"
    logits, target = (torch.randn(3, 70, device=device) for _ in range(2))
    (target if of_target else logits)[1, 5] = torch.nan
    labels, loss = torch.tensor([3, 5, 0], device=device), logits.new_empty(3)
    like = Distillation(target, [], objective)
    compute(logits, labels, loss, logits.new_empty(0), 0, True, TargetChunk(like, target, None, None))
    assert loss.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_half_precision_is_as_close_as_its_logits_are(objective, implementation, monkeypatch):
    """At most twice the error of the same losses from logits rounded to it; gradients three times. Triton's interpreter
    does not know bf16."""
    device, kernels = ("cpu", None) if implementation == "torch" else (DEVICE, triton)
    dtype = torch.float16 if kernels and device == "cpu" else torch.bfloat16
    monkeypatch.setattr(triton, "MOST_DISTILLED_BLOCK", 16)
    monkeypatch.setattr(backend, "triton_kernels", lambda *_: kernels)
    hiddens, weight, parts, target = example([40], dtype, device=device)
    out = linear_loss(hiddens, weight, parts, distillation=target._replace(objective=objective))
    out.sums.sum().backward()
    (rows, labels), hidden = parts[0], hiddens[0]
    given = hidden, weight, parts[0], target.states, target.rows[0], None, objective, 0.0, 1.0
    exact, exact_gradient = full_formula(*given)
    kept = labels != -100
    rounded = (hidden[rows[kept]] @ weight.T).float().detach()
    seen = (target.states[target.rows[0][kept]] @ weight.T).float()
    logits = rounded.requires_grad_()
    usual = by_definition(objective, logits.softmax(1), seen.softmax(1)).sum()
    of_rows = (torch.autograd.grad(usual, logits)[0].to(dtype) @ weight).float()
    usual_gradient = of_rows.new_zeros(STATES, D).index_add_(0, rows[kept], of_rows)
    assert (out.sums[0] - exact).abs() <= 2 * (usual - exact).abs() + 1e-4 * exact
    assert (hiddens[0].grad - exact_gradient).norm() <= 3 * (usual_gradient - exact_gradient).norm()


def test_acceptance_where_algorithms_are_deterministic(monkeypatch):
    """On a GPU `cumsum` raises then."""
    p, q = (torch.randn(3, 1300, generator=torch.Generator().manual_seed(seed)).softmax(1) for seed in (0, 1))
    wanted = acceptance(p.log(), q.log(), p, q)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", None)
    for found, want in zip(acceptance(p.log(), q.log(), p, q), wanted, strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
