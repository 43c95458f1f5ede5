"""The loss that drafts share: which tokens are labels, and that their summed cross-entropy is PyTorch's."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.loss import RANKS, LossPart, ahead, draft_loss

D, V = 12, 31


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(count, seed=3):
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed))


def test_labels_lie_within_the_piece_and_are_supervised():
    tokens, supervised = torch.arange(10, 20, dtype=torch.int32), torch.ones(10, dtype=torch.bool)
    supervised[[3, 8]] = False
    borders = [0, 5, 9, 9, 10]
    part = ahead(tokens, supervised, borders, 1)
    assert part.rows.tolist() == [0, 1, 3, 5, 6] and part.labels.tolist() == [11, 12, 14, 16, 17]
    part = ahead(tokens, supervised, borders, 2)
    assert part.rows.tolist() == [0, 2, 5] and part.labels.tolist() == [12, 14, 17]
    assert part.rows.dtype == part.labels.dtype == torch.int64
    for distance in (5, 10, 11):
        assert len(ahead(tokens, supervised, borders, distance).rows) == 0


@pytest.mark.parametrize("distance", [1, 2, 4, 7])
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


@pytest.mark.parametrize("distance", [1, 3])
def test_three_packed_pieces_have_the_labels_and_the_loss_of_the_three_alone(distance):
    borders, tokens, states, head = [0, 7, 11, 20], tokens_of(20), draw(20, D), draw(V, D, seed=1)
    supervised = torch.rand(20, generator=torch.Generator().manual_seed(1)) < 0.8
    packed = ahead(tokens, supervised, borders, distance)
    alone = [
        (start, ahead(tokens[start:stop], supervised[start:stop], [0, stop - start], distance))
        for start, stop in pairwise(borders)
    ]
    assert torch.equal(packed.rows, torch.cat([start + part.rows for start, part in alone]))
    assert torch.equal(packed.labels, torch.cat([part.labels for _, part in alone]))
    together = draft_loss([states], [packed], head, True)
    apart = [
        draft_loss([states[start:stop]], [part], head, True)
        for (start, stop), (_, part) in zip(pairwise(borders), alone, strict=True)
    ]
    torch.testing.assert_close(together.sums, sum(loss.sums for loss in apart))
    for field in ("n_labels", "rank_counts"):
        assert torch.equal(getattr(together, field), sum(getattr(loss, field) for loss in apart))


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
        assert out.rank_counts[i].tolist() == [int((ranks == k).sum()) for k in range(RANKS)]
        assert out.n_labels[i] == len(part.labels)
    torch.testing.assert_close(out.sums, torch.stack(expected))
    weights = torch.tensor([0.3, -2.0, 5.0])
    (out.sums * weights).sum().backward()
    (torch.stack(expected) * weights).sum().backward()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert head.grad is None
    assert ours[2].grad is not None and not ours[2].grad.any()  # zero, not missing


def test_ranks_are_counted_when_asked_for():
    out = draft_loss([draw(4, D)], [LossPart(torch.tensor([0, 2]), torch.tensor([5, 6]))], draw(V, D, seed=1), False)
    assert out.rank_counts.shape == (1, 0) and out.n_labels.tolist() == [2]
