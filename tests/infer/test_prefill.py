"""Prompts that go through the target together give what each gives alone."""

import pytest
import torch

from longdraft.infer import slot_pool as slot_pool_module
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.cpu import rows
from longdraft.models.passes import Pass

PROMPTS = [[5, 9, 2, 7, 11], [3], [8] * 40, [1, 2], list(range(1, 31)), [4, 4], [60, 3, 9], [7, 7, 7, 1]]
NEW = SamplingParams(max_new_tokens=6, ignore_eos=True)


def passes_of(engine: Engine) -> list[tuple[int, int]]:
    """The shapes [B, T] of the target's passes so far."""
    shapes = []
    engine.target.model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].tokens_BT.shape)))
    return shapes


@pytest.mark.parametrize("emulated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(5, 30, 1, 17), (140, 300, 129, 7)])
def test_what_a_prompt_gives_does_not_depend_on_the_others(tiny_target, monkeypatch, dtype, sizes, emulated):
    """Keys, values and states have equal bits, with PyTorch's products and with the C kernels."""
    monkeypatch.setattr("longdraft.kernels.linear.emulates_bf16", lambda: emulated)
    model = tiny_target(dtype=dtype, max_positions=512).model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(97, (len(sizes), max(sizes)), generator=generator)
    needs, last = {"post_norm", "last_kv", "queries"}, torch.tensor(sizes) - 1
    cache = model.new_cache(len(sizes), max(sizes))
    together = model(Pass(tokens, cache=cache, needs=needs, queries_at_B=last, prompt_lengths=sizes))
    for slot, size in enumerate(sizes):
        one = model.new_cache(1, size)
        alone = model(Pass(tokens[slot : slot + 1, :size], cache=one, needs=needs, prompt_lengths=[size]))
        assert torch.equal(cache.keys[:, slot, :size], one.keys[:, 0])
        assert torch.equal(cache.values[:, slot, :size], one.values[:, 0])
        own = together.of_slot(slot, size)
        assert torch.equal(own.post_norm, alone.post_norm) and torch.equal(own.queries, alone.queries)
        assert all(torch.equal(a, b) for a, b in zip(own.last_kv, alone.last_kv, strict=True))
        assert own.logits is None and own.pre_norm is None


@pytest.mark.skipif(rows.library() is None, reason="no C compiler, whose kernels this is about")
@pytest.mark.parametrize("size", [1, 20, 128])
def test_a_short_prompt_in_bf16_has_the_bits_that_it_has_in_chunks(tiny_target, size):
    model = tiny_target(dtype=torch.bfloat16, max_positions=256).model
    tokens = torch.randint(97, (1, size), generator=torch.Generator().manual_seed(size))
    whole, parts = model.new_cache(1, size), model.new_cache(1, size)
    model(Pass(tokens, cache=whole, needs={"last_kv"}, prompt_lengths=[size]))
    for chunk in tokens.split(3, dim=1):
        model(Pass(chunk, cache=parts, needs={"last_kv"}))
        parts.commit(None, torch.tensor([chunk.shape[1]]))
    assert torch.equal(whole.keys, parts.keys) and torch.equal(whole.values, parts.values)


@pytest.mark.parametrize("windows", [None, (5, None)])
def test_a_prompt_gives_what_it_gives_in_chunks(tiny_target, windows):
    model = tiny_target(sliding_windows=windows).model
    tokens = torch.randint(97, (1, 20), generator=torch.Generator().manual_seed(1))
    whole, parts = model.new_cache(1, 20), model.new_cache(1, 20)
    model(Pass(tokens, cache=whole, needs={"last_kv"}, prompt_lengths=[20]))
    for chunk in tokens.split(6, dim=1):
        model(Pass(chunk, cache=parts, needs={"last_kv"}))
        parts.commit(None, torch.tensor([chunk.shape[1]]))
    torch.testing.assert_close(whole.keys, parts.keys, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.values, parts.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter", ["plain", "prompt_lookup", "token_recycling", "triforce"])
def test_eight_prompts_take_one_pass_and_give_what_each_gives(tiny_target, dtype, drafter):
    target = tiny_target(dtype=dtype)
    alone = [Engine(target).generate([prompt], NEW)[0].tokens for prompt in PROMPTS]
    engine = Engine(target, drafter)
    shapes = passes_of(engine)
    found = engine.generate(PROMPTS, NEW)
    assert [generation.tokens for generation in found] == alone
    assert shapes[0] == (8, 39) and all(width < 39 for _, width in shapes[1:])
    assert len({generation.stats.prefill_seconds for generation in found}) == 1


def test_prompts_of_one_token_need_no_pass(tiny_target):
    engine = Engine(tiny_target())
    shapes = passes_of(engine)
    found = engine.generate([[3], [4], [5]], NEW)
    assert set(shapes) == {(3, 1)} and len(shapes) == NEW.max_new_tokens
    assert all(len(generation.tokens) == NEW.max_new_tokens for generation in found)


def test_a_pass_is_bounded_and_long_prompts_come_alone(tiny_target, monkeypatch):
    """A pass's query tokens, padding counted, stay below the bound; a prompt of several chunks shares no pass."""
    monkeypatch.setattr(slot_pool_module, "MOST_PREFILL_TOKENS", 40)
    target = tiny_target()
    prompts = [[1] * 11, [2] * 13, [3] * 14, [4] * 13, [5] * 30, [6] * 3]
    alone = [Engine(target).generate([prompt], NEW)[0].tokens for prompt in prompts]
    engine = Engine(target, prefill_chunk=16)
    shapes = passes_of(engine)
    found = engine.generate(prompts, NEW)
    assert [generation.tokens for generation in found] == alone
    assert shapes[:5] == [(3, 13), (1, 12), (1, 16), (1, 13), (1, 2)]
