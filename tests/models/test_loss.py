"""The loss that drafts share: which tokens are labels, and that their summed cross-entropy is PyTorch's."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.loss import TOP_K, LossPart, ahead, draft_loss

D, V = 12, 31


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(count, seed=3):
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("distance", [1, 2, 4, 7, 20])
def test_labels_are_those_of_a_loop(distance):
    borders, tokens = [0, 7, 7, 8, 12, 20], tokens_of(20)
    supervised = torch.rand(20, generator=torch.Generator().manual_seed(1)) < 0.7
    pairs = [
        (t, int(tokens[t + distance]))
        for start, stop in pairwise(borders)
        for t in range(start, stop - distance)
        if supervised[t + distance]
    ]
    part = ahead(tokens, supervised, borders, distance)
    assert list(zip(part.rows.tolist(), part.labels.tolist(), strict=True)) == pairs


def test_each_parts_loss_gradient_and_ranks_are_pytorchs():
    """Parts of different rows, one of them without any label."""
    head, tokens = draw(V, D, seed=1).requires_grad_(), tokens_of(20)
    parts = [ahead(tokens, torch.ones(20, dtype=torch.bool), [0, 9, 20], i) for i in (1, 3)]
    parts.append(LossPart(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)))
    ours, plain = ([draw(20, D, seed=i).requires_grad_() for i in range(3)] for _ in range(2))
    out = draft_loss(ours, parts, head, True)
    assert out.sums.dtype == torch.float32 and out.sums.shape == (3,)
    expected = []
    for i, (state, part) in enumerate(zip(plain, parts, strict=True)):
        logits = state[part.rows] @ head.detach().T
        expected.append(F.cross_entropy(logits, part.labels, reduction="sum"))
        order = logits.argsort(-1, descending=True)
        ranks = (order == part.labels[:, None]).float().argmax(1)
        assert out.top_k_counts[i].tolist() == [int((ranks == k).sum()) for k in range(TOP_K)]
        assert out.n_labels[i] == len(part.labels)
    torch.testing.assert_close(out.sums, torch.stack(expected))
    weights = torch.tensor([0.3, -2.0, 5.0])
    (out.sums * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert head.grad is None
    assert ours[2].grad is not None and not ours[2].grad.any()  # zero, not missing
