"""The cache of selected rows: picks against plain loops, rows against a fresh cache after random steps, also in the
drafters that hold one."""

import weakref
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.accept import AcceptResult
from longdraft.infer.drafters import triforce
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.partial_cache import SelectedCache, Selection
from longdraft.infer.sampling import SamplingParams
from longdraft.models.decoder_config import DeltaConfig
from longdraft.models.footprint import sizes
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass

LAYERS, SLOTS, CAPACITY, KV_HEADS, HEADS, WIDTH = 2, 3, 160, 2, 4, 4
SELECTIONS = {"tokens": Selection(budget=24, fixed=4), "chunks": Selection(budget=24, fixed=4, chunk=4)}


def random_full(seed: int = 0) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    full = KVCache(LAYERS, SLOTS, CAPACITY, KV_HEADS, WIDTH, torch.float32)
    full.keys.normal_(generator=generator)
    full.values.copy_(full.keys * 10)
    return full


def queries(seed: int) -> torch.Tensor:
    return torch.randn(LAYERS, SLOTS, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed))


def rows_of(cache, slot: int) -> list[list[set[int]]]:
    """[layer][KV head] the tokens whose keys stand in the slot's rows, each once, with the values beside them."""
    found = []
    length = int(cache.lengths[slot])
    for layer in range(LAYERS):
        found.append([])
        for head in range(KV_HEADS):
            keys, full = cache.keys[layer, slot, :length, head], cache.full.keys[layer, slot, :, head]
            tokens = [int((full == key).all(-1).nonzero()[0]) for key in keys]
            assert len(set(tokens)) == length
            assert torch.equal(cache.values[layer, slot, :length, head], keys * 10)
            found[-1].append(set(tokens))
    return found


def best_by_loops(selection, full, layer, slot, head, query, covered):
    """The tokens of one head by plain loops."""
    keys, group = full.keys[layer, slot, :, head], HEADS // KV_HEADS
    score, size = {}, selection.chunk
    for first in range(selection.fixed, covered, size):
        mean = [sum(float(keys[first + i, d]) for i in range(size)) / size for d in range(WIDTH)]
        score[first] = sum(
            float(query[layer, slot, h, d]) * mean[d]
            for h in range(head * group, (head + 1) * group)
            for d in range(WIDTH)
        )
    best = sorted(score, key=lambda first: -score[first])[: (selection.budget - selection.fixed) // size]
    return {*range(selection.fixed), *(first + i for first in best for i in range(size))}


def build_all(cache, query, seen_B):
    for slot, (total, seen) in enumerate(zip(cache.full.lengths.tolist(), seen_B.tolist(), strict=True)):
        cache.build(slot, query[:, slot], total, seen)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("lengths", [(100, 25, 61), (3, 24, 131), (0, 150, 28)])
def test_a_build_picks_what_plain_loops_pick(name, lengths):
    full, selection = random_full(), SELECTIONS[name]
    full.lengths.copy_(torch.tensor(lengths))
    cache, query = SelectedCache(full, selection, tail=8), queries(1)
    seen = full.lengths - torch.tensor([2, 0, 3]).clamp(max=full.lengths)  # tokens that came with the query's own pass
    build_all(cache, query, seen)
    assert cache.held.tolist() == list(lengths)
    for slot, (length, sees) in enumerate(zip(lengths, seen.tolist(), strict=True)):
        covered, found = sees // selection.chunk * selection.chunk, rows_of(cache, slot)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                if length <= selection.budget:
                    assert found[layer][head] == set(range(length))
                    continue
                late = set(range(covered, length)) if sees > selection.budget else set(range(sees, length))
                if sees <= selection.budget:
                    continue  # too few to pick from: see the next test
                best = best_by_loops(selection, full, layer, slot, head, query, covered)
                assert late <= found[layer][head] <= best | late
                assert len(found[layer][head]) == selection.budget
                # The recent ones took the least important places.
                assert len(best & found[layer][head]) == selection.budget - len(late)


def at(positions=None):
    """What a cache asks of a SlotState whose roots are at these positions."""
    return SimpleNamespace(positions=positions, run=lambda key, owners, work: work(None))


@pytest.mark.parametrize("name", SELECTIONS)
def test_new_tokens_overwrite_the_least_important_first_and_due_comes_in_time(name):
    full, selection = random_full(), SELECTIONS[name]
    full.lengths.copy_(torch.tensor([60, 60, 60]))
    cache, query, region = SelectedCache(full, selection, tail=8), queries(2), selection.budget - selection.fixed
    build_all(cache, query, full.lengths)
    order = selection.pick(full.keys[:, 0, :60], query[:, 0])[:, selection.fixed :]
    for written in range(1, region + 1):
        assert cache.due(1) == [] and (0 in cache.due(region - written + 2))
        full.lengths += torch.tensor([1, 0, 1])
        cache.follow(1, at())  # what a slot may lose is reckoned from the most tokens that a step can have brought it
        found = rows_of(cache, 0)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                kept = {*range(selection.fixed), *order[layer][written:, head].tolist()}
                assert found[layer][head] == kept | set(range(60, 60 + written))
    assert cache.due(1) == [0, 1, 2]


@pytest.mark.parametrize("name", SELECTIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_steps_end_where_a_fresh_cache_with_the_same_selection_ends(name, data):
    """Accepted counts, tails of passes on the cache, rebuilds and restarts, in any order."""
    full, stride = random_full(), data.draw(st.sampled_from([8, 1000]))
    starts = data.draw(st.lists(st.integers(1, 70), min_size=SLOTS, max_size=SLOTS))
    full.lengths.copy_(torch.tensor(starts))
    cache = SelectedCache(full, SELECTIONS[name], tail=8, depth=4, stride=stride)
    built = {slot: (queries(0), starts[slot]) for slot in range(SLOTS)}
    build_all(cache, queries(0), full.lengths)
    for step in range(data.draw(st.integers(1, 14))):
        for layer in range(LAYERS):  # a pass of its own, partly committed, which must leave no trace
            keys_and_values = torch.full((SLOTS, 4, 2 * KV_HEADS, WIDTH), 7.0)
            cache.append(
                layer, keys_and_values, torch.ones(1, 4, 1, 1, WIDTH // 2), torch.zeros(1, 4, 1, 2, WIDTH // 2)
            )
        cache.commit(torch.tensor([[0, 2, 3]] * SLOTS), torch.tensor([step % 4, 3, 1]))
        if data.draw(st.integers(0, 3)) == 0:
            slot = data.draw(st.integers(0, SLOTS - 1))
            full.lengths[slot] = 11
            cache.start(slot)
            cache.on_prefill(slot, queries(step + 1)[:, slot : slot + 1], 11)
            built[slot] = queries(step + 1), 11
        roots = full.lengths.clone()  # the positions of the roots, which the step's queries see too
        counts = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=SLOTS, max_size=SLOTS)))
        full.lengths += counts
        accepted = AcceptResult(torch.zeros(SLOTS, int(counts.max())), torch.zeros(0), counts)
        asked = bool(cache.needs)
        for slot in cache.on_step(at(full.lengths), accepted, queries(step + 1) if asked else None):
            assert asked
            if int(full.lengths[slot]) > cache.budget:
                built[slot] = queries(step + 1), int(roots[slot]) + 1
        picked = [slot for slot, (_, seen) in built.items() if seen > cache.budget]
        assert all(cache._since[slot] <= cache._room[slot] for slot in picked), "a picked row is lost"
    fresh = SelectedCache(full, SELECTIONS[name], tail=8)
    for slot, (query, seen) in built.items():
        fresh.build(slot, query[:, slot], int(full.lengths[slot]), seen)
    assert torch.equal(fresh.held, full.lengths) and torch.equal(cache.held, full.lengths)
    assert torch.equal(cache.lengths, full.lengths.clamp(max=24))
    for slot in range(SLOTS):
        assert rows_of(cache, slot) == rows_of(fresh, slot)


@pytest.mark.parametrize("lengths", [(100, 25, 3), (24, 61, 50)])
def test_recent_rows_are_the_first_and_the_last_tokens_without_a_query(lengths):
    full = random_full()
    cache = SelectedCache(full, Selection(budget=24, fixed=4, chunk=4, recent=True), tail=8, stride=10)
    for slot, length in enumerate(lengths):
        full.lengths[slot] = length
        cache.start(slot)
        cache.on_prefill(slot, None, length)
    for counts in ((5, 1, 3), (1, 4, 2), (5, 5, 5)) * 3:
        full.lengths += torch.tensor(counts)
        accepted = AcceptResult(torch.zeros(SLOTS, 5), torch.zeros(0), torch.tensor(counts))
        assert cache.on_step(at(full.lengths), accepted, None) == [] and not cache.needs
        for slot, length in enumerate(full.lengths.tolist()):
            kept = {*range(length)} if length <= 24 else {*range(4), *range(length - 20, length)}
            assert rows_of(cache, slot) == [[kept] * KV_HEADS] * LAYERS


def test_wrong_sizes_are_named():
    for wrong in ({"budget": 16, "fixed": 16}, {"budget": 30, "fixed": 8, "chunk": 8}):
        with pytest.raises(ValueError, match="budget"):
            Selection(**wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_on_a_selected_cache_that_holds_everything_is_the_target(tiny_target, dtype):
    model = tiny_target(dtype=dtype).model
    config = model.config
    tokens, full = torch.randint(97, (2, 40)), model.new_cache(2, 64)
    model(Pass(tokens[:, :30], cache=full))
    full.commit(None, torch.tensor([30, 21]))
    cache = SelectedCache(full, Selection(budget=48, fixed=4), tail=6)
    build_all(cache, torch.zeros(config.n_layers, 2, config.n_heads, config.head_dim), full.lengths)
    for _ in range(3):  # passes on top of each other, on either cache
        positions = full.lengths[:, None] + torch.arange(2)
        row = torch.stack([tokens[b, int(positions[b, 0]) :][:2] for b in range(2)])
        want = model(Pass(row, cache=full, positions_BT=positions)).logits
        got = model(Pass(row, cache=cache, positions_BT=positions)).logits
        torch.testing.assert_close(got, want)
        full.commit(None, torch.tensor([2, 1]))
        cache.commit(None, torch.tensor([2, 1]))
        assert torch.equal(cache.held + cache.lengths - cache.held.clamp(max=48), full.lengths)
    cache.follow(6, at())
    assert torch.equal(cache.keys[:, 0, :36], full.keys[:, 0, :36])


# The same in the drafters that hold one.

VOCAB = 61


@pytest.fixture
def holding(tiny_target, shared, monkeypatch):
    """(name, budget, target) -> a drafter with a selected cache of this many rows, and a function that gives it."""
    monkeypatch.setattr("longdraft.infer.drafters.tokenswift.SINKS", 4)
    small = tiny_target(vocab_size=VOCAB, n_layers=1, n_kv_heads=1, seed=5)

    def make(name, budget, target):
        if name == "tokenswift":
            heads = shared("infer/test_exactness.py").heads(target)
            drafter = TokenSwiftDrafter(target, heads, draft_pass="always", budget=budget, ngrams=0)
            return drafter, lambda: drafter._selected
        drafter = TriForceDrafter(target, small if name == "triforce" else None, budget=budget, chunk=4)
        return drafter, lambda: drafter._cache

    return make


@pytest.mark.parametrize("heads_of_keys", [2, 4])
@pytest.mark.parametrize("name", ["tokenswift", "triforce"])
def test_it_holds_the_rows_of_a_fresh_prefill(tiny_target, holding, monkeypatch, name, heads_of_keys, prompts):
    """Exact rows, in all layers, after steps with rejections, for slots of unequal lengths, one of them restarted."""
    target = tiny_target(vocab_size=VOCAB, n_kv_heads=heads_of_keys, n_layers=3)
    monkeypatch.setattr(triforce, "STRIDE", 12)
    drafter, selected = holding(name, 32, target)
    params = [SamplingParams(temperature=0.7, seed=i, max_new_tokens=count) for i, count in enumerate((60, 20, 39))]
    engine = Engine(target, drafter, slots=2, nodes=None)
    engine.pool._empty = lambda slot: None  # a slot is looked at as its request leaves it
    result = engine.generate(prompts(50, 9, 33), params)
    cache = selected()
    for slot, generation in enumerate((result[0], result[2])):
        text = generation.prompt + generation.tokens
        fresh = target.model.new_cache(1, len(text))
        target.model(Pass(torch.tensor([text]), cache=fresh))
        rows, stands_for = int(cache.lengths[slot]), int(cache.held[slot])
        assert rows == 32 and stands_for >= len(text) - 1
        for layer, head in product(range(3), range(heads_of_keys)):
            full = cache.full.keys[layer, slot, :stands_for, head]
            tokens = [int((full == key).all(-1).nonzero()[0]) for key in cache.keys[layer, slot, :rows, head]]
            assert len(set(tokens)) == rows and {*range(4), stands_for - 1} <= set(tokens)
            known = [row for row, token in enumerate(tokens) if token < len(text)]
            for mine, theirs in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
                want = theirs[layer, 0, [tokens[row] for row in known], head]
                torch.testing.assert_close(mine[layer, slot, known, head], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "budget", "stride", "least", "most"),
    [("tokenswift", 30, 10**6, 4, 11), ("triforce_self", 48, 15, 5, 13), ("triforce_self", 48, 10**6, 3, 7)],
)
def test_queries_are_asked_for_only_where_a_rebuild_is_due(
    tiny_target, holding, monkeypatch, name, budget, stride, least, most, prompts
):
    """By stride and by room: one pass with queries for each rebuild, the prefill's among them."""
    monkeypatch.setattr(triforce, "STRIDE", stride)
    target, asked, builds, build = tiny_target(vocab_size=VOCAB), [], [], SelectedCache.build
    monkeypatch.setattr(SelectedCache, "build", lambda self, *given: builds.append(given) or build(self, *given))
    target.model.register_forward_pre_hook(lambda module, args: asked.append("queries" in args[0].needs))
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=90)
    Engine(target, holding(name, budget, target)[0], nodes=None).generate(prompts(60), params)
    assert least <= len(builds) <= most and sum(asked) == len(builds)


@pytest.mark.parametrize("name", ["tokenswift", "triforce"])
def test_memory_is_what_is_announced_and_no_more_than_the_context_needs(tiny_target, holding, name, prompts):
    """And nothing of a cache is left after a release."""
    delta = DeltaConfig((0,), key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4)
    target = tiny_target(vocab_size=VOCAB, n_layers=3, delta=delta, sliding_windows=(None, 8, None))
    drafter, selected = holding(name, 4096, target)
    engine = Engine(target, drafter, nodes=None)
    for length in (9, 60):  # the second needs more than the first
        engine.generate(prompts(length), SamplingParams(max_new_tokens=12))
        full, inner = engine.runner.cache, [part._cache for part in drafter.parts]
        caches = [selected(), *inner]
        assert caches[0].full is full and full.capacity == caches[0].budget
        told = sizes(drafter.allocations(1, full.capacity))
        means = full.keys[:, 0, : full.capacity // 4].nbytes
        assert told.pop("chunk means", means) == means
        assert told.pop("windows that are copied") == full.keys[1:2, :, :8].nbytes
        states = caches[0].delta.memory, caches[0].delta.inputs
        rows = [rows for one in caches for rows in (one.keys, one.values)]
        assert sum(told.values()) == sum(x.nbytes for x in (*rows, *states))
    left = [*map(weakref.ref, (full, *caches))]
    engine.runner.cache = full = inner = caches = None
    drafter.release()
    assert [one() for one in left] == [None] * len(left)
