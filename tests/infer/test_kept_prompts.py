"""Rows that a prompt reuses have the bits that an earlier prompt's passes gave them, and belong to the weights it is
decoded with. Also: which slot a prompt takes."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from longdraft.infer.engine import Engine
from longdraft.infer.kept_prompts import KeptPrompts
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.models.decoder_config import DeltaConfig
from longdraft.models.hf import refresh, target_from_transformers
from longdraft.models.kv_cache import KVCache

DOCUMENT = list(range(3, 43))
CHUNK, POSITIONS = 8, 120
NEW = SamplingParams(max_new_tokens=4)


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=61, max_positions=POSITIONS)


def engine_of(target, **options) -> Engine:
    return Engine(target, "prompt_lookup", prefill_chunk=CHUNK, **options)


def rows(engine, slot, count):
    cache = engine.runner.cache
    return torch.stack((cache.keys[:, slot, :count], cache.values[:, slot, :count]))


def turns(engine, calls):
    """How many tokens each prompt of each call reused."""
    return [[one.stats.cached_tokens for one in engine.generate(prompts, NEW)] for prompts in calls]


def test_rows_have_the_bits_that_they_had(target, monkeypatch):
    """A conversation goes on while another one, of one pass, is decoded on the slot beside it."""
    engine, first = engine_of(target, slots=2), [*DOCUMENT, 1]
    monkeypatch.setattr(SlotState, "working", slice(0, 2))  # as on a GPU, where passes write to idle slots too
    engine.generate([[1]], replace(NEW, max_new_tokens=POSITIONS))  # allocates the cache for all calls
    answer = engine.generate([first], NEW)[0].tokens
    read = rows(engine, 0, 40)
    second = [*first, *answer, *range(50, 60)]
    assert turns(engine, [[[1, 2, 3]], [second]]) == [[0], [40]]
    assert torch.equal(rows(engine, 0, 40), read)


def test_linear_attention_goes_on_from_the_state_that_it_had(tiny_target):
    """A prompt that has all that was kept goes on from there, on any slot; one that has less begins anew."""
    delta = DeltaConfig(layers=(0,), key_heads=2, value_heads=4, key_dim=8, value_dim=16, kernel=4)
    target = tiny_target(vocab_size=61, max_positions=POSITIONS, delta=delta)
    engine, first = engine_of(target, slots=2), [*DOCUMENT, 1, 2]
    second, third = [*first, 5, 6, 7, 8, 9, 10], [*DOCUMENT[:30], *range(12)]
    calls = [[first], [second, first], [third], [second]]
    params = replace(NEW, max_new_tokens=12, temperature=1.0, seed=3)
    found = [engine.generate(prompts, params) for prompts in calls]
    assert [[one.stats.cached_tokens for one in call] for call in found] == [[0], [40, 40], [0], [40]]
    for prompts, call in zip(calls, found, strict=True):
        fresh = Engine(target, prefill_chunk=CHUNK, keep_prompts=False).generate(prompts, params)
        assert [one.tokens for one in call] == [one.tokens for one in fresh]


def test_the_next_turn_of_a_chat_takes_over_the_one_before(tiny_target):
    """Though no cache was allocated for it: one has a power of two of positions, or a multiple of 2048."""
    engine = engine_of(tiny_target(vocab_size=61))
    chat = [i % 61 for i in range(133, 215)]
    assert turns(engine, [[chat[:45]], [chat[:55]], [chat[:70]], [chat[:82]]]) == [[0], [40], [0], [64]]


def test_prompts_of_one_call_share_a_document(target):
    engine = engine_of(target, slots=3)
    asked = [[*DOCUMENT, own] for own in (50, 51, 52)]
    assert turns(engine, [asked, asked[::-1]]) == [[0, 32, 32], [32, 32, 32]]
    assert turns(engine_of(target, slots=1), [asked]) == [[0, 32, 32]]
    assert turns(engine_of(target), [asked[:1], asked, asked[1:]]) == [[0], [0, 32, 32], [0, 32]]  # on 1, 3, 2 slots


def test_a_prompt_that_is_read_in_one_pass_takes_nothing_over(target):
    """Its single pass is not the same as the first of several passes."""
    whole = DOCUMENT[: CHUNK + 1]
    assert turns(engine_of(target), [[whole], [whole], [[*whole, 7]], [[*whole, 7]], [whole]]) == [
        [0],
        [0],
        [0],
        [8],
        [0],
    ]


def test_a_prompt_that_is_cancelled_leaves_what_it_had_read(target):
    engine, long = engine_of(target, slots=2), [*DOCUMENT, 1]
    (running,) = read_requests(target, [[1, 2, 3]], replace(NEW, max_new_tokens=30), POSITIONS)
    coming = [[running], [replace(*read_requests(target, [long], NEW, POSITIONS), index=1)], [], [], []]

    def arrivals(idle):
        if len(coming) == 1:  # two of its passes later
            engine.cancel(1)
        return coming.pop(0) if coming else None if idle else []

    done = {piece.index: piece.generation for piece in engine.serve(arrivals) if piece.generation}
    assert (done[1].finish_reason, done[1].tokens) == ("cancelled", [])
    assert turns(engine, [[[*DOCUMENT, 9]]]) == [[24]]


def test_weights_that_were_written_void_what_is_kept(target):
    engine, asked = engine_of(target), [*DOCUMENT, 1]
    assert turns(engine, [[asked], [asked]]) == [[0], [32]]
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(1.5)
    again = engine.generate([asked], NEW)[0]
    assert again.stats.cached_tokens == 0
    assert again.tokens == engine_of(target, keep_prompts=False).generate([asked], NEW)[0].tokens
    assert turns(engine, [[asked]]) == [[32]]


@pytest.mark.parametrize("trained", [False, True])
def test_where_rows_may_become_wrong_nothing_is_kept(tiny_target, trained):
    """PyTorch does not count what fused optimizers write; or the length of a prompt rotates its keys."""
    rope = {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    target = tiny_target(vocab_size=61, max_positions=POSITIONS, **({} if trained else rope))
    target.model.requires_grad_(trained)
    assert turns(engine_of(target), [[[*DOCUMENT, 1]], [[*DOCUMENT, 1]]]) == [[0], [0]]


def begin(some, slot, prompt):
    """Begin this prompt on this slot. Returns how much it reuses."""
    assert some.choose_slot(prompt, [slot]) == slot
    return some.begin(slot, prompt)


def kept(target, n_slots, *prompts):
    """Kept prompts on slots 0, 1, ..., begun in this order."""
    found = KeptPrompts(target.model, target.model.new_cache(n_slots, POSITIONS), CHUNK, 0)
    for slot, prompt in enumerate(prompts):
        begin(found, slot, prompt)
        found.extend(slot, prompt[:-1])
    return found


def test_a_prompt_goes_where_the_least_is_lost(target):
    other = DOCUMENT[::-1]

    def slot(some, prompt, free=range(4)):
        return some.choose_slot(prompt, free)

    some = kept(target, 4, DOCUMENT, other)
    assert slot(some, [*DOCUMENT, 1, 2]) == 0
    assert slot(some, [*DOCUMENT[:30], 1]) == 2  # the document's last tokens would be lost
    assert slot(some, [7] * 20) == 2
    assert slot(some, [7] * 20, [3]) == 3
    full = kept(target, 4, DOCUMENT, other, [*other, 5], [*DOCUMENT, 5])
    assert slot(full, [7] * 20) == slot(full, [*other[:30], 5]) == 0  # the oldest
    assert slot(full, [7] * 20, range(1, 4)) == 1
    assert slot(full, [*other, 5, 6, 7]) == 2  # goes on there
    twice = kept(target, 4, DOCUMENT, [7] * 20, DOCUMENT)
    assert slot(twice, [*DOCUMENT, 1, 2], [1, 2]) == 2  # though another slot has as much of it


def test_a_copy_that_is_interrupted_leaves_no_rows_under_another_name(target, monkeypatch):
    engine, other = engine_of(target, slots=2), [7, 8, 9] * 14
    assert turns(engine, [[other, [*DOCUMENT, 1]]]) == [[0, 0]]
    fill = KVCache.fill

    def interrupted(*given):
        fill(*given)
        if given[2] > 0:  # the rows after those that were copied aside
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):  # from the document's slot to the other's, which is the oldest
            engine.generate([[*DOCUMENT[:30], 5]], NEW)
    for prompt in ([*other, 1], [*DOCUMENT, 2]):
        want = engine_of(target, keep_prompts=False).generate([prompt], NEW)[0].tokens
        assert engine.generate([prompt], NEW)[0].tokens == want


def test_a_target_that_is_brought_up_to_date_keeps_nothing():
    """PyTorch does not count what `refresh` writes."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=POSITIONS, eos_token_id=None, **sizes))
    target = target_from_transformers(model)
    engine, asked = engine_of(target), [*DOCUMENT, 1]
    assert turns(engine, [[asked], [asked]]) == [[0], [32]]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-2)
    refresh(target, model)
    assert turns(engine, [[asked], [asked]]) == [[0], [32]]
