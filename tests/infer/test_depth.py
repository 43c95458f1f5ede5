"""How deep a proposal goes: stages are run while they pay, few if none does and all if all do."""

import pytest
import torch

from longdraft.infer.depth import DEEPER_EVERY, FIRST_WHOLE, LEAST_TRIALS, NO_STAGE
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.policy import Policy
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import Lists, TokenTree
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.target import Target

STAGES, ACTIVE = [0, 1, 2, 3], torch.tensor([True])
PROMPT = [5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1, 17, 3]


def chain(*tokens):
    return TokenTree.from_paths([0], [[list(tokens)]])


def policy_with(chances, stage_seconds, fixed=False, other=None):
    """A policy that has learned a chain of three stages, each right with these chances. A pass costs 1 + 0.05 a node.

    other: how often nodes of class 5 are right, which have no stage.
    """
    stages = STAGES if other is None else [*STAGES, NO_STAGE, NO_STAGE]
    policy = Policy(len(stages), (1, 2, 3, 4), stages=stages, fixed_depth=fixed)
    for width in policy.widths:
        policy.costs.record(width, 0.95 + 0.05 * width)
    for stages in (1, 2, 3):
        policy.depth.record(stages, stage_seconds * stages)
    lists, hits = Lists([[0, 7, 8, 9]], [[-1, 0, 1, 2]], None), [0.0] * 3
    for _ in range(300):
        committed = []
        for stage, chance in enumerate(chances):  # evenly spread hits of this share
            hits[stage] += chance
            if hits[stage] < 1:
                break
            hits[stage] -= 1
            committed.append(7 + stage)
        policy.learn(0, lists, [*committed, 1])
    for trial in range(200 if other is not None else 0):
        right = int((trial + 1) * other) > int(trial * other)
        policy.depth.begins(Lists([[0, 3]], [[-1, 0]], [[0, 5]]), ACTIVE)
        policy.learn(0, Lists([[0, 3]], [[-1, 0]], [[0, 5]]), [3 if right else 4])
    return policy


def stages_run(policy):
    policy.depth.begin()
    tokens = [7]
    while len(tokens) < policy.depth.limit(3) and policy.depth.goes_on(chain(*tokens), policy.rates, ACTIVE):
        tokens.append(7 + len(tokens))
    return len(tokens)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("chances", "stage_seconds", "wanted"),
    [((0.9, 0.9, 0.9), 0.1, 3), ((0.8, 0.05, 0.9), 0.1, 1), ((0.9, 0.7, 0.1), 0.1, 2), ((0.6, 0.6, 0.6), 0.5, 1)],
)
def test_a_stage_is_run_where_its_price_pays(chances, stage_seconds, wanted, fixed):
    policy = policy_with(chances, stage_seconds, fixed)
    first = [stages_run(policy) for _ in range(FIRST_WHOLE)]
    assert first == [3] * FIRST_WHOLE and stages_run(policy) == wanted
    assert policy.depth.run == wanted


def test_chances_are_those_of_the_levels():
    policy = policy_with((0.75, 0.5, 0.25), 0.1)
    for stage, chance in enumerate((0.75, 0.5, 0.25), 1):
        assert abs(policy.depth.chance(0, stage) - chance) < 0.12
    fresh = Policy(4, (1, 2, 3, 4), stages=STAGES)
    for _ in range(20):
        fresh.learn(0, Lists([[0, 7]], [[-1, 0]], None), [7, 1])
    assert fresh.depth.chance(0, 3) == fresh.depth.chance(0, 1) > 0.9  # one never tried is as good as the one above it


def test_a_draft_that_is_never_right_is_asked_ever_more_seldom():
    policy = Policy(4, (1, 2, 3, 4), stages=STAGES)
    policy.record(1, 1.0, 0.0, 1)
    asked = []
    for step in range(400):
        if policy.rests:
            policy.record(1, 1.0, 0.0, 1)
            continue
        run = stages_run(policy)
        asked.append((step, run))
        policy.learn(0, Lists([[0, 7]], [[-1, 0]], None), [1])
        policy.record(1, 1.0 + 0.05 * run, 0.05 * run, 1, stages=run)  # too cheap to rest for bringing too little
    assert [run for _, run in asked[FIRST_WHOLE:]] == [1] * (len(asked) - FIRST_WHOLE)
    assert LEAST_TRIALS <= len(asked) < LEAST_TRIALS + 12
    policy.start_request(0)
    assert policy.rests


@pytest.fixture
def counted(monkeypatch):
    """The levels of the passes of LongSpec's block, as they come."""
    levels, plain = [], SlotState.best

    def counting(self, logits_BTV, offset, count, token_ids=None):
        levels.append(offset)
        return plain(self, logits_BTV, offset, count, token_ids)

    monkeypatch.setattr(SlotState, "best", counting)
    return levels


def memoryless(tiny_target) -> tuple[Target, LongSpec]:
    """A target whose next token depends only on the last one, and a block that computes the same."""
    target = tiny_target(vocab_size=61, std=0.5)
    block = LongSpec(LongSpecConfig.for_target(target.model.config, window=8, final_norm=True))
    for name, parameter in target.model.named_parameters():
        if any(part in name for part in ("o_proj", "down")):
            parameter.data.zero_()
    block.final_norm.weight.data.copy_(target.model.norm.weight)
    return target, block.requires_grad_(False)


def timed(engine: Engine, passes: list) -> Engine:
    """Let the engine measure with a clock by which a pass of the target takes 1 and one of the draft 0.1."""
    target_passes = []
    engine.runner.model.register_forward_hook(lambda *_: target_passes.append(1))
    engine.runner.work_clock = lambda: len(target_passes) + 0.1 * len(passes)
    return engine


def test_of_a_block_that_is_never_right_near_no_level_is_run(tiny_target, counted, plain_tokens):
    target, block = memoryless(tiny_target)
    block.final_norm.weight.data.mul_(-1)  # the worst token of all
    engine = timed(Engine(target, LongSpecDrafter(target, block, (1,) * 5)), counted)
    params = SamplingParams(max_new_tokens=200)
    (one,) = engine.generate([PROMPT], params)
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    assert len(counted) <= 5 * FIRST_WHOLE + 12
    counted.clear()
    (one,) = engine.generate([PROMPT], params)
    assert one.stats.steps >= 199 and len(counted) <= 12 and set(counted) == {1}


@pytest.mark.parametrize("combined", [False, True])
def test_of_a_block_that_is_always_right_nearly_all_levels_are_run(tiny_target, counted, plain_tokens, combined):
    target, block = memoryless(tiny_target)
    drafter = LongSpecDrafter(target, block, (1,) * 5)
    drafter = Combined([drafter, PromptLookup(length=2)]) if combined else drafter
    engine, params = timed(Engine(target, drafter), counted), SamplingParams(max_new_tokens=200)
    engine.generate([[8, 8, 21, 0, 6]], params)  # it learns here
    counted.clear()
    (one,) = engine.generate([PROMPT], params)
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    # Some nodes have a class that was hardly ever seen, so nothing says yet that they are right.
    assert counted.count(5) >= 0.85 * counted.count(1) >= 0.75 * one.stats.steps and one.tokens_per_step > 5


@pytest.mark.parametrize(
    ("look_up", "chances", "wanted"),
    [(0.95, (0.8, 0.8, 0.8), False), (0.1, (0.8, 0.8, 0.8), True), (0.1, (0.05, 0.05, 0.05), False)],
)
def test_beside_a_look_up_the_first_stage_is_run_where_it_pays(look_up, chances, wanted):
    """A look-up that is mostly right takes no time and leaves a draft little to add."""
    policy = policy_with(chances, 0.15, other=look_up)
    assert policy.depth.asks_first
    beside = Lists([[0, 5, 6]], [[-1, 0, 1]], [[0, 5, 5]])
    for _ in range(FIRST_WHOLE + 1):
        policy.depth.begin()
        found = policy.depth.begins(beside, ACTIVE)
    assert found == wanted and policy.depth.run == int(wanted)
    assert not policy.depth.idle()  # otherwise the look-up would be left out too


def test_slots_whose_look_ups_found_more_and_less():
    policy = policy_with((0.8, 0.8, 0.8), 0.15, other=0.1)
    policy.start(2)
    others = Lists([[0, 5, 6], [0, 7]], [[-1, 0, 1], [-1, 0]], [[0, 5, 5], [0, 5]])
    for _ in range(FIRST_WHOLE + 1):
        policy.depth.begin()
        assert policy.depth.begins(others, torch.tensor([True, True]))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_first_stage_that_is_right_only_where_the_look_up_is_adds_nothing(elsewhere):
    """Both are right in half of the steps: in the same ones, or in different ones."""
    policy = policy_with((0.5, 0.1, 0.1), 0.15, other=0.5)
    others = Lists([[0, 3]], [[-1, 0]], [[0, 5]])
    for step in range(60):
        policy.depth.begin()
        policy.depth.begins(others, ACTIVE)
        alike, apart = Lists([[0, 3]], [[-1, 0]], [[0, 1]]), Lists([[0, 3, 7]], [[-1, 0, 0]], [[0, 5, 1]])
        policy.learn(0, apart if elsewhere else alike, [(3, 7 if elsewhere else 4)[step % 2]])
    assert policy.depth.chance(0, 1) > 0.4
    assert policy.depth.begins(others, ACTIVE) == elsewhere


def test_where_a_look_up_is_right_a_block_rests(tiny_target, counted, plain_tokens):
    """On text that repeats itself the look-up suffices, although the block is always right too."""
    target, block = memoryless(tiny_target)
    drafter = Combined([LongSpecDrafter(target, block, (1,) * 5), PromptLookup(length=5)])
    engine, params = timed(Engine(target, drafter), counted), SamplingParams(max_new_tokens=110)
    (one,) = engine.generate([PROMPT], params)  # greedy text of such a target must end in a loop
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    counted.clear()
    (one,) = engine.generate([[*PROMPT, *one.tokens]], params)
    assert counted.count(1) <= 0.2 * one.stats.steps and one.tokens_per_step > 5


def test_a_small_model_stops_where_it_does_not_pay(tiny_target, plain_tokens, monkeypatch):
    target, small = tiny_target(vocab_size=61), tiny_target(vocab_size=61, n_layers=1, seed=5)
    passes, plain = [], SmallModelDrafter._pass

    def counting(self, *given):
        passes.append(given[0].shape)
        return plain(self, *given)

    monkeypatch.setattr(SmallModelDrafter, "_pass", counting)
    drafter = SmallModelDrafter(target, small, gamma=5, sinks=4, window=32)
    engine, params = timed(Engine(target, drafter), passes), SamplingParams(max_new_tokens=150)
    (one,) = engine.generate([PROMPT], params)
    assert [one.tokens] == plain_tokens(target, [PROMPT], [params])
    assert len(passes) < 1.5 * one.stats.steps


@pytest.mark.parametrize("fixed", [False, True])
def test_now_and_then_a_stage_more_than_pays_is_run(fixed):
    """Otherwise a stage that was wrong once would never be tried again."""
    policy = policy_with((0.8, 0.05, 0.9), 0.1, fixed)
    runs = [stages_run(policy) for _ in range(2 * DEEPER_EVERY)]
    assert [place for place, run in enumerate(runs, 1) if run == 2] == [DEEPER_EVERY, 2 * DEEPER_EVERY]
    assert runs[:FIRST_WHOLE] == [3] * FIRST_WHOLE and runs.count(1) == 2 * DEEPER_EVERY - FIRST_WHOLE - 2
