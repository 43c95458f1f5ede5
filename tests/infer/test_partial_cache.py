"""Partial caches: picks against plain loops, rows against a fresh cache after random steps, and a streaming cache
against attention written out with every key rotated at its place inside the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.accept import AcceptResult
from longdraft.infer.caches.partial import Recent, SelectedCache, TopChunks, TopTokens, selected_rows
from longdraft.infer.caches.ring import StreamingCache
from longdraft.models.footprint import sizes
from longdraft.models.kv_cache import KVCache
from longdraft.models.passes import Pass
from longdraft.models.rope import Rope
from longdraft.models.stream import Stream

LAYERS, SLOTS, CAPACITY, KV_HEADS, HEADS, WIDTH = 2, 3, 160, 2, 4, 4
POLICIES = {
    "tokens": lambda: TopTokens(budget=24, sinks=4),
    "retrieval": lambda: TopChunks(budget=24, chunk=4),
    "streaming": lambda: Recent(budget=24, sinks=4),
}


class Shape:
    """The fields of a DecoderConfig that a cache reads."""

    n_layers, n_heads, n_kv_heads, head_dim, sliding_windows = LAYERS, HEADS, KV_HEADS, WIDTH, None


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


def best_by_loops(policy, full, layer, slot, head, query, covered):
    """The tokens of one head by plain loops."""
    keys, group = full.keys[layer, slot, :, head], HEADS // KV_HEADS
    if not policy.scored:
        return {*range(policy.fixed), *range(covered - policy.budget + policy.fixed, covered)}
    score = {}
    size = policy.chunk if isinstance(policy, TopChunks) else 1
    for first in range(policy.fixed, covered, size):
        mean = [sum(float(keys[first + i, d]) for i in range(size)) / size for d in range(WIDTH)]
        score[first] = sum(
            float(query[layer, slot, h, d]) * mean[d]
            for h in range(head * group, (head + 1) * group)
            for d in range(WIDTH)
        )
    best = sorted(score, key=lambda first: -score[first])[: (policy.budget - policy.fixed) // size]
    return {*range(policy.fixed), *(first + i for first in best for i in range(size))}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [(100, 25, 61), (3, 24, 131), (0, 150, 28)])
def test_a_build_picks_what_plain_loops_pick(name, lengths):
    full, policy = random_full(), POLICIES[name]()
    full.lengths.copy_(torch.tensor(lengths))
    cache, query = SelectedCache(full, policy, Shape, tail=8), queries(1)
    seen = full.lengths - torch.tensor([2, 0, 3]).clamp(max=full.lengths)  # tokens that came with the query's own pass
    cache.build(range(SLOTS), query, seen)
    assert cache.tokens.tolist() == list(lengths)
    for slot, (length, sees) in enumerate(zip(lengths, seen.tolist(), strict=True)):
        covered, found = policy.covered(sees), rows_of(cache, slot)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                if length <= policy.budget:
                    assert found[layer][head] == set(range(length))
                    continue
                late = set(range(covered, length)) if sees > policy.budget else set(range(sees, length))
                if sees <= policy.budget:
                    continue  # too few to pick from: see the next test
                best = best_by_loops(policy, full, layer, slot, head, query, covered)
                assert late <= found[layer][head] <= best | late
                assert len(found[layer][head]) == policy.budget
                # The recent ones took the least important places.
                assert len(best & found[layer][head]) == policy.budget - len(late)


@pytest.mark.parametrize("name", POLICIES)
def test_new_tokens_overwrite_the_least_important_first_and_due_comes_in_time(name):
    full, policy = random_full(), POLICIES[name]()
    full.lengths.copy_(torch.tensor([60, 60, 60]))
    cache, query, region = SelectedCache(full, policy, Shape, tail=8), queries(2), policy.budget - policy.fixed
    cache.build(range(SLOTS), query, full.lengths)
    order = policy.pick(full.keys[:, 0, :60], policy.budget, query[:, 0])[:, policy.fixed :]
    for written in range(1, region + 1):
        assert cache.due(1) == [] and (0 in cache.due(region - written + 2)) == policy.scored
        full.lengths += torch.tensor([1, 0, 1])
        cache.follow(1)  # what a slot may lose is reckoned from the most tokens that a step can have brought it
        found = rows_of(cache, 0)
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                kept = {*range(policy.fixed), *order[layer][written:, head].tolist()}
                assert found[layer][head] == kept | set(range(60, 60 + written))
    assert cache.due(1) == ([0, 1, 2] if policy.scored else [])


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_steps_end_where_a_fresh_cache_with_the_same_selection_ends(name, data):
    """Accepted counts, tails of passes on the cache, rebuilds and restarts, in any order."""
    full, stride = random_full(), data.draw(st.sampled_from([8, 1000]))
    starts = data.draw(st.lists(st.integers(1, 70), min_size=SLOTS, max_size=SLOTS))
    full.lengths.copy_(torch.tensor(starts))
    cache = SelectedCache(full, POLICIES[name](), Shape, tail=8, depth=4, stride=stride)
    built = {slot: (queries(0), starts[slot]) for slot in range(SLOTS)}
    cache.build(range(SLOTS), queries(0), full.lengths)
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
            cache.reset([slot])
            cache.build_from_prompt(slot, queries(step + 1)[:, slot : slot + 1], 11)
            built[slot] = queries(step + 1), 11
        roots = full.lengths.clone()  # the positions of the roots, which the step's queries see too
        counts = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=SLOTS, max_size=SLOTS)))
        full.lengths += counts
        accepted = AcceptResult(torch.zeros(SLOTS, int(counts.max())), torch.zeros(0), counts)
        asked = cache.needs_queries
        for slot in cache.on_step(full.lengths, accepted, queries(step + 1) if asked else None):
            assert asked
            if int(full.lengths[slot]) > cache.budget:
                built[slot] = queries(step + 1), int(roots[slot]) + 1
        picked = [slot for slot, (_, seen) in built.items() if cache.policy.scored and seen > cache.budget]
        assert all(cache._since[slot] <= cache._room[slot] for slot in picked), "a picked row is lost"
    fresh = SelectedCache(full, POLICIES[name](), Shape, tail=8)
    for slot, (query, seen) in built.items():
        fresh.build([slot], query, torch.full((SLOTS,), seen))
    assert torch.equal(fresh.tokens, full.lengths) and torch.equal(cache.tokens, full.lengths)
    assert torch.equal(cache.lengths, full.lengths.clamp(max=24))
    for slot in range(SLOTS):
        assert rows_of(cache, slot) == rows_of(fresh, slot)


def test_the_estimate_is_what_is_allocated():
    policy = TopChunks(budget=24, chunk=4)
    cache = SelectedCache(random_full(), policy, Shape, tail=8)
    parts = sizes(selected_rows(policy, Shape, torch.float32, SLOTS, CAPACITY, tail=8))
    assert parts["selected cache"] == sum(part.numel() * 4 for part in (cache.keys, cache.values))
    assert parts["chunk means"] == cache.full.keys[:, 0, ::4].numel() * 4


def test_wrong_sizes_and_models_are_named(tiny_target):
    windowed, tiny = tiny_target(sliding_windows=(None, 8)).model, tiny_target().model
    dynamic = tiny_target(rope={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}).model
    for field, make in [
        ("budget", lambda: TopTokens(budget=16)),
        ("budget", lambda: TopChunks(budget=30)),
        ("budget", lambda: SelectedCache(windowed.new_cache(1, 32), POLICIES["tokens"](), windowed.config, tail=8)),
        ("window", lambda: StreamingCache(windowed, 1, window=256, sinks=16, slack=16, widest=8)),
        ("window", lambda: StreamingCache(tiny, 1, window=40, sinks=16, slack=16, widest=8)),
        ("rope_type", lambda: StreamingCache(dynamic, 1, window=256, sinks=16, slack=16, widest=8)),
    ]:
        with pytest.raises(ValueError, match=field):
            make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_target_on_a_selected_cache_that_holds_everything_is_the_target(tiny_target, dtype):
    model = tiny_target(dtype=dtype).model
    tokens, full = torch.randint(97, (2, 40)), model.new_cache(2, 64)
    model(Pass(tokens[:, :30], cache=full))
    full.commit(None, torch.tensor([30, 21]))
    cache = SelectedCache(full, TopTokens(budget=48, sinks=4), model.config, tail=6)
    cache.build([0, 1], None, full.lengths)
    for _ in range(3):  # passes on top of each other, on either cache
        positions = full.lengths[:, None] + torch.arange(2)
        row = torch.stack([tokens[b, int(positions[b, 0]) :][:2] for b in range(2)])
        want = model(Pass(row, cache=full, positions_BT=positions)).logits
        got = model(Pass(row, cache=cache, positions_BT=positions)).logits
        torch.testing.assert_close(got, want)
        full.commit(None, torch.tensor([2, 1]))
        cache.commit(None, torch.tensor([2, 1]))
        assert torch.equal(cache.tokens, full.lengths)
    cache.follow(6)
    assert torch.equal(cache.keys[:, 0, :36], full.keys[:, 0, :36])


class InCache:
    """StreamingLLM written out: keys before RoPE, every pass rotates all of them at their places inside the cache."""

    def __init__(self, model, window_of):
        self.model, self.window_of, self.tokens = model, window_of, []
        self.rows = [([], []) for _ in model.layers]

    def run(self, tokens: list[int], visible: list[int]) -> torch.Tensor:
        """Logits of a chain behind the tokens `visible` (indices of tokens so far); remembers its rows."""
        model, config = self.model, self.model.config
        hidden = model.embed_tokens(torch.tensor(tokens))
        places = torch.arange(len(visible) + len(tokens))
        cos, sin = model.rope(places[None], None, torch.float32)
        for layer, (keys, values) in zip(model.layers, self.rows, strict=True):
            attention = layer.attention
            qkv = attention.qkv_proj(hidden, layer.attention_norm)
            qkv = qkv.view(len(tokens), -1, config.head_dim)
            q, k, v = qkv.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], 1)
            all_k = torch.stack([*(keys[t] for t in visible), *k])
            all_v = torch.stack([*(values[t] for t in visible), *v])
            all_k = self.rotated(all_k, cos[0], sin[0])
            q = self.rotated(q, cos[0, len(visible) :], sin[0, len(visible) :])
            group = config.n_heads // config.n_kv_heads
            all_k, all_v = all_k.repeat_interleave(group, 1), all_v.repeat_interleave(group, 1)
            scores = torch.einsum("thd,shd->hts", q, all_k) * config.head_dim**-0.5
            mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(visible))
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            out = torch.einsum("hts,shd->thd", weights, all_v).flatten(1)
            stream = Stream(attention.o_proj(out, residual=hidden))
            layer.mlp(stream, layer.mlp_norm)
            hidden = stream.rows
            keys += k.unbind()
            values += v.unbind()
        self.tokens += tokens
        return model.lm_head(hidden, model.norm)

    @staticmethod
    def rotated(x, cos, sin):
        low, high = x.chunk(2, -1)
        cos, sin = cos[:, 0], sin[:, 0, 1:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]
        for keys, values in self.rows:
            del keys[length:], values[length:]


@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_streaming_equals_attention_at_positions_inside_the_cache(tiny_target, rope):
    """Ragged slots, chunks of several rows, rewinds, far beyond the window; the rows are at most the window's."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny_target(rope=yarn if rope == "yarn" else None, std=0.2).model
    assert isinstance(model.rope, Rope) and (model.rope.scaling != 1.0) == (rope == "yarn")
    window, sinks, slack, generator = 20, 3, 4, torch.Generator().manual_seed(0)
    cache = StreamingCache(model, 2, window=window, sinks=sinks, slack=slack, widest=6)
    plain = [InCache(model, None) for _ in range(2)]
    for step in range(60):
        cache.settle()
        assert int(cache.lengths.max()) <= window
        counts = torch.randint(1, 5, (2,), generator=generator)
        tokens = torch.randint(97, (2, 4), generator=generator)
        got = model(Pass(tokens, cache=cache, positions_BT=cache.tokens[:, None] + torch.arange(4))).logits
        for slot, brute in enumerate(plain):
            total, rows = len(brute.tokens), int(cache.lengths[slot])
            assert total == int(cache.tokens[slot])
            recent = rows - min(sinks, rows)
            visible = [*range(min(sinks, total)), *range(total - recent, total)]
            assert len(visible) == min(rows, total) and (
                total <= window - 2 * slack or recent >= window - sinks - 2 * slack
            )
            count = int(counts[slot])
            want = brute.run(tokens[slot, :count].tolist(), visible)
            torch.testing.assert_close(got[slot, :count], want, rtol=2e-3, atol=2e-3)
        cache.commit(None, counts)
        if step % 3 == 0:  # taken back, up to the slack
            back = torch.randint(0, slack + 1, (2,), generator=generator).clamp(max=cache.tokens)
            lengths = cache.tokens - back
            cache.rewind(lengths)
            assert torch.equal(cache.tokens, lengths)
            for brute, length in zip(plain, lengths.tolist(), strict=True):
                brute.truncate(length)
    assert min(len(brute.tokens) for brute in plain) > 4 * window
