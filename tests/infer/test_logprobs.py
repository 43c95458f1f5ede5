"""Log-probabilities are the target's own, whatever the sampling, the drafter, the batch and the prefill; transformers'
own logits say which they are."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target

TEXT = "the cat sat on the mat and the dog sat on the log. "
NEW = 14
# Beside each other in a batch: some ask, some do not, and none sees what penalties and filters do.
PARAMS = [
    SamplingParams(logprobs=3, max_new_tokens=NEW),
    SamplingParams(temperature=1.0, seed=3, max_new_tokens=NEW),
    SamplingParams(temperature=0.8, top_k=5, seed=4, logprobs=0, max_new_tokens=NEW),
    SamplingParams(
        temperature=1.0, seed=5, repetition_penalty=1.3, logit_bias={7: 4.0, 9: -4.0}, banned_token_ids=(1, 2),
        logprobs=20, max_new_tokens=NEW,
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tiny):
    target = load_target(tiny, torch.float32)
    return [target.tokenizer(text).input_ids for text in (TEXT * 4, "the dog", TEXT, "on the mat the cat" * 3)]


@pytest.fixture(scope="module")
def references(tiny, prompts):
    """(prompt, its new tokens) -> transformers' log-probabilities of every next token, [tokens, V]."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)

    def of(index, tokens):
        with torch.no_grad():
            return model(torch.tensor([prompts[index] + tokens])).logits[0].log_softmax(-1)

    return of


def check(entries, tokens, rows, k):
    assert [entry.token for entry in entries] == tokens
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        best = row.topk(k)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [float(row[token]) for token, _ in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.logprob <= max((value for _, value in entry.top), default=0.0)


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("drafter", ["plain", "token_recycling+prompt_lookup"])
def test_they_are_those_of_transformers(tiny, prompts, references, drafter, slots, chunk):
    engine = Engine(load_target(tiny, torch.float32), drafter, slots=slots, prefill_chunk=chunk, nodes=None)
    for _ in range(2):  # the second time, prompts of several passes could reuse their keys and values
        for index, one in enumerate(engine.generate(prompts, PARAMS)):
            asked, prompt = PARAMS[index], prompts[index]
            rows = references(index, one.tokens)
            if asked.logprobs is None:
                assert one.logprobs is None
            else:
                check(one.logprobs, one.tokens, rows[len(prompt) - 1 : -1], asked.logprobs)


def test_a_stream_has_them_with_its_tokens(tiny, prompts):
    """Also where a stop string cuts a step's tokens."""
    engine = Engine(load_target(tiny, torch.float32), "prompt_lookup", nodes=None)
    whole = engine.generate(prompts, PARAMS)[0]
    for params in (PARAMS[0], replace(PARAMS[0], stop_token_ids=(whole.tokens[NEW // 2],))):
        pieces = list(engine.stream([prompts[0]], params))
        for piece in pieces:
            assert [one.token for one in piece.logprobs] == piece.tokens
        assert [one for piece in pieces for one in piece.logprobs] == pieces[-1].generation.logprobs
    assert len(pieces[-1].generation.logprobs) < NEW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_drafter_has_the_same(shared, tiny_target, dtype, c_kernels):
    """To the last bit in bf16, whose rows do not depend on the width of a pass; in fp32 up to rounding."""
    exactness = shared("infer/test_exactness.py")
    target = tiny_target(vocab_size=exactness.VOCAB, n_kv_heads=2, max_positions=90, dtype=dtype)
    small = tiny_target(vocab_size=exactness.VOCAB, n_layers=1, n_kv_heads=1, seed=5, max_positions=90, dtype=dtype)
    asked = exactness.prompts("gqa", "overflow")
    params = [replace(PARAMS[i % 4], max_new_tokens=8, logprobs=2) for i in range(len(asked))]
    want = Engine(target).generate(asked, params)
    for name, make in exactness.DRAFTERS.items():
        for one, plain in zip(Engine(target, make(target, small), slots=3).generate(asked, params), want, strict=True):
            assert one.tokens == plain.tokens
            if dtype == torch.bfloat16:
                assert one.logprobs == plain.logprobs, name
            else:
                found, expected = ([x.logprob for x in of.logprobs] for of in (one, plain))
                assert found == pytest.approx(expected, abs=1e-4), name


def test_what_one_asks_for_does_not_change_anothers(tiny, prompts):
    """In bf16 many tokens are equally probable: the lowest id comes first, however many are asked for beside."""
    engine = Engine(load_target(tiny, torch.bfloat16), slots=2)
    for k in (1, 2, 5):
        asked = SamplingParams(logprobs=k, max_new_tokens=NEW)
        (alone,) = engine.generate([prompts[0]], asked)
        beside = engine.generate(prompts[:2], [asked, replace(asked, logprobs=20)])[0]
        assert beside.logprobs == alone.logprobs
        assert all(one.top[0][0] == one.token for one in alone.logprobs)  # greedy
        assert all([*one.top] == sorted(one.top, key=lambda pair: (-pair[1], pair[0])) for one in alone.logprobs)
    engine.generate([prompts[0]], SamplingParams(max_new_tokens=2))
    assert not engine.runner.state.logprobs
