"""TriForce and small-model drafting: exact, right about what they hold, and as good as they must be where the smaller
level knows all that the larger one knows."""

from dataclasses import replace

import pytest
import torch

from longdraft.infer.drafters.base import Request
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.models.decoder_config import DeltaConfig
from longdraft.models.passes import Pass

VOCAB = 61
SAMPLINGS = {
    "greedy_penalty": SamplingParams(contextual_penalty=1.2, contextual_window=16),
    "T1": SamplingParams(temperature=1.0),
}


DELTA = DeltaConfig((0, 1), key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4)


@pytest.fixture(params=["attention", "linear attention"])
def small(tiny_target, request):
    layers = {"n_layers": 1} if request.param == "attention" else {"n_layers": 3, "delta": DELTA}
    return tiny_target(vocab_size=VOCAB, n_kv_heads=1, seed=5, **layers)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["small_model", "self", "hierarchy", "wrong_small"])
def test_what_knows_everything_is_always_right(target, small, sampling, name, prompts):
    """The target as its own small model with a window for all, and a budget for all: every node is accepted. Also where
    the small model is hardly ever right, so that the inner level takes many passes."""
    drafter, depth = {
        "small_model": lambda: (SmallModelDrafter(target, target, gamma=3), 3),
        "self": lambda: (TriForceDrafter(target, budget=200), 6),
        "hierarchy": lambda: (TriForceDrafter(target, target, budget=200), 6),
        "wrong_small": lambda: (TriForceDrafter(target, small, budget=200), 6),
    }[name]()
    # Penalties of the tokens drafted meanwhile are left out of a small model's ranking.
    params = replace(SAMPLINGS[sampling], contextual_penalty=1.0) if name == "small_model" else SAMPLINGS[sampling]
    params = [replace(params, seed=i, max_new_tokens=6 * (depth + 1)) for i in range(3)]
    for generation in Engine(target, drafter, nodes=None, slots=2).generate(prompts(40, 1, 18), params):
        assert generation.acceptance == 1.0 and generation.stats.steps == 6
        assert generation.stats.accepted_at_depth == [6] * depth


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        ({"sliding_windows": (7, 16)}, 32),  # a window and a chain beside the first chunk
        ({"n_layers": 3, "delta": DELTA}, 200),
        ({"n_layers": 3, "delta": DELTA, "sliding_windows": (None, None, 9)}, 24),
    ],
    ids=["windows", "linear attention", "both"],
)
@pytest.mark.parametrize("select", ["retrieved", "recent"])
def test_layers_that_select_nothing_are_those_of_the_full_cache(tiny_target, small, shape, budget, select, prompts):
    """Every node is accepted, although the budget does not hold the text where all layers slide or are linear."""
    target = tiny_target(vocab_size=VOCAB, **shape)
    params = [SamplingParams(temperature=1.0, seed=i, max_new_tokens=70) for i in range(3)]
    drafter = TriForceDrafter(target, small, budget=budget, select=select)
    for generation in Engine(target, drafter, nodes=None, slots=2).generate(prompts(60, 1, 18), params):
        assert generation.acceptance == 1.0 and generation.stats.accepted_at_depth == [10] * 6


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("inside", [True, False], ids=["triforce", "alone"])
def test_a_small_model_proposes_what_a_fresh_one_proposes(target, small, inside, sampling, prompts):
    """After rejections by the middle level, by the outer one, and none: nothing of a void token is left, and no
    committed one is missing. Its window holds everything here."""
    outer = SmallModelDrafter(target, small, gamma=3)
    drafter = outer
    if inside:
        outer = TriForceDrafter(target, small, gamma=3, budget=32)
        drafter = outer.inner
    propose, compared, depths = drafter.propose, [], []

    def checked(state, budget):
        before = state.roots.clone(), state.positions.clone()
        tree = propose(state, budget)
        for slot in state.active.nonzero()[:, 0].tolist():
            text = state.history.tokens[slot, : int(state.positions[slot]) + 1]
            fresh, full = SmallModelDrafter(target, small, gamma=3), target.model.new_cache(1, 1)
            fresh.on_start(0, Request(0, text.tolist(), state.sampling.params[slot]), full)
            history = History(1, state.history.tokens.shape[1])
            history.start(0, text.tolist())
            history.prompt_lengths[0] = state.history.prompt_lengths[slot]
            sampling_of_slot = type(state.sampling)([state.sampling.params[slot]], state.roots.device)
            place = before[0][slot : slot + 1], before[1][slot : slot + 1]
            alone = SlotState(*place, torch.tensor([True]), history, sampling_of_slot, [text.tolist()])
            assert fresh.propose(alone, budget).tokens[0].tolist() == tree.tokens[slot].tolist()
            compared.append(slot)
        return tree

    drafter.propose = checked
    params = [replace(SAMPLINGS[sampling], seed=i, max_new_tokens=24) for i in range(3)]
    for generation in Engine(target, outer, nodes=None, slots=2).generate(prompts(30, 1, 12), params):
        depths.append(generation.stats.accepted_at_depth)
    assert len(compared) > 40 and (sampling == "greedy_penalty" or any(depths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_that_depends_on_the_length_and_half_precision(request, tiny_target, dtype, prompts):
    """Rows are copied as they were rotated, and the query is rotated as the full cache's would be."""
    if dtype == torch.bfloat16:
        request.getfixturevalue("c_kernels")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = tiny_target(vocab_size=VOCAB, rope=rope, max_positions=40, dtype=dtype)
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=21)
    engine = Engine(target, TriForceDrafter(target, budget=64), nodes=None)
    for prompt in prompts(15, 3):
        (result,) = engine.generate([prompt], params)
        assert result.acceptance == 1.0 and result.tokens == Engine(target).generate([prompt], params)[0].tokens


def test_a_small_model_reads_the_end_of_a_text_and_each_token_of_it_about_twice(target, small, monkeypatch, prompts):
    """A new request and a full cache begin half a window before the root; between them a pass has what is missing, and
    with linear attention the last root once more."""
    rows, again = [], int(small.model.config.delta is not None)
    small.model.register_forward_pre_hook(lambda module, args: rows.append(args[0].tokens_BT.shape[1]))
    monkeypatch.setattr(SmallModelDrafter, "window", 32)
    drafter = SmallModelDrafter(target, small, gamma=2)
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=100)
    (result,) = Engine(target, drafter, nodes=None).generate(prompts(120), params)
    assert rows[0] == 17 and max(rows[1:]) == 17 and sorted(set(rows)) == [1, *range(2, 4 + again), 17]
    assert 100 // 17 <= rows.count(17) <= 1 + 100 // (32 - 16 - 2 - 3 - again)
    assert sum(count for count in rows if count < 17) < 100 + (2 + again) * result.stats.steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_within_triforce_a_small_model_begins_anew_only_when_its_cache_is_full(
    target, small, monkeypatch, temperature, prompts
):
    """Tokens of inner chains no longer count after the outer step, whether they were accepted or rejected. With linear
    attention a cache that was filled within a chain is filled again after it."""
    monkeypatch.setattr(SmallModelDrafter, "window", 64)
    drafter, filled, read = TriForceDrafter(target, small, budget=32), [], set()
    plan = drafter.inner.plan

    def watched(state, budget):
        rows, planned = int(drafter.inner._cache.lengths.max()), plan(state, budget)
        filled.extend([rows] if planned[2] else [])
        read.add(planned[1])
        return planned

    drafter.inner.plan = watched
    params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=120)
    Engine(target, drafter, nodes=None).generate(prompts(80), params)
    # The window without the next chain and the most that a step of each level may have committed.
    early, again = sum(rows < 64 - 6 - 7 - 3 for rows in filled[1:]), int(small.model.config.delta is not None)
    assert len(filled) > 2 and early <= again * (len(filled) - 1) // 2
    # The longest chain that a step of the outer level may add; the last roots again, and the inner level's last chain.
    assert max(read - {32}) <= 6 + 2 * again


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "triforce"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_a_full_cache_begins_anew_and_proposes_what_the_model_chooses_after_those_tokens(
    target, small, monkeypatch, gamma, inside, prompts
):
    """The first tokens of the text and the last ones, at positions inside the cache. Of several slots, at whatever
    places they are; and after tokens that an outer level rejects."""
    monkeypatch.setattr(SmallModelDrafter, "window", 14)
    monkeypatch.setattr(SmallModelDrafter, "sinks", 3)
    outer = drafter = SmallModelDrafter(target, small, gamma=gamma)
    if inside:
        outer = TriForceDrafter(target, small, gamma=gamma, budget=32)
        drafter = outer.inner
    propose, spans = drafter.propose, set()

    def checked(state, budget):
        tree = propose(state, budget)
        for slot in state.active.nonzero()[:, 0].tolist():
            skipped, root = int(drafter._skipped[slot]), int(state.positions[slot])
            whole = state.history.tokens[slot, : root + 1].tolist()
            text = [*whole[:3], *whole[3 + skipped :]]
            spans.add(root - skipped)
            for token in tree.tokens[slot, 1:].tolist():
                assert token == int(small.model(Pass(torch.tensor([text]))).logits[0, -1].argmax())
                text.append(token)
        return tree

    drafter.propose = checked
    params = [SamplingParams(max_new_tokens=count) for count in (50, 20, 39)]
    Engine(target, outer, nodes=None, slots=2).generate(prompts(30, 1, 12), params)
    assert {0, 7, 9} <= spans and max(spans) <= 14 - gamma


def test_models_that_do_not_go_together_are_named(target, tiny_target):
    other = tiny_target(vocab_size=VOCAB + 3, seed=4)
    for make in (SmallModelDrafter, TriForceDrafter):
        with pytest.raises(ValueError, match="small"):
            make(target, other)
    same_size = tiny_target(vocab_size=VOCAB, seed=4)
    same_size.fingerprint = {**same_size.fingerprint, "tokenizer": "a"}
    SmallModelDrafter(target, same_size)  # the target has no tokenizer to differ from
    target.fingerprint = {**target.fingerprint, "tokenizer": "b"}
    with pytest.raises(ValueError, match="small"):
        SmallModelDrafter(target, same_size)
