"""TokenSwift's drafter: its n-grams, the united trie, the draft pass and its selected cache, when the pass is taken."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.drafters import tokenswift
from longdraft.infer.drafters.tokenswift import SEARCHED, TOKEN_BITS, JoinedTree, TokenSwiftDrafter, most_frequent
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import PAD, TreeShape
from longdraft.kernels.choice import gumbel_noise
from longdraft.models.decoder_config import ExpertsConfig
from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.passes import Pass

VOCAB = 61


def heads(target, kind="linear_chain"):
    """Random heads that disagree with each other and with the target."""
    draft = TokenSwift(TokenSwiftConfig(hidden_size=target.model.config.hidden_size, kind=kind, rms_norm_eps=1e-6))
    generator = torch.Generator().manual_seed(7)
    for parameter in draft.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return draft.to(target.model.lm_head.weight.dtype).requires_grad_(False)


def drafter_for(target, *args, kind="linear_chain", **options):
    return TokenSwiftDrafter(target, heads(target, kind), *args, **options)


@pytest.fixture(autouse=True)
def few_sinks(monkeypatch):
    monkeypatch.setattr("longdraft.infer.drafters.tokenswift.SINKS", 4)


@pytest.fixture
def watched(monkeypatch):
    """(drafter) -> a list that fills with (tree, committed tokens, root positions, max_nodes) of every proposal."""

    def watch(drafter):
        seen, propose = [], drafter.propose

        def proposing(state, max_nodes):
            tree = propose(state, max_nodes)
            seen.append((tree, [list(tokens) for tokens in state.committed], state.positions.clone(), max_nodes))
            return tree

        monkeypatch.setattr(drafter, "propose", proposing)
        return seen

    return watch


def plain_counting(tokens: list[int], first: int, count: int = 20, searched: int = SEARCHED) -> list[tuple[int, ...]]:
    """Continuations of `first` by how often they came, the latest of equals first, in the last occurrences."""
    complete = [i for i in range(len(tokens) - 3) if tokens[i] == first][-searched:]
    counts, last = Counter(), {}
    for i in complete:
        gram = tuple(tokens[i + 1 : i + 4])
        counts[gram] += 1
        last[gram] = i
    return sorted(counts, key=lambda gram: (-counts[gram], -last[gram]))[:count]


@st.composite
def texts(draw):
    """Texts of few different tokens, some of which repeat themselves."""
    alphabet = draw(st.sampled_from([[0], [0, 1], [0, 3, 2**TOKEN_BITS - 1], list(range(40))]))
    text = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=40))
    return (text * draw(st.sampled_from([1, 1, 2, 9])))[: draw(st.integers(1, 120))]


@settings(max_examples=200, deadline=None)
@given(both=st.tuples(texts(), texts()), data=st.data(), count=st.sampled_from([1, 3, 20]), room=st.integers(0, 5))
def test_the_device_counts_ngrams_as_one_does_by_hand(both, data, count, room):
    """Two slots with texts of their own, and after each root what an earlier step wrote."""
    searched, capacity = data.draw(st.sampled_from([1, 4, SEARCHED])), max(map(len, both)) + room
    history, firsts = History(2, capacity), [data.draw(st.sampled_from(text)) for text in both]
    history.tokens.fill_(firsts[0])
    for slot, text in enumerate(both):
        history.start(slot, text)
    roots = torch.tensor([len(text) - 1 for text in both])
    with mock.patch.object(tokenswift, "SEARCHED", searched):
        found = most_frequent(history, roots, torch.tensor(firsts), count)
    assert found.shape == (2, 3, count)
    for grams, text, first in zip(found.transpose(1, 2).tolist(), both, firsts, strict=True):
        want = plain_counting(text, first, count, max(count, searched))
        assert [tuple(gram) for gram in grams] == want + [(-1, -1, -1)] * (count - len(want))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), trunk=st.integers(0, 1), count=st.integers(1, 4), levels=st.integers(1, 5))
def test_heads_and_ngrams_unite_as_tries_do(data, trunk, count, levels):
    """Of very few tokens, so that n-grams share beginnings with each other and with the heads' paths."""
    below = TreeShape.cartesian(data.draw(st.lists(st.integers(1, 3), min_size=levels, max_size=levels)))
    heads = TreeShape(((0,), *((0, *node) for node in below.nodes))) if trunk else below
    heads = heads.first(data.draw(st.integers(1, 20)))
    ranked = [data.draw(st.permutations(range(4)))[: heads.ranks] for _ in range(heads.depth)]
    grams = data.draw(st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=count, unique=True))
    above = ranked[0][:trunk]
    chains = [(*above, *gram[:length]) for gram in grams for length in (1, 2, 3)]
    paths = [tuple(ranked[level][rank] for level, rank in enumerate(node)) for node in heads.nodes]
    void = [(-1, -1, -1)] * (count - len(grams))
    joined, n_heads = JoinedTree(heads, count, trunk, 60, torch.device("cpu")), 60
    args = torch.tensor([9]), torch.tensor([ranked]), torch.tensor([grams + void]).transpose(1, 2)
    tree = joined.fill(*args, 10**6)
    real = (tree.parents[0, 1:] != PAD).nonzero()[:, 0] + 1
    kinds = dict(zip(map(tuple, tree.paths()[0]), tree.classes[0, real].tolist(), strict=True))
    assert sorted(kinds) == sorted({*paths, *chains}) and len(real) == len(kinds)
    assert (tree.parents[0, real] < real).all() and int(tree.tokens[0, 0]) == 9
    own = {path: 1 + place for place, path in enumerate(paths)}
    theirs = {}
    for place, path in enumerate(chains):
        theirs.setdefault(path, n_heads + ((place // 3 + 1).bit_length() - 1) * 3 + place % 3)
    both = joined.n_classes(n_heads, count) // 2
    assert both > max([*own.values(), *theirs.values()])
    for path, kind in kinds.items():
        proposed = {of[path] for of in (own, theirs) if path in of}
        assert kind in proposed if len(proposed) == 1 else kind - both in proposed, path
    most = data.draw(st.integers(1, len(kinds)))
    fewer = joined.fill(*args, most)
    assert fewer.paths()[0] == tree.paths()[0][:most] and fewer.width == 1 + min(most, tree.width - 1)


def test_a_proposal_launches_as_many_kernels_after_any_text(made, pretended_cuda, prompts):
    launched = []
    with pretended_cuda.PretendedCuda() as gpu:
        target, drafter = made("tokenswift_5", gpu.put)
        propose = drafter.propose

        def counted(state, budget):
            gpu.forget()
            tree = propose(state, budget)
            launched.append(Counter(gpu.calls))
            return tree

        drafter.propose = counted
        for text in (*prompts(2, 3, 9), prompts(5)[0] * 15):
            Engine(target, drafter, nodes=None, graphs=False).generate([text], SamplingParams(max_new_tokens=5))
    assert len(launched) > 9 and launched[1].total() > 50
    assert all(calls == launched[1] for calls in launched[2:])


@pytest.mark.parametrize("max_nodes", [1, 6, 25, 200])
@pytest.mark.parametrize("options", [{"draft_pass": "never"}, {"draft_pass": "always", "budget": 32}], ids=str)
def test_the_frequent_ngrams_of_a_text_are_in_its_tree(target, watched, options, max_nodes, prompts):
    drafter = drafter_for(target, **options)
    seen, text = watched(drafter), prompts(9)[0] * 6  # repeats: many n-grams
    asked = [text, text[:20], text[3:40]]
    Engine(target, drafter, nodes=max_nodes, slots=2).generate(asked, SamplingParams(max_new_tokens=30))
    assert len(seen) > 10
    own, ngram_nodes = 1 + len(drafter.shape.nodes) + ("budget" in options), 0  # the heads' classes come first
    for tree, committed, positions, budget in seen:
        assert budget.max_nodes == min(max_nodes, drafter.max_nodes)
        assert tree.depths.max() <= drafter.max_depth and int(tree.classes.max()) < len(drafter.class_stages)
        ngram_nodes += int(((tree.classes >= own) & (tree.parents >= 0)).sum())
        for slot, tokens in enumerate(committed if max_nodes == 200 else []):
            if tokens:
                assert [int(positions[slot]), int(tree.tokens[slot, 0])] == [len(tokens) - 1, tokens[-1]]
                paths = tree.paths()[slot]
                start = paths[0] if "budget" in options else []  # below what the draft pass proposes
                for gram in plain_counting(tokens, start[0] if start else tokens[-1]):
                    assert [*start, *gram] in paths
    assert max_nodes == 1 or ngram_nodes > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_draft_pass_proposes_the_next_token_and_its_heads_the_ones_after(target, watched, temperature, prompts):
    """With everything in the selected cache: the first node is the target's own choice, and head i's candidates are its
    ranks on the root's state, with the noise of the position 1 + i after the root."""
    drafter = drafter_for(target, draft_pass="always", budget=200, ngrams=0)
    assert drafter.max_nodes == 40
    seen = watched(drafter)
    params = SamplingParams(temperature=temperature, seed=9, max_new_tokens=30)
    (result,) = Engine(target, drafter, nodes=None).generate(prompts(13), params)
    # The last step's tokens may go beyond the end of what was asked for.
    assert result.stats.accepted_at_depth[0] >= result.stats.steps - 1 and result.stats.steps == len(seen)
    for tree, committed, positions, _ in seen:
        hidden = target.model(Pass(torch.tensor(committed), needs={"pre_norm", "logits"}))
        states = drafter.draft.states(hidden.pre_norm[:, -1])
        rows = [hidden.logits[0, -1], *(state[0] @ target.model.lm_head.weight.T for state in states)]
        for level, (row, first, count) in enumerate(zip(rows, (1, 2, 5, 14), (1, 3, 3, 3), strict=True), 1):
            if temperature:
                noise = gumbel_noise(torch.tensor([9]), positions[:, None] + level, VOCAB)[0, 0]
                row = row / temperature + noise
            assert tree.tokens[0, first : first + count].tolist() == row.topk(count).indices.tolist()


def test_auto_takes_the_pass_where_it_reads_less_than_half(target, plain_tokens, seeded, prompts):
    """By the contexts of the slots at work: once the long text is done, the short one's counts."""
    drafter, taken = drafter_for(target, budget=20, ngrams=0), []
    assert "selected cache" not in drafter.allocations(2, 100)  # beside these weights that is no long context
    drafter._weight_bytes = 0
    assert "selected cache" not in drafter.allocations(2, 40) and "selected cache" in drafter.allocations(2, 41)
    plan = drafter.plan

    def watched(state, budget):
        taken.append((sum(map(len, state.committed)), sum(map(bool, state.committed)), plan(state, budget)[1]))
        return plan(state, budget)

    drafter.plan = watched
    params = seeded(SamplingParams(temperature=0.5), 2, 60)
    params[0] = replace(params[0], max_new_tokens=3)
    want = plain_tokens(target, prompts(90, 20), params)
    assert [one.tokens for one in Engine(target, drafter, nodes=None).generate(prompts(90, 20), params)] == want
    for length, working, takes_pass in taken:
        assert takes_pass == (length > 40 * working)
    assert {(working, takes_pass) for _, working, takes_pass in taken} == {(2, True), (1, False), (1, True)}


@pytest.mark.parametrize(("roots", "taken"), [(1, 0.25), (3, 0.75), (9, 1.0)])
def test_of_experts_auto_counts_those_that_the_roots_take(tiny_target, roots, taken):
    target = tiny_target(vocab_size=VOCAB, experts=ExpertsConfig(number=8, per_token=2, size=24, normalised=True))
    drafter, config = drafter_for(target, budget=20), target.model.config
    experts = sum(p.nbytes for layer in target.model.layers for p in (layer.mlp.gate_up_proj, layer.mlp.down_proj))
    weights = sum(p.nbytes for p in target.model.parameters()) - (1 - taken) * experts
    row = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4
    border = int(weights / row) // roots + 2 * 20  # weights + selected rows = (weights + all rows) / 2
    assert not drafter._pass_pays([border, 0] * roots) and drafter._pass_pays([border + 2, 0] * roots)
    assert "selected cache" in drafter.allocations(9, border + 2)  # what pays for some of the slots pays for all


@pytest.mark.parametrize("ngrams", [0, 5])
def test_free_slots_at_the_end_stay_out_of_the_heads(target, plain_tokens, seeded, prompts, ngrams):
    drafter, rows = drafter_for(target, draft_pass="never", ngrams=ngrams), set()
    ranked = drafter.ranked
    drafter.ranked = lambda state, hidden_BD, shape: rows.add(len(hidden_BD)) or ranked(state, hidden_BD, shape)
    params = seeded(SamplingParams(temperature=0.7), 1, 20)
    (result,) = Engine(target, drafter, slots=4, nodes=None).generate(prompts(30), params)
    assert [result.tokens] == plain_tokens(target, prompts(30), params) and rows == {1}


def test_of_a_sliding_layer_auto_counts_its_window(tiny_target):
    target = tiny_target(vocab_size=VOCAB, sliding_windows=(None, 8))
    drafter, config = drafter_for(target, budget=20), target.model.config
    row = 2 * config.n_kv_heads * config.head_dim * 4  # of one layer
    # weights + window + budget = (weights + window + all rows) / 2
    border = int(sum(p.nbytes for p in target.model.parameters()) / row) + 8 + 2 * 20
    assert not drafter._pass_pays([border]) and drafter._pass_pays([border + 2])
