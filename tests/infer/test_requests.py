"""Requests: what they may be, when they end, and that neither neighbours nor slots change an answer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.passes import Pass

NEW = 24
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the user comes first') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
DRAFTERS = ["plain", "prompt_lookup", "token_recycling", "prompt_lookup+token_recycling"]


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer of bytes and a few words, so that characters and stop strings cross the borders of tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>", "<|x|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the cat sat on the mat and the dog sat on the log. " * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture
def target(tiny_target, tokenizer):
    found = tiny_target(vocab_size=280, std=0.3, eos_token_ids=(0,))
    found.tokenizer = tokenizer
    return found


@pytest.fixture
def alone(target):
    """(prompt, params) -> plain decoding's generation for this request without neighbours."""
    engine = Engine(target)
    return lambda prompt, params: engine.generate([prompt], params)[0]


def test_prompts_of_every_kind(target, tokenizer, alone):
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    ids = tokenizer("the cat sat").input_ids
    params = SamplingParams(max_new_tokens=5)
    found = Engine(target).generate(["the cat sat", ids, chat, tuple(ids)], params)
    assert [generation.prompt for generation in found[:2] + found[3:]] == [ids] * 3
    assert len({tuple(generation.tokens) for generation in found[:2] + found[3:]}) == 1
    written = "<|user|>the cat\n<|assistant|>sat\n>"
    assert found[2].prompt == tokenizer(written).input_ids and tokenizer.decode(found[2].prompt) == written
    engine = Engine(target)
    for one in ("the cat sat", ids, chat, [chat]):
        assert len(engine.generate(one, params)) == 1
    assert engine.generate([], params) == [] and list(engine.stream([])) == []


def said(content, **more):
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (said([{"type": "image_url", "image_url": {}}]), "content"),
        (said([{"type": "text", "text": "a"}, "b"]), "content"),
        (said([{"type": "text"}]), "content"),
        (said([]), "content"),
        (said(5), "content"),
        ({"role": "user"}, "content"),
        ({"content": "x"}, "role"),
        (said("x", role=3), "role"),
        (said("a\udcffb"), "content"),
        (said([{"type": "text", "text": "\ud83d"}]), "content"),
        (said("x", role="\ud83d"), "role"),
    ],
)
def test_messages_that_are_none(target, message, field):
    with pytest.raises(ValueError, match=f"^prompt 0, message 1.*{field}"):
        Engine(target).generate([said("x"), message])


@pytest.mark.parametrize(
    ("prompts", "error"),
    [
        (None, "prompts"),
        (b"abc", "prompts"),
        ({"role": "user"}, "prompts"),
        ([1, "the"], "prompt 0"),
        (torch.tensor([1, 2]), "prompt"),
        ("", "prompt 0 has no tokens"),
        (["the", ""], "prompt 1 has no tokens"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[1, 280]], r"prompt 0: token ids .* 0\.\.279"),
        ([[1], [-1, 3]], "prompt 1: token ids"),
        ([[1, 10**5000]], "prompt 0: token ids"),
        ([[1, True]], "prompt 0"),
        ([[1.5]], "prompt 0"),
        ([None], "prompt 0"),
        ([b"abc"], "prompt 0"),
        ([["the", "cat"]], "prompt 0"),
        ([[1, {"role": "user"}]], "prompt 0"),
        (["a\udc80b"], "prompt 0: 'a.udc80b'"),
        ([[1] * 256], "prompt 0 has 256 tokens; give at most 255"),
        ([[{"role": "assistant", "content": "hi"}]], "prompt 0: .*the user comes first"),
    ],
)
def test_prompts_that_are_none(target, prompts, error):
    engine = Engine(target)
    with pytest.raises(ValueError, match=f"^{error}"):
        engine.generate(prompts, SamplingParams(max_new_tokens=2))
    assert len(engine.generate([[3]], SamplingParams(max_new_tokens=2))) == 1, "the engine goes on after an error"


def test_text_needs_a_tokenizer_and_a_chat_its_template(target, tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    target.tokenizer = None
    for prompt in ("the cat", chat):
        with pytest.raises(ValueError, match="prompt 0: a text needs a tokenizer, and this target has none"):
            Engine(target).generate(prompt)
    with pytest.raises(ValueError, match="stop_strings: this target has no tokenizer; use stop_token_ids"):
        Engine(target).generate([[1]], SamplingParams(stop_strings=("a",)))
    assert Engine(target).generate([[1]], SamplingParams(max_new_tokens=2))[0].text is None
    target.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="a chat needs a chat template, and tiny-0's tokenizer has none"):
        Engine(target).generate(chat)


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=[280])),
        ("banned_token_ids", SamplingParams(banned_token_ids=[280])),
        ("banned_token_ids", SamplingParams(banned_token_ids=list(range(280)))),  # nothing would be left
        ("logit_bias", SamplingParams(logit_bias={280: 1.0})),
        *(("params", bad) for bad in ([SamplingParams()], [SamplingParams(), {"seed": 1}], {"temperature": 0.5}, None)),
    ],
)
def test_params_that_do_not_fit_are_named(target, field, params):
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        Engine(target).generate([[1], [2]], params)


def reference(target, prompt, params, max_length):
    """Greedy decoding with bans, stop ids and stop strings, written out: each pass is over the whole sequence."""
    tokens, ends = list(prompt), set(params.stop_token_ids)
    if not params.ignore_eos:
        ends |= set(target.eos_token_ids)
    while True:
        logits = target.model(Pass(torch.tensor([tokens]))).logits[0, -1]
        logits[list(params.banned_token_ids)] = -torch.inf
        tokens.append(int(logits.argmax()))
        new = tokens[len(prompt) :]
        text = target.tokenizer.decode(new, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        found = [text.index(string) for string in params.stop_strings if string in text]
        if tokens[-1] in ends:
            return new, target.tokenizer.decode(new[:-1], skip_special_tokens=True), "stop"
        if found:
            return new, text[: min(found)], "stop"
        if len(new) == params.max_new_tokens or len(tokens) == max_length:
            reason = "length" if len(new) == params.max_new_tokens else "capacity"
            return new, target.tokenizer.decode(new, skip_special_tokens=True), reason


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_ends_are_as_written_out(target, drafter):
    """Stop strings across the borders of tokens and some that never come, stop ids, bans and lengths, in one batch."""
    prompts = ["the cat sat on the mat and the dog", [5], "the log. the log. the log.", "a", "sat on", "the", "dog the"]
    words = [target.tokenizer.decode([token]) for token in range(280)]
    ugly = tuple(i for i, word in enumerate(words) if i < 2 or not (word.isascii() and word.isprintable()))
    base = SamplingParams(max_new_tokens=NEW, banned_token_ids=ugly)
    free = Engine(target).generate(prompts, base)
    cut = [generation.text[7:10] for generation in free]
    params = [
        replace(base, stop_strings=(cut[0], "never comes")),
        replace(base, stop_strings=("never comes", "nor this")),
        replace(base, stop_strings=(cut[2][:1], cut[2])),
        replace(base, stop_token_ids=(free[3].tokens[8], 279)),
        replace(base, banned_token_ids=(*ugly, *free[4].tokens[:5]), stop_strings=(cut[4],)),
        SamplingParams(max_new_tokens=200),
        replace(base, max_new_tokens=1, stop_strings=(free[6].text[:1],)),
    ]
    found = Engine(target, drafter, slots=3, max_length=90).generate(prompts, params)
    for prompt, asked, generation in zip(prompts, params, found, strict=True):
        ids = target.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        assert (generation.tokens, generation.text, generation.finish_reason) == reference(target, ids, asked, 90)
    assert {generation.finish_reason for generation in found} >= {"stop", "length"}
    assert len(found[0].tokens) < NEW and len(found[1].tokens) == NEW
    assert not any(cut[0] in words[token] for token in found[0].tokens), "it lies across the borders of tokens"


@pytest.mark.parametrize(
    ("strings", "ends"),
    [
        (["<|x|>"], [1]),
        (["never comes", "<|x|>"], [1]),
        (["<|end|>", "<|x|>"], [0, 1]),
        (["<|end|>"], [0]),
        (["a<|x|>", " <|x|>", "<|x", "never comes"], []),
    ],
)
def test_a_special_token_among_the_stop_strings_stops(target, alone, strings, ends):
    """As other servers take it. The text never shows it, and a longer string that has it never comes."""
    words = target.tokenizer("the cat sat").input_ids
    params = SamplingParams(max_new_tokens=200, temperature=3.0, seed=5, ignore_eos=True)
    params = replace(params, banned_token_ids=sorted(set(range(280)) - {0, 1, *words}))
    found = alone(words, replace(params, stop_strings=strings))
    expected = alone(words, replace(params, stop_token_ids=ends))
    assert (found.tokens, found.text) == (expected.tokens, expected.text) and "<|" not in found.text
    assert (found.finish_reason, found.tokens[-1] in ends) == (("stop", True) if ends else ("length", False))
    assert len(found.tokens) > 1


def test_seeds_of_64_bits(target, alone):
    params = SamplingParams(temperature=1.5, max_new_tokens=NEW)
    texts = {}
    for seed in (0, 1, -1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)):
        first, second = (alone([3, 4], replace(params, seed=seed)) for _ in range(2))
        assert first.tokens == second.tokens and first.seed == seed
        texts[seed % 2**64] = tuple(first.tokens)
    assert len(texts) == len(set(texts.values())) == 6, "the 64 bits are the seed"
    drawn = alone([3, 4], params)
    assert alone([3, 4], replace(params, seed=drawn.seed)).tokens == drawn.tokens
    assert alone([3, 4], params).seed != drawn.seed


def cancelled(engine, prompts, params, rules):
    """Stream and call `cancel` by rules {(index, tokens so far): index to cancel}. Returns the generations by index."""
    found, counts = {}, dict.fromkeys(range(len(prompts)), 0)
    for piece in engine.stream(prompts, params):
        counts[piece.index] += len(piece.tokens)
        assert piece.index not in found, "a finished prompt has no more pieces"
        if piece.generation:
            found[piece.index] = piece.generation
        for index in rules(piece, counts[piece.index]):
            engine.cancel(index)
    return found


@pytest.mark.parametrize("drafter", ["plain", "token_recycling"])
def test_cancellation_mid_stream(target, alone, drafter):
    prompts, params = [[9, 5], [4], [8] * 7, [2, 2], [6]], SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    free = [alone(prompt, params).tokens for prompt in prompts]

    def rules(piece, count):
        if piece.index == 0 and count >= 4 and not piece.generation:
            return [0, 3, 99]  # itself, one that waits, one that does not exist
        return []

    engine = Engine(target, drafter, slots=2)
    for _ in range(2):  # nothing is left over for the second call
        found = cancelled(engine, prompts, params, rules)
        assert sorted(found) == list(range(5))
        assert [found[i].tokens for i in (1, 2, 4)] == [free[i] for i in (1, 2, 4)]
        assert all(found[i].finish_reason == "length" for i in (1, 2, 4))
        assert (found[3].tokens, found[3].text, found[3].finish_reason) == ([], "", "cancelled")
        kept = found[0].tokens
        assert found[0].finish_reason == "cancelled" and 4 <= len(kept) < NEW and kept == free[0][: len(kept)]
        assert found[0].text == target.tokenizer.decode(kept, skip_special_tokens=True)
        assert found[0].summary()["new_tokens"] == len(kept)


def test_cancelling_from_the_piece_of_a_cancelled_one(target):
    """The last one to be cancelled is on a slot that the engine has already gone past."""
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)

    def rules(piece, count):
        if piece.generation and piece.index == 1:
            return [0]
        return [1] if piece.index == 0 and count == 3 else []

    found = cancelled(Engine(target), [[9, 5], [4]], params, rules)
    assert [found[i].finish_reason for i in range(2)] == ["cancelled"] * 2


@pytest.mark.parametrize("combined", [(), (0,), (1,), (0, 1)], ids=["same", "part", "whole", "shared_part"])
def test_a_drafter_decodes_for_one_engine_at_a_time(target, alone, combined):
    """Also as a part of others. combined: in which of two engines it is."""
    drafter, params = PromptLookup(), SamplingParams(max_new_tokens=NEW)
    engine, other = (
        Engine(target, Combined([drafter, TokenRecycling(target)]) if i in combined else drafter) for i in range(2)
    )
    stream = engine.stream([[5, 6]], params)
    next(stream)
    with pytest.raises(RuntimeError, match="this drafter is already decoding; finish or close its stream, or use"):
        other.generate([[7]], params)
    tokens = [piece.generation.tokens for piece in stream if piece.generation]
    assert tokens == [alone([5, 6], params).tokens]
    for one in (other, engine):  # one after the other
        assert one.generate([[7]], params)[0].tokens == alone([7], params).tokens


def requests():
    """Prompts and parameters drawn from their whole ranges."""
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.0, 20.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 280, 10**6]),
        top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.5, 0.95]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.99]),
        eta_cutoff=st.sampled_from([0.0, 0.0, 1e-3, 0.9]),
        min_tokens_to_keep=st.sampled_from([1, 1, 3, 20, 10**6]),
        seed=st.integers(-(2**63), 2**64 - 1),
        max_new_tokens=st.sampled_from([1, 2, 5, 17, 50]),
        stop_token_ids=st.lists(st.integers(0, 279), max_size=3),
        ignore_eos=st.booleans(),
        contextual_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        contextual_window=st.sampled_from([1, 3, 10**6]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.0, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.2]),
        banned_token_ids=st.lists(st.integers(0, 279), max_size=30),
        stop_strings=st.lists(st.sampled_from([" ", "e", "the", "\n", "zz", "never comes"]), max_size=2),
    )
    prompt = st.lists(st.integers(0, 279), min_size=1, max_size=12)
    return st.lists(st.tuples(prompt, params), min_size=1, max_size=5)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=requests(), slots=st.sampled_from([None, 1, 2]), drafter=st.sampled_from(DRAFTERS), chunk=st.integers(1, 9)
)
def test_no_neighbour_slot_or_drafter_changes_an_answer(target, alone, asked, slots, drafter, chunk):
    prompts, params = [list(prompt) for prompt, _ in asked], [sampling for _, sampling in asked]
    engine = Engine(target, drafter, slots=slots, prefill_chunk=chunk, nodes="auto" if chunk % 2 else None)
    for prompt, sampling, found in zip(prompts, params, engine.generate(prompts, params), strict=True):
        expected = alone(prompt, sampling)
        got = (found.prompt, found.tokens, found.text, found.finish_reason, found.seed)
        assert got == (prompt, expected.tokens, expected.text, expected.finish_reason, sampling.seed)
        assert 1 <= len(found.tokens) <= min(sampling.max_new_tokens, 256 - len(prompt))
        assert not set(found.tokens) & set(sampling.banned_token_ids)
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {0})
        assert not set(found.tokens[:-1]) & ends and not any(string in found.text for string in sampling.stop_strings)
