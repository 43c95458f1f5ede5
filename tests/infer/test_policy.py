"""The policy: learned rates, measured costs, the width that pays, and rests for a drafter that does not pay."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longdraft.infer import prune as prune_module
from longdraft.infer.depth import worth_of
from longdraft.infer.measured import SAMPLE_STEPS, Costs
from longdraft.infer.policy import HURDLE, LONGEST_REST, TRIAL_STEPS, Policy
from longdraft.infer.tree import PAD, Lists, TokenTree

ACTIVE = torch.tensor([True])
WIDTHS = (1, 2, 4, 8)


def tree(paths, root=0):
    return TokenTree.from_paths([root], [paths])


def learn(policy, proposal, committed, times=1, slot=0):
    lists = Lists(proposal.tokens.tolist(), proposal.parents.tolist(), None)
    for _ in range(times):
        policy.learn(slot, lists, committed)


def prune(policy, proposal, active=ACTIVE):
    return prune_module.prune(proposal, policy, active)[0]


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
    """Node 3 (class 3) is always right and nodes 1 and 2 never are, so those are not worth their rows."""
    policy = Policy(8, WIDTHS)
    proposal = tree([[5], [6], [7, 9]])
    for width, seconds in ((1, 1.0), (2, 1.1), (4, 1.5), (8, 3.0)):
        policy.costs.record(width, seconds)
    learn(policy, proposal, [7, 1], times=40)
    kept = prune(policy, proposal)
    assert kept.paths() == [[[7]]] and kept.width == 2
    learn(policy, proposal, [7, 9], times=80)
    kept = prune(policy, proposal)
    assert kept.paths()[0][:2] == [[7], [7, 9]] and kept.parents[0, :3].tolist() == [-1, 0, 1]
    assert kept.classes[0, :3].tolist() == [0, 3, 4]


def test_where_nothing_proves_right_decoding_is_plain():
    policy = Policy(8, WIDTHS)
    for width, seconds in ((1, 1.0), (2, 1.1), (4, 1.5), (8, 3.0)):
        policy.costs.record(width, seconds)
    proposal = tree([[5], [6], [7]])
    learn(policy, proposal, [1], times=60)
    assert prune(policy, proposal).width == 1


def test_unverified_nodes_are_learned_from_too():
    """Pruned nodes are judged by the committed tokens too, as far as those reach."""
    policy = Policy(8, WIDTHS)
    proposal = tree([[5, 6, 7]])
    learn(policy, proposal, [5])  # depth 2 and 3 stay unknown
    assert policy._of_slots[0].trials[1] > policy._of_slots[0].trials[2]
    learn(policy, proposal, [5, 1])  # now depth 2 is known to be wrong, depth 3 never came up
    rates = policy.rates[0]
    assert rates[1] > rates[3] > rates[2]


def test_a_request_starts_with_what_earlier_ones_taught():
    policy = Policy(8, WIDTHS)
    learn(policy, tree([[5], [6]]), [6], times=50)
    policy.start_request(0)
    rates = policy.rates[0]
    assert rates[2] > 0.9 and rates[1] < 0.1
    learn(policy, tree([[5], [6]]), [5], times=12)  # and unlearns it soon
    rates = policy.rates[0]
    assert rates[1] > rates[2]


def test_slots_keep_their_own_nodes_at_one_width():
    policy = Policy(8, WIDTHS)
    policy.start(2)
    proposal = TokenTree.from_paths([0, 0], [[[5], [6]], [[5], [6]]])
    learn(policy, proposal, [5], times=40, slot=0)
    learn(policy, proposal, [6], times=40, slot=1)
    policy.costs.record(1, 1.0)
    policy.costs.record(2, 1.05)
    policy.costs.record(4, 2.5)
    kept = prune(policy, proposal, torch.tensor([True, True]))
    assert kept.tokens.tolist() == [[0, 5], [0, 6]]


def test_padding_is_never_kept_before_a_node():
    policy = Policy(8, WIDTHS)
    proposal = TokenTree(torch.tensor([[0, 9, 5, 6]]), torch.tensor([[-1, PAD, 0, 2]]))
    learn(policy, proposal, [5, 6], times=20)
    kept = prune(policy, proposal)
    assert kept.paths() == [[[5], [5, 6]]]


def test_a_pruned_tree_has_the_ancestors_and_depths_of_its_own_parents():
    torch.manual_seed(0)
    for _ in range(50):
        paths = torch.randint(4, (5, 3)).tolist()
        proposal = tree(paths)
        policy = Policy(64, (1, 2, 3, 5, 8, 16))
        policy.rates = torch.rand(1, 64).clamp(min=1e-3).tolist()
        kept = prune(policy, proposal)
        fresh = TokenTree(kept.tokens, kept.parents)
        assert torch.equal(kept.ancestors, fresh.ancestors) and torch.equal(kept.depths, fresh.depths)
        assert all(parent < node for node, parent in enumerate(kept.parents[0].tolist()))


def test_an_expensive_drafter_rests_when_it_does_not_pay_and_twice_as_long_the_next_time():
    policy = Policy(8, WIDTHS)
    policy.costs.record(1, 1.0)
    rests = []
    for _ in range(600):
        if policy.rests:
            rests[-1] += 1
            policy.record(1, 1.0, 0.0, 1)
        else:
            rests += [0] if not rests or rests[-1] else []
            policy.record(2, 1.6, 0.4, 1.2)
    assert [count for count in rests if count][:4] == [16, 32, 64, LONGEST_REST]
    paying = Policy(8, WIDTHS)
    paying.costs.record(1, 1.0)
    for _ in range(5 * TRIAL_STEPS):
        paying.record(2, 1.6, 0.4, 2.0)
        assert not paying.rests


def test_without_choosing_every_node_is_verified():
    policy = Policy(8, (1, 40), automatic=False)
    proposal = tree([[5], [6], [7]])
    kept = prune(policy, proposal)
    assert kept.width == 40 and kept.paths() == proposal.paths()
    assert prune(policy, TokenTree.roots(torch.tensor([3])), ACTIVE).width == 1


def test_the_chosen_width_has_the_most_expected_tokens_a_second():
    """Compare with every width, by brute force, on random rates and costs."""
    torch.manual_seed(1)
    for _ in range(40):
        policy = Policy(16, (1, 2, 3, 4, 6))
        seconds = 1 + torch.rand(5).cumsum(0).numpy()
        for width, cost in zip(policy.widths, seconds, strict=True):
            policy.costs.record(width, float(cost))
        policy.rates = torch.rand(1, 16).mul(0.5).tolist()
        proposal = tree([[1, 2], [2], [3], [4]])
        rates = policy.rates[0]
        worth = np.sort([rates[1], rates[1] * rates[2], rates[3], rates[4], rates[5]])[::-1]
        speeds = [(1 + worth[: width - 1].sum()) / cost for width, cost in zip(policy.widths, seconds, strict=True)]
        best = int(np.argmax(speeds))
        wanted = policy.widths[best] if speeds[best] > HURDLE * speeds[0] else 1
        assert prune(policy, proposal).width == wanted


@pytest.mark.parametrize("on_host", [True, False])
def test_the_likeliest_nodes_are_picked_parents_first(monkeypatch, on_host):
    """Compare with the product of the rates along every path: the best come first, as many as the policy decided. The
    pruning computes it from lists, or with tensors as on a device, where the tree must not be read."""
    monkeypatch.setattr(TokenTree, "on_host", on_host)
    torch.manual_seed(2)
    for _ in range(40):
        policy = Policy(64, (*WIDTHS, 16))
        policy.rates = torch.rand(2, 64).clamp(min=1e-3).tolist()
        proposal = TokenTree.from_paths([1, 2], [torch.randint(4, (5, 3)).tolist() for _ in range(2)])
        kept = prune(policy, proposal, torch.tensor([True, False]))
        width = min(policy.width, proposal.width)
        assert kept.width == policy.fitting(width)
        for slot, (tokens, parents) in enumerate(zip(*proposal.lists[:2], strict=True)):
            worth = worth_of(parents, range(len(parents)), policy.rates[slot])
            order = sorted(range(len(parents)), key=worth.__getitem__, reverse=True)
            if slot == 0:
                policy.width = 0
                policy.decide(np.cumsum([worth[node] for node in order]).tolist())
                assert min(policy.width, proposal.width) == width
            moved = [order.index(parents[node]) if parents[node] >= 0 else parents[node] for node in order[:width]]
            assert kept.tokens[slot, :width].tolist() == [tokens[node] for node in order[:width]]
            assert kept.parents[slot, :width].tolist() == moved
            assert kept.classes[slot, :width].tolist() == order[:width]


class Sizes(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation made."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.most = max(self.most, out.numel())
        return out


def test_on_a_host_pruning_takes_no_square_of_the_nodes():
    """A static tree of thousands of nodes would otherwise make one for every slot, in every step."""
    policy = Policy(400, (*WIDTHS, 400))
    proposal = TokenTree.from_paths([1], [torch.randint(50, (99, 4), generator=torch.manual_seed(3)).tolist()])
    with Sizes() as sizes:
        prune(policy, proposal)
    assert 200 < proposal.width <= sizes.most < 2 * proposal.width


def test_where_nothing_pays_most_steps_do_without_a_proposal():
    policy = Policy(8, WIDTHS)
    policy.costs.record(1, 1.0)
    proposal, proposed = tree([[5], [6]]), 0
    for _ in range(100):
        if not policy.rests:
            proposed += 1
            prune(policy, proposal)
            learn(policy, proposal, [1])
        policy.record(1, 1.0, 0.01, 1)
    assert 25 <= proposed <= 45
    for _ in range(12):  # and as soon as it pays, all do
        learn(policy, proposal, [5])
        while policy.rests:
            policy.record(1, 1.0, 0.0, 1)
        prune(policy, proposal)
        policy.record(2, 1.1, 0.01, 2)
    assert not policy.rests and prune(policy, proposal).paths() == [[[5]]]


def test_steps_of_chance_alone_are_no_loss():
    """A drafter with 1.15 times plain decoding's speed, in steps of one or two tokens, hardly ever rests."""
    generator, policy = torch.Generator().manual_seed(4), Policy(8, WIDTHS)
    policy.costs.record(1, 1.0)
    rested = 0
    for _ in range(2000):
        rested += policy.rests
        tokens = 1 + int(torch.rand((), generator=generator) < 0.5)
        policy.record(*((1, 1.0, 0.0, 1) if policy.rests else (2, 1.3, 0.2, tokens)))
    assert rested < 200


def test_a_cost_of_a_slow_moment_is_forgotten():
    costs = Costs([1, 4, 8])
    costs.record(1, 1.0)
    costs.record(8, 1.2)
    costs.record(4, 9.0)
    assert costs.of(4) == 9.0
    for _ in range(SAMPLE_STEPS):
        costs.record(1, 1.0)
        costs.record(8, 1.2)
    assert costs.of(4) == pytest.approx(1 + 0.2 * 3 / 7) and costs.measured() == {1: 1.0, 8: 1.2}
