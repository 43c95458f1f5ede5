"""TokenSwift's drafter: the merged trie, the draft pass, its selected cache, and when the pass is taken."""

import weakref
from collections import Counter

import pytest
import torch

from longdraft.infer.caches.partial import SelectedCache
from longdraft.infer.costs import RECENT, DraftPassTrial
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.tokenswift import tokenswift
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import PAD, ROOT
from longdraft.kernels.choice import gumbel_noise
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.footprint import sizes
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
    return tokenswift(target, heads(target, kind), *args, **options)


def heads_of(drafter):
    """Of the heads and the n-grams in one tree, the heads' drafter."""
    return drafter.parts[0] if isinstance(drafter, Combined) else drafter


def prompts(*lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


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


def most_frequent(tokens: list[int], first: int) -> list[tuple[int, ...]]:
    """Continuations of `first` by how often they came, the most recent of equals first, by plain counting."""
    counts, last = Counter(), {}
    for i in range(len(tokens) - 3):
        if tokens[i] == first:
            gram = tuple(tokens[i + 1 : i + 4])
            counts[gram] += 1
            last[gram] = i
    return sorted(counts, key=lambda gram: (-counts[gram], -last[gram]))[:20]


@pytest.mark.parametrize("max_nodes", [1, 6, 25, 200])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_ngrams_and_heads_are_one_trie(target, watched, mode, max_nodes):
    drafter = drafter_for(target, draft_pass=mode, budget=32)
    seen = watched(drafter)
    text = prompts(9)[0] * 6  # repeats: many n-grams
    Engine(target, drafter, nodes=max_nodes, slots=2).generate(
        [text, text[:20], text[3:40]], SamplingParams(max_new_tokens=30)
    )
    assert len(seen) > 10
    ngram_nodes = 0
    for tree, committed, positions, asked in seen:
        assert asked.max_nodes == min(max_nodes, drafter.max_nodes)
        assert tree.classes is not None and int(tree.classes.max()) < drafter.n_classes
        assert tree.depths.max() <= drafter.max_depth
        for slot, tokens in enumerate(committed):
            nodes, parents = tree.tokens[slot].tolist(), tree.parents[slot].tolist()
            kinds = tree.classes[slot].tolist()
            assert parents[0] == ROOT
            real = [i for i in range(1, len(nodes)) if parents[i] != PAD]
            assert len(real) <= max_nodes and all(0 <= parents[i] < i for i in real)
            assert len({(parents[i], nodes[i]) for i in real}) == len(real), "siblings carry different tokens"
            own = heads_of(drafter).n_classes  # then the n-grams' classes, and then all again for what both propose
            ngram_nodes += sum(kinds[i] >= own for i in real)
            if max_nodes < 200 or not tokens:
                continue
            assert int(positions[slot]) == len(tokens) - 1 and nodes[0] == tokens[-1]
            known = {0: []} | {i: None for i in real}
            for i in real:
                known[i] = [*known[parents[i]], nodes[i]]
            paths = [tuple(path) for path in known.values()]
            start = (nodes[1],) if mode == "always" else ()
            for gram in most_frequent(tokens, start[0] if start else tokens[-1]):
                assert (*start, *gram) in paths
    assert max_nodes == 1 or ngram_nodes > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_draft_pass_proposes_the_next_token_and_its_heads_the_ones_behind(target, watched, temperature):
    """With everything in the selected cache: the first node is the target's own choice, and head i's candidates are its
    ranks on the root's state, with the noise of the position 1 + i behind the root."""
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


def test_queries_are_asked_for_only_where_a_rebuild_is_due(target, monkeypatch):
    """One pass with queries for each rebuild, which happens outside the pass; between them the ring is written."""
    drafter = drafter_for(target, draft_pass="always", budget=30, ngrams=0)
    builds, asked = [], []
    build = SelectedCache.build
    monkeypatch.setattr(SelectedCache, "build", lambda self, *a: builds.append(a[0]) or build(self, *a))
    handle = target.model.register_forward_pre_hook(lambda module, args: asked.append("queries" in args[0].needs))
    (result,) = Engine(target, drafter, nodes=None).generate(prompts(40), SamplingParams(max_new_tokens=150))
    handle.remove()
    assert sum(asked) == len(builds) and 4 <= len(builds) <= 2 + 150 // 16
    assert len(asked) == 1 + 2 * result.stats.steps


@pytest.mark.parametrize("heads_of_keys", [2, 4])
def test_the_selected_cache_holds_the_rows_of_a_fresh_prefill(tiny_target, heads_of_keys):
    """After many steps with random acceptance, in all layers, for slots of unequal lengths, one of them restarted."""
    target = tiny_target(vocab_size=VOCAB, n_kv_heads=heads_of_keys, n_layers=3)
    drafter = drafter_for(target, draft_pass="always", budget=30)
    params = [SamplingParams(temperature=0.7, seed=i, max_new_tokens=count) for i, count in enumerate((90, 20, 69))]
    engine = Engine(target, drafter, slots=2)
    engine.pool._empty = lambda slot: None  # a slot is looked at as its request leaves it
    result = engine.generate(prompts(50, 9, 33), params)
    selected = heads_of(drafter)._selected
    for slot, generation in enumerate((result[0], result[2])):
        text = generation.prompt + generation.tokens
        fresh = target.model.new_cache(1, len(text))
        target.model(Pass(torch.tensor([text]), cache=fresh))
        rows, stands_for = int(selected.lengths[slot]), int(selected.held[slot])
        assert rows == 30 and stands_for > 80
        full = selected.full
        for layer in range(3):
            for head in range(heads_of_keys):
                tokens = [
                    int((full.keys[layer, slot, :stands_for, head] == key).all(-1).nonzero()[0])
                    for key in selected.keys[layer, slot, :rows, head]
                ]
                assert len(set(tokens)) == rows and {0, 1, 2, 3} <= set(tokens)
                known = [row for row, token in enumerate(tokens) if token < len(text)]
                for mine, theirs in ((selected.keys, fresh.keys), (selected.values, fresh.values)):
                    want = theirs[layer, 0, [tokens[row] for row in known], head]
                    torch.testing.assert_close(mine[layer, slot, known, head], want, rtol=1e-3, atol=1e-3)


class Clock:
    """A clock that only passes of the target move: `draft` seconds on a selected cache, else 1 + `row` a row."""

    def __init__(self, target, draft):
        self.now, self.draft = 0.0, draft
        target.model.register_forward_hook(self.tick)

    def __call__(self):
        return self.now

    def tick(self, module, args, output):
        self.now += self.draft if isinstance(args[0].cache, SelectedCache) else 1.0


@pytest.mark.parametrize(("draft_seconds", "decided"), [(0.01, "always"), (5.0, "never")])
def test_auto_takes_what_its_clock_says_is_cheaper_and_says_so(tiny_target, draft_seconds, decided):
    target = tiny_target(vocab_size=VOCAB, std=0.2)
    drafter = drafter_for(target, budget=44, ngrams=0)
    engine = Engine(target, drafter, nodes=None)
    engine.runner.work_clock = clock = Clock(target, draft_seconds)
    (short,) = engine.generate(prompts(9), SamplingParams(max_new_tokens=20))
    assert (
        short.stats.decisions["draft_pass"] == "never: up to 44 tokens of context the selected cache is the whole one"
    )
    # Untrained heads bring no more behind a draft pass on average; this seed's text is one on which they do.
    (result,) = engine.generate(prompts(45), SamplingParams(temperature=0.5, seed=6, max_new_tokens=40))
    words = result.stats.decisions["draft_pass"]
    assert words.startswith(f"{decided}: ") and words.endswith("ms a token after 16 steps at 45 tokens of context")
    better, worse = float(words.split()[1]), float(words.split()[3])
    assert 100 < better < worse and (decided == "always" or worse > 1000)
    # The context has doubled, and the pass has become what it was not.
    clock.draft = 5.0 if decided == "always" else 0.01
    (long,) = engine.generate(prompts(45), SamplingParams(temperature=0.5, seed=2, max_new_tokens=125))
    words = long.stats.decisions["draft_pass"]
    assert words.startswith("never: " if decided == "always" else "always: ")
    assert 90 <= int(words.split(" at ")[1].split()[0]) < 100


@pytest.mark.parametrize("seed", range(6))
def test_auto_takes_the_cheaper_of_what_it_measured(tiny_target, seed):
    """Whichever it is: a step costs 1.01 with the draft pass and 1 without, so the tokens a step decide."""
    target = tiny_target(vocab_size=VOCAB, std=0.2)
    engine = Engine(target, drafter_for(target, budget=44, ngrams=0), nodes=None)
    engine.runner.work_clock = Clock(target, 0.01)
    (result,) = engine.generate(prompts(45), SamplingParams(temperature=0.5, seed=seed, max_new_tokens=40))
    decided, figures = result.stats.decisions["draft_pass"].split(": ")
    taken, other = float(figures.split()[0]), float(figures.split()[2])
    assert decided in ("always", "never") and taken <= other
    with_pass, without = (taken, other) if decided == "always" else (other, taken)
    assert 1010 / 4 <= with_pass <= 1010 and 1000 / 4 <= without <= 1000  # 1 to 4 tokens a step


def test_the_choice_goes_by_the_median_step_and_the_mean_tokens():
    choice = DraftPassTrial(budget=100)
    choice.start_step(101)
    for step in range(RECENT):
        choice.record(False, 99.0 if step == 3 else 1.0, 2 + step % 2)
    assert not choice.decided and choice.with_pass
    choice.record(False, 0.1, 9)  # while the selected cache is being built
    for _ in range(RECENT):
        choice.record(True, 1.3, 3.5)
    assert choice.with_pass and choice.description.startswith("always: 371.4 against 400.0 ms a token after 16 steps")
    choice.start_step(201)
    assert choice.with_pass
    choice.start_step(202)
    assert not choice.decided and not choice.with_pass
    choice.start_step(50)
    assert not choice.with_pass and "up to 100 tokens" in choice.description


def test_sliding_windows_leave_the_draft_pass_out(tiny_target, plain_tokens, seeded):
    target = tiny_target(vocab_size=VOCAB, sliding_windows=(None, 8))
    with pytest.raises(ValueError, match="draft_pass='always' does not go with this model's sliding windows"):
        drafter_for(target, draft_pass="always")
    params = seeded(SamplingParams(), 1, 20)
    want = plain_tokens(target, prompts(30), params)
    drafter = drafter_for(target, budget=20)
    (result,) = Engine(target, drafter).generate(prompts(30), params)
    assert result.tokens == want[0]
    assert "selected cache" not in drafter.allocations(1, 100)


def test_whether_the_pass_pays_is_found_beside_heads_that_never_take_it(target):
    drafters = [drafter_for(target, draft_pass=mode, budget=20, ngrams=0) for mode in ("auto", "never")]
    engine = Engine(target, Combined(drafters), nodes=None)
    (result,) = engine.generate(prompts(30), SamplingParams(max_new_tokens=120))
    assert engine.runner.policy.draft_pass.decided
    assert result.tokens == Engine(target).generate(prompts(30), SamplingParams(max_new_tokens=120))[0].tokens


def test_auto_goes_by_the_slots_that_are_at_work(target):
    """Once the long text is done, the short one's length counts; the host knows without asking the device."""
    drafter, longest = drafter_for(target, budget=20), []
    engine = Engine(target, drafter, nodes=None)
    choice = engine.runner.policy.draft_pass
    start_step = choice.start_step
    choice.start_step = lambda tokens: longest.append(tokens) or start_step(tokens)
    params = [SamplingParams(max_new_tokens=new) for new in (2, 9)]
    engine.generate(prompts(90, 30), params)
    assert longest[0] == 90 and 30 < longest[-1] < 40


def test_a_slot_that_takes_no_part_keeps_its_state(target, watched):
    """As within TriForce, where it goes on afterwards."""
    drafter = drafter_for(target, draft_pass="never", ngrams=0)
    on_step, kept = drafter.on_step, []

    def checked(state, tree, accepted, output):
        before = drafter.hidden_BD.clone()
        on_step(state, tree, accepted, output)
        idle = accepted.counts == 0
        kept.append(int(idle.sum()))
        assert torch.equal(drafter.hidden_BD[idle], before[idle])

    drafter.on_step = checked
    params = [SamplingParams(max_new_tokens=count) for count in (3, 30)]
    Engine(target, drafter, slots=2).generate(prompts(12, 9), params)
    assert sum(kept) > 5


def test_memory_is_what_is_announced_and_no_more_than_the_context_needs(target):
    drafter = drafter_for(target, draft_pass="always", ngrams=0)
    engine = Engine(target, drafter, nodes=None)
    engine.generate(prompts(9), SamplingParams(max_new_tokens=12))
    selected, full = drafter._selected, engine.runner.cache
    assert full.capacity < selected.capacity <= full.capacity + 2
    (announced,) = sizes(drafter.allocations(1, full.capacity)).values()
    assert selected.keys.nbytes + selected.values.nbytes == announced
    old = weakref.ref(full)
    engine.runner.cache = full = selected = None
    drafter.release()
    assert old() is None
