"""The budget: learned rates, measured seconds, the width and the depth that pay, and rests for drafters that do not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longdraft.infer.budget import EXPLORE_EVERY, HURDLE, TRIAL_EVERY, TRYING, Policy, widths_up_to, worth_of
from longdraft.infer.budget import WIDTHS as WIDTHS_OF_A_PASS
from longdraft.infer.costs import RECENT, STALE, Seconds
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import PAD, Lists, TokenTree

ACTIVE = torch.tensor([True])
WIDTHS, STAGES = (1, 2, 4, 8), (0, 1, 2, 3)
PROMPT = [5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1, 17, 3]


def classes(count):
    """This many classes of a drafter with one stage, as `Drafter.class_stages`."""
    return [0, *[1] * (count - 1)]


def policy_with(seconds, n_classes=8, widths=WIDTHS, stages=None):
    """A policy whose passes take these seconds, by width; on the host, where it decides at once."""
    policy = Policy(stages or classes(n_classes), widths, on_host=True)
    for width, taken in seconds.items():
        policy.passes.record(width, taken)
    return policy


def tree(paths, root=0):
    return TokenTree.from_paths([root], [paths])


def learn(policy, proposal, committed, times=1, slot=0):
    for _ in range(times):
        policy.learn(slot, Lists(proposal.tokens.tolist(), proposal.parents.tolist(), None), committed)


def slots(active=ACTIVE):
    """What pruning asks of a SlotState."""
    state = SimpleNamespace(active=active, committed=[[3] * taking_part for taking_part in active.tolist()])
    state.run = lambda key, owners, work, *inputs: work(state, *inputs)
    return state


def prune(policy, proposal, active=ACTIVE):
    return policy.prune(proposal, slots(active))[0]


@pytest.mark.parametrize(
    ("sizes", "per_unit", "measured", "wanted"),
    [
        ((1, 3, 5, 11), 0.04, [], {1: 1.0, 11: 1.4}),
        # Medians, a line between measured sizes, and a fraction of the smallest one beyond.
        ((1, 3, 5, 15), 0.04, [(1, 2.0), (1, 9.0), (1, 2.2), (5, 4.2)], {1: 2.2, 3: 3.2, 5: 4.2, 15: 5.08}),
        ((1, 4), 0.04, [(1, 2.0), (4, 1.0)], {1: 2.0, 4: 2.0}),  # a wider pass is never taken to be cheaper
        ((1, 2, 3), 1.0, [(2, 0.5)], {1: 0.25, 2: 0.5, 3: 0.75}),  # stages
        # A slow moment is forgotten.
        ((1, 4, 8), 0.04, [(4, 9.0)] + [(1, 1.0), (8, 1.2)] * STALE, {1: 1.0, 4: 1 + 0.2 * 3 / 7, 8: 1.2}),
    ],
)
def test_seconds_by_size(sizes, per_unit, measured, wanted):
    seconds = Seconds(sizes, per_unit)
    for size, taken in measured:
        seconds.record(size, taken)
    assert {size: seconds.table[size] for size in wanted} == pytest.approx(wanted)


def test_nodes_that_prove_right_come_first_and_the_others_are_left_out():
    """Node 3 (class 3) is always right and nodes 1 and 2 never are, so those are not worth their rows."""
    policy = policy_with({1: 1.0, 2: 1.1, 4: 1.5, 8: 3.0})
    proposal = tree([[5], [6], [7, 9]])
    learn(policy, proposal, [7, 1], times=40)
    kept = prune(policy, proposal)
    assert kept.paths() == [[[7]]] and kept.width == 2
    learn(policy, proposal, [7, 9], times=80)
    kept = prune(policy, proposal)
    assert kept.paths()[0][:2] == [[7], [7, 9]] and kept.parents[0, :3].tolist() == [-1, 0, 1]
    assert kept.classes[0, :3].tolist() == [0, 3, 4]
    learn(policy, proposal, [1], times=150)  # where nothing proves right, decoding is plain
    assert prune(policy, proposal).width == 1


def test_unverified_nodes_are_learned_from_too():
    """Pruned nodes are judged by the committed tokens too, as far as those reach."""
    policy = Policy(classes(8), WIDTHS)
    proposal = tree([[5, 6, 7]])
    learn(policy, proposal, [5])  # depth 2 and 3 stay unknown
    assert policy._rates.values[1] > policy._rates.values[2] == policy._rates.values[3]
    learn(policy, proposal, [5, 1])  # now depth 2 is known to be wrong, depth 3 never came up
    assert policy._rates.values[1] > policy._rates.values[3] > policy._rates.values[2]


def test_a_request_starts_with_what_earlier_ones_taught():
    policy = Policy(classes(8), WIDTHS)
    learn(policy, tree([[5], [6]]), [6], times=50)
    policy.start_request()
    rates = policy._rates.values
    assert rates[2] > 0.9 and rates[1] < 0.1
    learn(policy, tree([[5], [6]]), [5], times=12)  # and unlearns it soon
    assert rates[1] > rates[2]


def test_padding_is_never_kept_before_a_node():
    policy = policy_with({1: 1.0})
    proposal = TokenTree(torch.tensor([[0, 9, 5, 6]]), torch.tensor([[-1, PAD, 0, 2]]))
    learn(policy, proposal, [5, 6], times=20)
    assert prune(policy, proposal).paths() == [[[5], [5, 6]]]


def test_without_choosing_a_pass_is_hardly_wider_than_its_tree():
    """But where work is recorded: each width would be another recording."""
    assert widths_up_to(80, automatic=False) == [1, *(width for width in WIDTHS_OF_A_PASS if width <= 80), 81]
    assert widths_up_to(80, automatic=False, recorded=True) == [1, 81]


def test_without_choosing_every_node_is_verified():
    policy = Policy(classes(8), (1, 40), automatic=False)
    proposal = tree([[5], [6], [7]])
    kept = prune(policy, proposal)
    assert kept.width == 40 and kept.paths() == proposal.paths()
    assert prune(policy, TokenTree.roots(torch.tensor([3]))).width == 1


def test_the_chosen_width_has_the_most_expected_tokens_a_second():
    """Compare with every width, by brute force, on random rates and costs."""
    torch.manual_seed(1)
    for _ in range(40):
        seconds = 1 + torch.rand(5).cumsum(0).numpy()
        widths = (1, 2, 3, 4, 6)
        policy = policy_with(dict(zip(widths, map(float, seconds), strict=True)), 16, widths)
        policy._rates.values = rates = torch.rand(16).mul(0.5).tolist()
        worth = np.sort([rates[1], rates[1] * rates[2], rates[3], rates[4], rates[5]])[::-1]
        speeds = [(1 + worth[: width - 1].sum()) / cost for width, cost in zip(widths, seconds, strict=True)]
        best = int(np.argmax(speeds))
        wanted = widths[best] if speeds[best] > HURDLE * speeds[0] else 1
        assert prune(policy, tree([[1, 2], [2], [3], [4]])).width == wanted


@pytest.mark.parametrize("on_host", [True, False])
def test_the_likeliest_nodes_are_picked_parents_first(monkeypatch, on_host):
    """Compare with the product of the rates along every path: the best come first, as many as the policy decided, at
    once from lists, and later from what was expected of a tree on a device, which must not be read."""
    monkeypatch.setattr(TokenTree, "on_host", on_host)
    torch.manual_seed(2)
    policy = Policy(classes(64), (*WIDTHS, 16))
    for _ in range(40):
        policy._rates.values = torch.rand(64).clamp(min=1e-3).tolist()
        proposal = TokenTree.from_paths([1, 2], [torch.randint(4, (5, 3)).tolist() for _ in range(2)])
        kept, expected = policy.prune(proposal, slots(torch.tensor([True, False])))
        width = min(policy.width, proposal.width)
        assert kept.width == policy.fitting(width)
        fresh = TokenTree(kept.tokens, kept.parents)
        assert torch.equal(kept.ancestors, fresh.ancestors) and torch.equal(kept.depths, fresh.depths)
        for slot, (tokens, parents) in enumerate(zip(*proposal.lists[:2], strict=True)):
            worth = worth_of(parents, range(len(parents)), policy._rates.values)
            order = sorted(range(len(parents)), key=worth.__getitem__, reverse=True)
            if slot == 0:
                by_width = np.cumsum([worth[node] for node in order]).tolist()
                if on_host:
                    policy.width = 0
                    policy.decide(by_width)
                    assert min(policy.width, proposal.width) == width and expected is None
                else:
                    assert expected.tolist() == pytest.approx(by_width)
            moved = [order.index(parents[node]) if parents[node] >= 0 else parents[node] for node in order[:width]]
            assert kept.tokens[slot, :width].tolist() == [tokens[node] for node in order[:width]]
            assert kept.parents[slot, :width].tolist() == moved
            assert kept.classes[slot, :width].tolist() == order[:width]


def test_where_the_host_may_not_wait_a_later_width_is_decided(monkeypatch):
    monkeypatch.setattr(TokenTree, "on_host", False)
    policy, proposal = Policy(classes(8), WIDTHS), tree([[5], [6], [7]])
    kept, expected = policy.prune(proposal, slots())
    assert kept.width == 4 and policy.width == 8
    policy.decide(expected.tolist())
    assert policy.width in WIDTHS[:3]


def steps(policy, count, chance, draft_seconds, generator=None):
    """Take steps whose single node is right this often, and return in which ones there was a proposal."""
    proposal, proposed, hits = tree([[5]]), [], 0.0
    for _ in range(count):
        proposed.append(not policy.rests)
        if policy.rests:
            policy.record(1, 1.0, 0.0, 1)
            continue
        policy.budget(1, [0])
        width = prune(policy, proposal).width
        hits += chance
        right = hits >= 1 if generator is None else float(torch.rand((), generator=generator)) < chance
        hits -= hits >= 1
        learn(policy, proposal, [5, 1] if right else [1])
        policy.record(width, 1.0 + 0.1 * (width - 1) + draft_seconds, draft_seconds, 2 if right and width > 1 else 1)
    return proposed


@pytest.mark.parametrize("draft_seconds", [0.005, 0.04, 0.4])
def test_a_drafter_that_does_not_pay_is_asked_so_seldom_that_it_costs_little(draft_seconds):
    policy = policy_with({1: 1.0}, 2, (1, 2))
    proposed = steps(policy, 600, 0.02, draft_seconds)
    assert all(proposed[1:RECENT]) and proposed[100:].count(True) > 3
    assert proposed[100:].count(True) * draft_seconds <= 1.3 * TRYING * 500
    policy.start_request()
    assert not policy.rests  # a new request gives it a new trial
    proposed = steps(policy, 300, 0.9, draft_seconds)  # and if it pays, it is always asked
    assert proposed[20:].count(False) <= 300 // STALE  # but for a look at plain decoding now and then


def test_a_text_that_suits_the_drafter_is_drafted_after_one_that_did_not():
    policy = policy_with({1: 1.0}, 2, (1, 2))
    for _ in range(4):
        steps(policy, TRIAL_EVERY + 1, 0.0, 0.4)
        policy.start_request()
        assert steps(policy, TRIAL_EVERY + 1, 1.0, 0.4).count(True) >= TRIAL_EVERY
        policy.start_request()


def test_a_drafter_that_pays_hardly_ever_rests():
    """1.25 times plain decoding's speed, in steps of one or two tokens."""
    policy = policy_with({1: 1.0}, 2, (1, 2))
    proposed = steps(policy, 2000, 0.5, 0.1, torch.Generator().manual_seed(4))
    assert proposed.count(False) < 200


# How many stages a proposal has.


def staged(chances, stage_seconds):
    """A policy that has learned a chain of three stages, right with these chances. A pass costs 1 + 0.05 a node."""
    costs = {width: 0.95 + 0.05 * width for width in (1, 2, 3, 4)}
    policy = policy_with(costs, len(STAGES), tuple(costs), stages=STAGES)
    for depth in (1, 2, 3):
        policy.drafting.record(depth, stage_seconds * depth)
    hits = [0.0] * 3
    for _ in range(300):
        committed = []
        for stage, chance in enumerate(chances):  # evenly spread hits
            hits[stage] += chance
            if hits[stage] < 1:
                break
            hits[stage] -= 1
            committed.append(7 + stage)
        policy.learn(0, Lists([[0, 7, 8, 9]], [[-1, 0, 1, 2]], None), [*committed, 1])
    return policy


def stages_run(policy, n_drafters=1):
    budget = policy.budget(3, [0])
    for _ in range(n_drafters):
        tokens = [7]
        while len(tokens) < min(budget.stages, 3) and budget.goes_on(tree([tokens])):
            tokens.append(7 + len(tokens))
    return len(tokens)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("chances", "stage_seconds", "wanted"),
    [((0.9, 0.9, 0.9), 0.1, 3), ((0.8, 0.05, 0.9), 0.1, 1), ((0.9, 0.7, 0.1), 0.1, 2), ((0.6, 0.6, 0.6), 0.5, 1)],
)
def test_a_stage_is_run_where_its_price_pays(chances, stage_seconds, wanted, on_host):
    """Now and then one more: otherwise a stage that was wrong once would never be tried again."""
    policy = staged(chances, stage_seconds)
    policy._on_host = on_host
    runs = [stages_run(policy) for _ in range(2 * EXPLORE_EVERY)]
    more = min(3, wanted + 1)
    assert runs == [3, *[wanted] * (EXPLORE_EVERY - 2), more, *[wanted] * (EXPLORE_EVERY - 1), more]
    assert policy.stages_run == more


def test_drafters_of_a_combination_run_as_many_stages_as_each_would_alone():
    policy = staged((0.9, 0.9, 0.9), 0.1)
    assert [stages_run(policy, n_drafters=2) for _ in range(3)] == [3, 3, 3]
    assert policy.stages_run == 3


# The same with drafters, by a clock that counts passes.


@pytest.fixture
def counted(monkeypatch):
    """The levels of the passes of LongSpec's block, as they come."""
    levels, plain = [], SlotState.best

    def counting(self, logits_BTV, offset, count, token_ids=None):
        levels.append(offset)
        return plain(self, logits_BTV, offset, count, token_ids)

    monkeypatch.setattr(SlotState, "best", counting)
    return levels


def timed(engine: Engine, passes: list) -> Engine:
    """Let the engine measure with a clock by which a pass of the target takes 1 and one of the draft 0.1."""
    target_passes = []
    engine.runner.model.register_forward_hook(lambda *_: target_passes.append(1))
    engine.runner.work_clock = lambda: len(target_passes) + 0.1 * len(passes)
    return engine


def test_of_a_block_that_is_never_right_nearly_no_level_is_run(memoryless, counted, plain_tokens):
    target, block = memoryless
    block.final_norm.weight.data.mul_(-1)  # the worst token of all
    engine = timed(Engine(target, LongSpecDrafter(target, block, (1,) * 5)), counted)
    params = SamplingParams(max_new_tokens=200)
    (one,) = engine.generate([PROMPT], params)
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    assert len(counted) <= 45
    counted.clear()
    (one,) = engine.generate([PROMPT], params)
    assert one.stats.steps >= 199 and len(counted) <= RECENT + 199 // 10 and max(counted) <= 2


def test_many_short_requests_are_no_new_trials(memoryless, counted):
    """Each begins with the rates of those before, but a drafter that never pays is not tried for each."""
    target, block = memoryless
    block.final_norm.weight.data.mul_(-1)
    engine = timed(Engine(target, LongSpecDrafter(target, block, (1,) * 5), slots=4), counted)
    answers = engine.generate([PROMPT] * 100, SamplingParams(max_new_tokens=12))
    n_steps = sum(one.stats.steps for one in answers) // 4
    assert n_steps >= 290 and len(counted) <= n_steps // 3


@pytest.mark.parametrize("combined", [False, True])
def test_of_a_block_that_is_always_right_nearly_all_levels_are_run(memoryless, counted, plain_tokens, combined):
    target, block = memoryless
    drafter = LongSpecDrafter(target, block, (1,) * 5)
    drafter = Combined([drafter, PromptLookup(length=2)]) if combined else drafter
    engine, params = timed(Engine(target, drafter), counted), SamplingParams(max_new_tokens=200)
    engine.generate([[8, 8, 21, 0, 6]], params)  # it learns here
    counted.clear()
    (one,) = engine.generate([PROMPT], params)
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    # Some nodes have a class that was hardly ever seen, so nothing says yet that they are right.
    assert counted.count(5) >= 0.85 * counted.count(1) >= 0.75 * one.stats.steps and one.tokens_per_step > 5
