"""AdaMuon: orthogonal matrices, and PyTorch's own Muon as a peer. Ranks' shares and resuming: test_elastic.py."""

import pytest
import torch

from longdraft.train.adamuon import AdaMuon, orthogonal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7)])
def test_the_same_directions_and_all_alike(shape, dtype):
    """Jordan et al.: U V^T, with singular values between 0.68 and 1.13 where those of the matrix are not near 0."""
    generator = torch.Generator().manual_seed(3)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrix = (u * torch.linspace(0.1, 1.0, len(vt))) @ vt * 1e-3
    found = u.T @ orthogonal(matrix, dtype) @ vt.T
    between = 0.02 if dtype == torch.float32 else 0.1
    assert (found - found.diag().diag()).abs().max() < between
    assert found.diag().min() > 0.66 and found.diag().max() < 1.2


def test_nothing_comes_of_nothing():
    assert orthogonal(torch.zeros(3, 5), torch.float32).abs().max() == 0


def test_a_step_is_that_of_pytorch_divided_by_its_mean_squares():
    """PyTorch's Muon, which computes in bf16, gives the orthogonal matrices; the paper's equations give the rest. Ours
    has the matrices end to end, as ZeRO leaves them."""
    generator, shapes, rate, decay, beta = (
        torch.Generator().manual_seed(5),
        [(24, 40), (40, 24), (16, 16)],
        0.01,
        0.1,
        0.9,
    )
    expected = [torch.randn(shape, generator=generator) for shape in shapes]
    begun = torch.cat([p.flatten() for p in expected])
    theirs, squares = (
        [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes],
        [torch.zeros(shape) for shape in shapes],
    )
    peer = torch.optim.Muon(theirs, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [torch.nn.Parameter(p.clone()) for p in expected], "weight_decay": decay}]
    ours = AdaMuon(groups, lr=rate, betas=(0.0, beta), eps=1e-8, dtype=torch.bfloat16)
    flat = torch.nn.Parameter(begun.clone())
    ours.param_groups[0]["params"] = [flat]
    ours.state[flat] = {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(flat),
        "exp_avg_sq": torch.zeros_like(flat),
    }
    for step in range(1, 6):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.data.zero_()
            parameter.grad = gradient.clone()
        flat.grad = torch.cat([gradient.flatten() for gradient in gradients])
        peer.step()
        ours.step()
        for i, moved in enumerate(theirs):
            turned = -moved.detach()
            squares[i] = beta * squares[i] + (1 - beta) * turned**2
            size = (squares[i] / (1 - beta**step)).sqrt()
            expected[i] = expected[i] * (1 - rate * decay) - rate * 0.2 * turned / size
    wanted = torch.cat([p.flatten() for p in expected])
    # Both round to bf16, in another order: 0.06 of the movement; without Nesterov's sum 0.3, with the other beta 0.3.
    assert (flat.detach() - wanted).norm() < 0.1 * (wanted - begun).norm()
