"""Grammars: answers follow them, with plain decoding's tokens whichever drafter, on a CPU and on a device that is
pretended, and with the tokens of transformers' own decoding under llguidance's masks."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from longdraft.infer.choice import grammar
from longdraft.infer.choice.grammar import choice_grammar, json_grammar, regex_grammar
from longdraft.infer.drafters import triforce
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.models.hf import load_target

VOCAB, POSITIONS, NEW, END = 270, 90, 24, 256
# Of which some merges are tokens of their own, so that a text may be written in several ways.
MERGED = ("ab", "12", "ba", '":', '{"', "00", "[[", "aab")
CODES = r"([a-c]{2}(12|[0-9]){1,6};){1,4}"
NESTED = 'start: "[" (start ("," start)*)? "]" | /[1-9][0-9]*/ | "x" start'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["ab", "ba", "cc"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SAMPLINGS = [
    SamplingParams(grammar=regex_grammar(CODES)),
    SamplingParams(),
    SamplingParams(temperature=1.0, top_p=0.9, grammar=NESTED),
    SamplingParams(temperature=1.0, grammar=json_grammar(SCHEMA), presence_penalty=0.3),
    SamplingParams(temperature=0.8, grammar=regex_grammar(CODES), logprobs=1),
    SamplingParams(temperature=1.0),
]


def byte_tokenizer():
    """One token a byte, and MERGED."""
    vocab = {one: i for i, one in enumerate(sorted(ByteLevel.alphabet()))} | {"<end>": END}
    vocab |= {text: END + 1 + i for i, text in enumerate(MERGED)}
    rust = Tokenizer(BPE(vocab, [(text[:1], text[1:]) for text in MERGED]))
    rust.pre_tokenizer, rust.decoder = ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    rust.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<end>")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(autouse=True)
def overflowing(monkeypatch):
    """Windows and strides that overflow within these short texts."""
    monkeypatch.setattr(SmallModelDrafter, "window", 12)
    monkeypatch.setattr(triforce, "STRIDE", 10)


@pytest.fixture
def models(tiny_target, tokenizer):
    """A target and a smaller model, with this tokenizer."""
    sizes = dict(vocab_size=VOCAB, max_positions=POSITIONS)
    target, small = tiny_target(n_kv_heads=2, **sizes), tiny_target(n_layers=1, n_kv_heads=1, seed=5, **sizes)
    return [replace(one, tokenizer=tokenizer, eos_token_ids=(END,)) for one in (target, small)]


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(END, (count,), generator=generator).tolist() for count in (9, 30, 1, 18, 5, 40)]


def params():
    return [replace(one, seed=1500 + i, max_new_tokens=NEW) for i, one in enumerate(SAMPLINGS)]


PLAIN = []  # plain decoding's tokens, filled when first needed


@pytest.fixture
def plain(models, plain_tokens):
    if not PLAIN:
        PLAIN.extend(plain_tokens(models[0], prompts(), params()))
    return PLAIN


def follows(tokenizer, text, sampling) -> bool:
    """Whether a complete text is one of the grammar's, in Python's own reading of it."""
    if sampling.grammar == regex_grammar(CODES):
        return re.fullmatch(CODES, text) is not None
    if sampling.grammar == NESTED:
        return isinstance(json.loads(text.replace("x", "")), list | int)
    found = json.loads(text)
    return found.keys() == {"a", "b"} and 0 <= found["a"] <= 999 and found["b"] in SCHEMA["properties"]["b"]["enum"]


DRAFTERS = (
    "tokenswift", "tokenswift_draft_pass", "few_words", "medusa", "longspec", "triforce", "triforce_self",
    "small_model", "token_recycling", "prompt_lookup", "longspec+token_recycling", "triforce+prompt_lookup",
)  # fmt: skip


@pytest.fixture
def drafter(shared, models):
    """(name, put) -> a drafter of test_exactness.py, or several as a+b. `put` moves networks to a device."""
    exactness = shared("infer/test_exactness.py")
    randomised = exactness.randomised

    def make(name, put=lambda network: network):
        exactness.randomised = lambda draft, target, **options: put(randomised(draft, target, **options))
        for one in models:
            put(one.model)
        made = [exactness.DRAFTERS[one](*models) for one in name.split("+")]
        return Combined(made) if len(made) > 1 else made[0]

    return make


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_gives_plain_decodings_tokens(models, plain, drafter, name, lag):
    """Requests with and without a grammar beside each other; all nodes, or those that the engine picks."""
    engine = Engine(models[0], drafter(name), slots=3, nodes=("auto", None)[lag])
    engine.runner.lag = lag
    assert [one.tokens for one in engine.generate(prompts(), params())] == plain


@pytest.mark.parametrize(("name", "recorded"), [("longspec", True), ("triforce+prompt_lookup", False)])
def test_so_it_does_on_a_device(models, plain, drafter, pretended_cuda, name, recorded):
    with pretended_cuda.PretendedCuda() as gpu:
        made = drafter(name, gpu.put)
        engine = Engine(models[0], made, slots=2, nodes=None, graphs=None if recorded else False)
        asked = [replace(one, max_new_tokens=9) for one in params()]
        found = engine.generate(prompts(), asked)
    assert [one.tokens for one in found] == [tokens[:9] for tokens in plain]


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"properties": {"a": {}}, "type": "object"}, '{"a":1,"b":2}', False),
        ({"properties": {"a": {}}, "type": "object", "additionalProperties": True}, '{"a":1,"b":2}', True),
        ({"type": "object"}, '{"a":1,"b":2}', True),
        ({"properties": {"properties": {"type": "integer"}}, "type": "object"}, '{"properties":1}', True),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"properties": {"x": {}}}}, "type": "array"},
            '[{"y":1}]',
            False,
        ),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"}, '{"a":1,"b":2}', True),
        ({"type": "object", "properties": {"a": {}}}, '{\n  "a": 1\n}', True),
        ({"type": "object", "properties": {"a": {}}}, '{  "a": 1}', False),
    ],
)
def test_objects_have_the_properties_that_are_named_and_few_blanks(models, schema, text, allowed):
    matcher, tokens = grammar.matcher_of(models[0], json_grammar(schema)), models[0].tokenizer(text).input_ids
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) == allowed


class Masked(LogitsProcessor):
    """transformers' decoding of one text under llguidance's masks."""

    def __init__(self, target, text, start):
        self.matcher, self.read = grammar.matcher_of(target, text), start

    def __call__(self, input_ids, scores):
        assert self.matcher.consume_tokens(input_ids[0, self.read :].tolist())
        self.read = input_ids.shape[1]
        words = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = torch.from_numpy(np.unpackbits(words, bitorder="little")[: scores.shape[1]].astype(bool))
        return scores.masked_fill(~allowed, -torch.inf)


def test_transformers_gives_the_same_tokens(tiny):
    target, model = load_target(tiny, torch.float32), AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for text in (json_grammar(SCHEMA), regex_grammar(CODES), choice_grammar(["yes", "no", "nobody"])):
        tokens = target.tokenizer("the log").input_ids
        masked = LogitsProcessorList([Masked(target, text, len(tokens))])
        want = model.generate(
            torch.tensor([tokens]), max_new_tokens=40, do_sample=False, logits_processor=masked, pad_token_id=0
        )[0, len(tokens) :].tolist()
        (found,) = Engine(target).generate([tokens], SamplingParams(grammar=text, max_new_tokens=40))
        # transformers goes on to an end token, of which ours needs none where the grammar allows no more.
        assert want in (found.tokens, [*found.tokens, *target.eos_token_ids[:1]])


def test_answers_follow_their_grammars_and_end_with_them(models, tokenizer):
    asked = [replace(one, max_new_tokens=70) for one in params()[:5]]
    done = Engine(models[0]).generate([[7]] * 5, asked)
    ended = [one.finish_reason == "stop" for one in done]
    assert sum(ended) >= 3
    for one, sampling, whole in zip(done, asked, ended, strict=True):
        assert sampling.grammar is None or not whole or follows(tokenizer, one.text, sampling), one.text
    (yes,) = Engine(models[0]).generate([[7]], SamplingParams(grammar=choice_grammar(["yes"]), ignore_eos=True))
    assert (yes.text, yes.finish_reason) == ("yes", "stop")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("grammar", {"grammar": "start: nothing"}),
        ("grammar", {"grammar": json_grammar({"type": "objekt"})}),
        ("grammar", {"grammar": json_grammar({"not": {"type": "string"}})}),
        ("grammar", {"grammar": regex_grammar("(")}),
        ("grammar", {"grammar": "start: start"}),
        ("grammar", {"grammar": json_grammar({"$ref": "#"})}),
        ("min_new_tokens", {"grammar": regex_grammar("a*"), "min_new_tokens": 3}),
        ("banned_token_ids", {"grammar": regex_grammar("a*"), "banned_token_ids": (3,)}),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(models, field, values):
    with pytest.raises(ValueError, match=f"^{field}: "):
        Engine(models[0]).generate([[7]], SamplingParams(**values))
    bare = replace(models[0], tokenizer=None)
    with pytest.raises(ValueError, match=r"^grammar: .*tokenizer"):
        Engine(bare).generate([[7]], SamplingParams(grammar=regex_grammar("a*")))


def test_a_text_that_becomes_too_complex_ends_there_and_alone(models, monkeypatch):
    """Of two requests; the other one goes on, and the next call of this grammar starts anew."""
    limits = LLParserLimits(max_lexer_states=60)
    monkeypatch.setattr(grammar, "LLMatcher", partial(LLMatcher, limits=limits))
    text = regex_grammar("[ab]*a[ab]{12}c")
    asked = [SamplingParams(grammar=text, temperature=1.0, seed=1), SamplingParams(seed=2, max_new_tokens=40)]
    engine = Engine(models[0], "prompt_lookup")
    for _ in range(2):
        first, second = engine.generate([[7], [8]], asked)
        assert first.finish_reason == "grammar" and second.finish_reason == "length" and len(first.tokens) > 2
