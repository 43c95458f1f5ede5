"""Token Recycling: the published tree, its filling and writing against plain loops, the table on disk, exactness."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longdraft.infer.accept import AcceptResult
from longdraft.infer.budget import Budget
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Request
from longdraft.infer.drafters.token_recycling import BLOCK, CHILD_COUNTS, TokenRecycling, largest, static_tree
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.kernels.choice import gumbel_noise
from longdraft.models.passes import Pass, TargetOutput

PROMPTS = [[5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1], [3], [8, 8, 21, 0, 6]]
VOCAB = 61


@pytest.fixture
def target(tiny_target, exact_dtype):
    return tiny_target(vocab_size=VOCAB, dtype=exact_dtype)


def test_the_tree_is_the_published_one():
    tree = static_tree()
    levels = [sorted(node for node in tree if len(node) == depth) for depth in range(7)]
    assert [len(level) for level in levels] == [0, 8, 21, 25, 15, 8, 3]
    for depth, counts in enumerate(CHILD_COUNTS):
        parents = levels[depth] or [()]
        children = [[node[-1] for node in levels[depth + 1] if node[:-1] == parent] for parent in parents]
        assert children == [list(range(count)) for count in counts]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocab=st.sampled_from([8, 9, 100, 40 * BLOCK, 41 * BLOCK]),
    levels=st.sampled_from([3, 50, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_largest_gives_the_values_of_topk(rows, vocab, levels, dtype, seed):
    """With many ties, with few, with tokens that are never possible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, vocab), generator=generator).to(dtype)
    logits[torch.rand(rows, vocab, generator=generator) < 0.2] = -torch.inf
    values, ids = largest(logits, 8)
    assert torch.equal(values, logits.topk(8, dim=1).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == 8 for row in ids.tolist())


def state_of(roots, position=4, params=None):
    batch = len(roots)
    sampling = SlotSampling(params or [SamplingParams()] * batch, torch.device("cpu"))
    positions = torch.arange(batch) + position
    active = torch.ones(batch, dtype=torch.bool)
    return SlotState(torch.tensor(roots), positions, active, History(batch, 64), sampling, [])


def fill_at_random(drafter, seed=0, written=0.7):
    generator = torch.Generator().manual_seed(seed)
    for token in range(drafter.vocab_size):
        if torch.rand((), generator=generator) < written:
            drafter.candidates[token] = torch.randperm(drafter.vocab_size, generator=generator)[:8].int()
            drafter.logits[token] = torch.randn(8, generator=generator).mul(3).sort(descending=True).values.half()


@pytest.mark.parametrize("nodes", [1, 7, 80])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.8, 1.3), (0.0, 1.0)])
def test_the_tree_is_filled_from_the_table(target, nodes, temperatures):
    """Against a loop over the nodes; ranks count the candidates by logit / T + noise of the node's own position."""
    drafter = TokenRecycling(target, nodes)
    fill_at_random(drafter)
    roots = [next(t for t in range(VOCAB) if drafter.candidates[t, 0] >= 0), 60]
    params = [SamplingParams(temperature=t, seed=40 + b) for b, t in enumerate(temperatures)]
    state = state_of(roots, params=params)
    tree = drafter.propose(state, Budget(80))
    for slot, root in enumerate(roots):
        filled = {(): root}
        for node in static_tree()[:nodes]:
            above = filled.get(node[:-1], -1)
            ids = drafter.candidates[above].tolist() if above >= 0 else [-1]
            if ids[0] < 0:
                continue
            scores = drafter.logits[above].float()
            if temperatures[slot]:
                position = state.positions[slot] + len(node)
                noise = gumbel_noise(state.sampling.seeds[slot, None], position[None, None], VOCAB)[0, 0]
                scores = scores / temperatures[slot] + noise[ids]
            filled[node] = ids[scores.sort(descending=True, stable=True).indices[node[-1]]]
        paths = [[filled[node[: i + 1]] for i in range(len(node))] for node in filled if node]
        assert tree.paths()[slot] == paths
    assert torch.equal(tree.depths[0, : 1 + nodes], torch.tensor([0] + [len(node) for node in static_tree()[:nodes]]))


def test_a_smaller_room_takes_the_best_nodes(target):
    drafter = TokenRecycling(target)
    fill_at_random(drafter, written=1.1)
    whole, some = (drafter.propose(state_of([3, 4]), Budget(most)) for most in (80, 9))
    assert (whole.width, some.width) == (81, 10)
    assert some.paths() == [paths[:9] for paths in whole.paths()]


def test_an_empty_table_proposes_nothing(target):
    assert TokenRecycling(target).propose(state_of([3, 4]), Budget(80)).paths() == [[], []]


def observed(drafter, tree, logits, counts):
    accepted = AcceptResult(torch.zeros(len(counts), 1, dtype=torch.int64), tree.tokens[:, :1], torch.tensor(counts))
    drafter.on_step(state_of(tree.tokens[:, 0].tolist()), tree, accepted, TargetOutput(logits=logits))


PATHS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=6)


# The target is only read.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.lists(PATHS, min_size=3, max_size=3), counts=st.tuples(*[st.integers(0, 2)] * 3), seed=st.integers(0, 99)
)
def test_the_first_of_equal_tokens_writes(target, paths, counts, seed):
    """Slots without a request, and padding, write nothing."""
    drafter = TokenRecycling(target)
    roots = [0, 1, 0]
    tree = TokenTree.from_paths(roots, paths)
    tree = tree.pad_to(tree.width + 2)
    logits = torch.randn(3, tree.width, VOCAB, generator=torch.Generator().manual_seed(seed))
    observed(drafter, tree, logits, counts)
    expected = torch.full((VOCAB, 8), -1, dtype=torch.int32)
    for slot, found in reversed(list(enumerate(tree.paths()))):
        for node in reversed(range(1 + len(found) if counts[slot] else 0)):
            expected[tree.tokens[slot, node]] = logits[slot, node].topk(8).indices.int()
    assert torch.equal(drafter.candidates[:VOCAB], expected) and (drafter.candidates[-1] == -1).all()
    written, kept = expected[:, 0] >= 0, drafter.logits[:VOCAB]
    assert (kept[written].diff(dim=1) <= 0).all() and kept[~written].isneginf().all()


@pytest.mark.parametrize("chunk", [512, 3])
def test_a_prompt_seeds_the_table(tiny_target, chunk):
    """Whatever the chunks: candidates are those at a token's last place in the prompt, and the LM head runs nowhere
    else; the root writes its own."""
    prompt, target, written = PROMPTS[0], tiny_target(vocab_size=VOCAB), list[int]()
    logits = target.model(Pass(torch.tensor([prompt]))).logits[0]
    drafter, write, before = TokenRecycling(target), TokenRecycling._write, set(prompt[:-1])
    drafter._write = lambda tokens, *best: (written.extend(tokens.tolist()), write(drafter, tokens, *best))
    assert drafter.needs == {"post_norm"}
    Engine(target, drafter, prefill_chunk=chunk, nodes=None).generate([prompt], SamplingParams(max_new_tokens=1))
    assert set(written[: len(before)]) == before
    for place, token in enumerate(prompt):
        if token not in prompt[place + 1 :]:
            ids = drafter.candidates[token].tolist()
            torch.testing.assert_close(logits[place, ids], logits[place].topk(8).values, rtol=0, atol=1e-4)
    assert int((drafter.candidates[:VOCAB, 0] >= 0).sum()) == len(set(prompt))
    assert drafter.needs == {"logits"}


def test_of_several_prompts_the_last_place_wins(target, exact_dtype):
    """The later prompt, in it the later position."""
    drafter = TokenRecycling(target)
    post_norm = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).to(exact_dtype)
    cache = target.model.new_cache(2, 4)
    for slot, prompt in enumerate([[7, 8, 7, 0], [9, 8, 9, 0]]):
        drafter.on_start(slot, Request(slot, prompt, SamplingParams()), cache)
        drafter.on_prefill(slot, prompt, 0, 3, TargetOutput(post_norm=post_norm[slot : slot + 1]))
    for token, (row, place) in {7: (0, 2), 8: (1, 1), 9: (1, 2)}.items():
        logits = target.model.lm_head(post_norm)[row, place]
        assert torch.equal(logits[drafter.candidates[token].tolist()], logits.topk(8).values)


@pytest.fixture
def chain_target(tiny_target, exact_dtype):
    """Without attention the next token depends on the last one alone: what the table holds is always right."""
    target = tiny_target(vocab_size=VOCAB, dtype=exact_dtype)
    for layer in target.model.layers:
        layer.attention.o_proj.weight.data.zero_()
    return target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_full_table_is_accepted_whole(chain_target, temperature):
    """Greedy: 7 tokens a step. Sampled: every candidate is ranked by the noise that decides, so nearly as many."""
    target = chain_target
    drafter = TokenRecycling(target)
    engine = Engine(target, drafter, nodes=80)
    every = list(range(VOCAB))
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=70)
    assert engine.generate([[*every, 0]], params)[0].stats.steps <= (10 if temperature == 0 else 30)
    drafter.logits[:] = 0  # ranked by the noise alone, candidates are right less often
    if temperature:
        assert engine.generate([[0]], params)[0].stats.steps > 12


def test_a_later_request_starts_with_the_table(chain_target):
    target = chain_target
    drafter = TokenRecycling(target)
    engine = Engine(target, drafter, nodes=80)
    params = SamplingParams(max_new_tokens=40)
    first, again = (engine.generate([[5, 1]], params)[0] for _ in range(2))
    assert first.tokens == again.tokens
    assert again.stats.steps == -(-40 // 7) < first.stats.steps


def test_options_and_a_small_vocabulary(target, tiny_target, exact_dtype):
    assert TokenRecycling(target, 16).max_nodes == 16 and TokenRecycling(target, 1).max_depth == 1
    few = tiny_target(vocab_size=5, dtype=exact_dtype)
    plain, ours = (Engine(few, d).generate([[1, 2]]) for d in ("plain", TokenRecycling(few)))
    assert ours[0].tokens == plain[0].tokens


def test_after_tokens_of_an_earlier_prompt_states_are_those_of_their_own_tokens(target, exact_dtype):
    drafter, prompt = TokenRecycling(target), [3, 4, 5, 6, 7, 8, 0]
    post_norm = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(1)).to(exact_dtype)
    drafter.on_start(0, Request(0, prompt, SamplingParams()), target.model.new_cache(1, 8))
    drafter.on_prefill(0, prompt, 0, 4, TargetOutput())
    assert (drafter.candidates == -1).all()
    drafter.on_prefill(0, prompt, 4, 6, TargetOutput(post_norm=post_norm))
    best = target.model.lm_head(post_norm)[0].topk(8).indices
    assert torch.equal(drafter.candidates[7:9].sort().values.long(), best.sort().values)
    assert (drafter.candidates[:VOCAB] != -1).all(dim=1).nonzero()[:, 0].tolist() == [7, 8]
