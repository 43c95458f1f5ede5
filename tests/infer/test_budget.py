"""The node budget: learned rates, measured costs, the width that pays, rest for a drafter that does not."""

import numpy as np
import pytest
import torch

from longdraft.infer.budget import HURDLE, LONGEST_REST, TRIAL_STEPS, Budget, Costs
from longdraft.infer.tree import PAD, TokenTree

ACTIVE = torch.tensor([True])
WIDTHS = (1, 2, 4, 8)


def tree(paths, root=0):
    return TokenTree.from_paths([root], [paths])


def learn(budget, proposal, committed, times=1, slot=0):
    for _ in range(times):
        budget.learn(slot, proposal.tokens[slot].tolist(), proposal.parents[slot].tolist(), None, committed)


def test_costs_are_medians_between_measured_widths_and_a_share_beyond():
    costs = Costs([1, 3, 5, 11, 15])
    assert [costs.of(1), costs.of(11)] == pytest.approx([1.0, 1.4])
    for seconds in (2.0, 9.0, 2.2):
        costs.record(1, seconds)
    costs.record(5, 4.2)
    assert [costs.of(width) for width in (1, 3, 5)] == pytest.approx([2.2, 3.2, 4.2])
    assert costs.of(15) == pytest.approx(4.2 + 10 * 0.04 * 2.2)


def test_a_wider_pass_is_never_taken_to_be_cheaper():
    costs = Costs([1, 4])
    costs.record(1, 2.0)
    costs.record(4, 1.0)
    assert [costs.of(1), costs.of(4)] == [2.0, 2.0]


def test_nodes_that_prove_right_come_first_and_the_others_are_left_out():
    """Node 3 (class 3) is always right, nodes 1 and 2 never: they are not worth a row each."""
    budget = Budget(8, WIDTHS)
    proposal = tree([[5], [6], [7, 9]])
    for width, seconds in ((1, 1.0), (2, 1.1), (4, 1.5), (8, 3.0)):
        budget.costs.record(width, seconds)
    learn(budget, proposal, [7, 1], times=40)
    kept = budget.prune(proposal, ACTIVE)
    assert kept.paths() == [[[7]]] and kept.width == 2
    learn(budget, proposal, [7, 9], times=80)
    kept = budget.prune(proposal, ACTIVE)
    assert kept.paths()[0][:2] == [[7], [7, 9]] and kept.parents[0, :3].tolist() == [-1, 0, 1]
    assert kept.classes[0, :3].tolist() == [0, 3, 4]


def test_where_nothing_proves_right_decoding_is_plain():
    budget = Budget(8, WIDTHS)
    for width, seconds in ((1, 1.0), (2, 1.1), (4, 1.5), (8, 3.0)):
        budget.costs.record(width, seconds)
    proposal = tree([[5], [6], [7]])
    learn(budget, proposal, [1], times=60)
    assert budget.prune(proposal, ACTIVE).width == 1


def test_unverified_nodes_are_learned_from_too():
    """What was pruned away is judged by the committed tokens, as far as they reach."""
    budget = Budget(8, WIDTHS)
    proposal = tree([[5, 6, 7]])
    learn(budget, proposal, [5])  # depth 2 and 3 stay unknown
    assert budget._slots[0].trials[1] > budget._slots[0].trials[2]
    learn(budget, proposal, [5, 1])  # now depth 2 is known to be wrong, depth 3 never came up
    rates = budget._rates[0]
    assert rates[1] > rates[3] > rates[2]


def test_a_request_starts_with_what_earlier_ones_taught():
    budget = Budget(8, WIDTHS)
    learn(budget, tree([[5], [6]]), [6], times=50)
    budget.begin(0)
    rates = budget._rates[0]
    assert rates[2] > 0.9 and rates[1] < 0.1
    learn(budget, tree([[5], [6]]), [5], times=12)  # and unlearns it soon
    rates = budget._rates[0]
    assert rates[1] > rates[2]


def test_slots_keep_their_own_nodes_at_one_width():
    budget = Budget(8, WIDTHS)
    budget.start(2)
    proposal = TokenTree.from_paths([0, 0], [[[5], [6]], [[5], [6]]])
    learn(budget, proposal, [5], times=40, slot=0)
    learn(budget, proposal, [6], times=40, slot=1)
    budget.costs.record(1, 1.0)
    budget.costs.record(2, 1.05)
    budget.costs.record(4, 2.5)
    kept = budget.prune(proposal, torch.tensor([True, True]))
    assert kept.tokens.tolist() == [[0, 5], [0, 6]]


def test_padding_is_never_kept_before_a_node():
    budget = Budget(8, WIDTHS)
    proposal = TokenTree(torch.tensor([[0, 9, 5, 6]]), torch.tensor([[-1, PAD, 0, 2]]))
    learn(budget, proposal, [5, 6], times=20)
    kept = budget.prune(proposal, ACTIVE)
    assert kept.paths() == [[[5], [5, 6]]]


def test_a_pruned_tree_has_the_ancestors_and_depths_of_its_own_parents():
    torch.manual_seed(0)
    for _ in range(50):
        paths = torch.randint(4, (5, 3)).tolist()
        proposal = tree(paths)
        budget = Budget(64, (1, 2, 3, 5, 8, 16))
        budget._rates = torch.rand(1, 64).clamp(min=1e-3).tolist()
        kept = budget.prune(proposal, ACTIVE)
        fresh = TokenTree(kept.tokens, kept.parents)
        assert torch.equal(kept.ancestors, fresh.ancestors) and torch.equal(kept.depths, fresh.depths)
        assert all(parent < node for node, parent in enumerate(kept.parents[0].tolist()))


def test_an_expensive_drafter_rests_when_it_does_not_pay_and_twice_as_long_the_next_time():
    budget = Budget(8, WIDTHS)
    budget.costs.record(1, 1.0)
    rests = []
    for _ in range(600):
        if budget.rests:
            rests[-1] += 1
            budget.record(1, 1.0, 0.0, 1)
        else:
            rests += [0] if not rests or rests[-1] else []
            budget.record(2, 1.6, 0.4, 1.2)
    assert [count for count in rests if count][:4] == [16, 32, 64, LONGEST_REST]
    paying = Budget(8, WIDTHS)
    paying.costs.record(1, 1.0)
    for _ in range(5 * TRIAL_STEPS):
        paying.record(2, 1.6, 0.4, 2.0)
        assert not paying.rests


def test_without_choosing_every_node_is_verified():
    budget = Budget(8, (1, 40), automatic=False)
    proposal = tree([[5], [6], [7]])
    kept = budget.prune(proposal, ACTIVE)
    assert kept.width == 40 and kept.paths() == proposal.paths()
    assert budget.prune(TokenTree.roots(torch.tensor([3])), ACTIVE).width == 1


def test_the_chosen_width_has_the_most_expected_tokens_a_second():
    """Against every width, by brute force, on random rates and costs."""
    torch.manual_seed(1)
    for _ in range(40):
        budget = Budget(16, (1, 2, 3, 4, 6))
        seconds = 1 + torch.rand(5).cumsum(0).numpy()
        for width, cost in zip(budget.widths, seconds, strict=True):
            budget.costs.record(width, float(cost))
        budget._rates = torch.rand(1, 16).mul(0.5).tolist()
        proposal = tree([[1, 2], [2], [3], [4]])
        rates = budget._rates[0]
        worth = np.sort([rates[1], rates[1] * rates[2], rates[3], rates[4], rates[5]])[::-1]
        speeds = [(1 + worth[: width - 1].sum()) / cost for width, cost in zip(budget.widths, seconds, strict=True)]
        best = int(np.argmax(speeds))
        wanted = budget.widths[best] if speeds[best] > HURDLE * speeds[0] else 1
        assert budget.prune(proposal, ACTIVE).width == wanted


def test_pruning_on_a_device_picks_the_same_nodes():
    """Tensors instead of lists, at a width given beforehand; here on the CPU."""
    torch.manual_seed(2)
    for _ in range(40):
        budget = Budget(64, (*WIDTHS, 16))
        budget._rates = torch.rand(2, 64).clamp(min=1e-3).tolist()
        proposal = TokenTree.from_paths([1, 2], [torch.randint(4, (5, 3)).tolist() for _ in range(2)])
        active = torch.tensor([True, False])
        on_host = budget.prune(proposal, active)
        on_device = budget._prune_on_device(proposal, active)
        assert torch.equal(on_host.tokens, on_device.tokens) and torch.equal(on_host.parents, on_device.parents)
        assert torch.equal(on_host.classes, on_device.classes)
        budget.record(on_host.width, 1.0, 0.0, 1.0)  # of the one pruned on the host, which has decided already
        budget.record(on_device.width, 1.0, 0.0, 1.0)
        assert not budget._expected


def test_where_nothing_pays_most_steps_do_without_a_proposal():
    budget = Budget(8, WIDTHS)
    budget.costs.record(1, 1.0)
    proposal, proposed = tree([[5], [6]]), 0
    for _ in range(100):
        if not budget.rests:
            proposed += 1
            budget.prune(proposal, ACTIVE)
            learn(budget, proposal, [1])
        budget.record(1, 1.0, 0.01, 1)
    assert 25 <= proposed <= 45
    for _ in range(12):  # and as soon as it pays, all do
        learn(budget, proposal, [5])
        while budget.rests:
            budget.record(1, 1.0, 0.0, 1)
        budget.prune(proposal, ACTIVE)
        budget.record(2, 1.1, 0.01, 2)
    assert not budget.rests and budget.prune(proposal, ACTIVE).paths() == [[[5]]]
