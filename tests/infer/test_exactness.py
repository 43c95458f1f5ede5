"""Every drafter gives plain decoding's tokens: greedy and sampled, alone and in ragged batches with refill, with room
and with windows and budgets that overflow, on targets with as many key heads as query heads and with fewer; and so do
drafters inside TriForce, engines that are used again, and what a seed draws at random.

On the CPU. In fp32, plain decoding's decisions are shown not to be close (conftest.py). In bf16 nothing need be shown:
the CPU kernels give a row the same bits in every pass.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from longdraft.infer.drafters import triforce
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.requests import read_requests
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import TreeShape, likeliest_nodes
from longdraft.models.decoder_config import DeltaConfig, ExpertsConfig
from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.rope import RopeConfig
from longdraft.models.target import Target
from longdraft.models.transformers_model import TransformersModel, check_against
from longdraft.train.launcher import launch_ranks

VOCAB, POSITIONS, NIGHTLY = 61, 90, pytest.mark.nightly(of="infer")
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T0.7": SamplingParams(temperature=0.7),
    "T1_top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "T1_min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "T1_eta": SamplingParams(temperature=1.0, eta_cutoff=0.05),
    "T1_bias": SamplingParams(
        temperature=1.0, logit_bias={3: 2.0, 8: -2.0}, stop_token_ids=(11, 20, 33, 47), min_new_tokens=9
    ),
    "greedy_penalty": SamplingParams(contextual_penalty=1.2, contextual_window=16),
    "T1_penalty": SamplingParams(
        temperature=1.0, contextual_penalty=1.2, contextual_window=16, min_p=0.05, min_tokens_to_keep=20
    ),
}
NEW = 18  # longer than the penalty's window
# Prompts that fit in every window and budget below, and prompts that do not. Five on three slots, so slots are
# refilled.
LENGTHS = {"short": (9, 1, 5, 2, 7), "overflow": (61, 1, 33, 18, 40)}
HEADS = {"gqa": 2, "mha": 4}
# Of prompts on which no decision of plain decoding is close, under any sampling.
EXPERTS = ExpertsConfig(number=6, per_token=2, size=24, normalised=True)  # of the target "moe", in both layers
GEMMA = {  # fields of the target "gemma3", whose last layer alone reads everything
    "n_layers": 3, "qk_norm": True, "sliding_windows": (7, 11, None), "window_rope": RopeConfig(8, POSITIONS),
    "rope": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}, "activation": "gelu_tanh",
    "embedding_scale": 1.5, "post_norms": True,
}  # fmt: skip
GPT_OSS = {  # of the target "gpt_oss"
    "sliding_windows": (7, None), "attention_sinks": True, "attention_bias": True, "o_bias": True,
    "experts": replace(EXPERTS, bias=True, clamped_gate=(1.702, 2.0)),
}  # fmt: skip
QWEN3_5 = {  # of the target "qwen3_5": two layers of linear attention, and RoPE in half of a head
    "n_layers": 3, "delta": DeltaConfig(layers=(0, 1), key_heads=2, value_heads=4, key_dim=16, value_dim=8, kernel=4),
    "gated": True, "qk_norm": True,
    "rope": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
MINISTRAL = {  # of the target "ministral3", whose queries grow with their position
    "rope": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5,
    },
}  # fmt: skip
# Of the smaller model, where it is not attention alone: it shares the target's linear attention.
SMALLER = {"qwen3_5": {"n_layers": 3, "delta": QWEN3_5["delta"]}}
OTHERS = {
    "moe": {"experts": EXPERTS}, "gemma3": GEMMA, "gpt_oss": GPT_OSS, "qwen3_5": QWEN3_5, "ministral3": MINISTRAL,
}  # fmt: skip
SEEDS = {("gqa", "short"): 12, ("gqa", "overflow"): 12, ("mha", "short"): 11, ("mha", "overflow"): 14} | {
    ("moe", "overflow"): 14,
    ("olmo2", "overflow"): 3,
    ("gemma3", "overflow"): 10,
    ("gpt_oss", "overflow"): 4,
    ("qwen3_5", "overflow"): 17,
    ("ministral3", "overflow"): 1,
}


def prompts(kind: str, length: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEEDS[kind, length])
    return [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in LENGTHS[length]]


def randomised(draft, target, std=0.3):
    """Random heads, far from the identity, so that candidates disagree with each other and with the target."""
    generator = torch.Generator().manual_seed(7)
    for parameter in draft.parameters():
        parameter.data.normal_(0.0, std, generator=generator)
    return draft.to(target.model.lm_head.weight.dtype).requires_grad_(False).eval()


def heads(target, kind="linear_chain"):
    config = TokenSwiftConfig(hidden_size=target.model.config.hidden_size, kind=kind, rms_norm_eps=1e-6)
    return randomised(TokenSwift(config), target)


def few_words(target):
    """Heads that can propose a third of the vocabulary."""
    config = TokenSwiftConfig(target.model.config.hidden_size, 1e-6, draft_vocab_size=len(range(0, VOCAB, 3)))
    return randomised(TokenSwift(config, token_ids_E=torch.arange(0, VOCAB, 3)), target)


def block(target, **options):
    config = LongSpecConfig.for_target(target.model.whole_config, window=12, **options)
    return randomised(LongSpec(config), target)


DRAFTERS = {
    "tokenswift": lambda target, small: TokenSwiftDrafter(target, heads(target), draft_pass="never", ngrams=0),
    "tokenswift_5": lambda target, small: TokenSwiftDrafter(
        target, heads(target), likeliest_nodes([[0.4, 0.2, 0.1]] * 3, 5), draft_pass="never"
    ),
    "tokenswift_draft_pass": lambda target, small: TokenSwiftDrafter(
        target, heads(target), draft_pass="always", budget=24
    ),
    "tokenswift_silu": lambda target, small: TokenSwiftDrafter(
        target, heads(target, "silu_chain"), TreeShape.cartesian((2, 2)), draft_pass="always", budget=20
    ),
    "tokenswift_auto": lambda target, small: TokenSwiftDrafter(target, heads(target), budget=24),
    "medusa": lambda target, small: HeadsDrafter(
        target, randomised(Medusa(MedusaConfig(target.model.config.hidden_size)), target)
    ),
    "few_words": lambda target, small: TokenSwiftDrafter(target, few_words(target), draft_pass="always", budget=24),
    "longspec": lambda target, small: LongSpecDrafter(target, block(target, noise=5)),
    "longspec_chain": lambda target, small: LongSpecDrafter(target, block(target, noise=4), widths=(1, 1, 1, 1)),
    "triforce": lambda target, small: TriForceDrafter(target, small, budget=24),
    "triforce_self": lambda target, small: TriForceDrafter(target, budget=24),
    "triforce_recent": lambda target, small: TriForceDrafter(target, budget=24, select="recent"),
    "small_model": lambda target, small: SmallModelDrafter(target, small, gamma=3),
    "token_recycling": lambda target, small: TokenRecycling(target),
    "token_recycling_12": lambda target, small: TokenRecycling(target, nodes=12),
    "prompt_lookup": lambda target, small: PromptLookup(),
}


def in_turn(values: tuple) -> list:
    """The drafters with these values by turns; the other combinations at night."""
    rows = [(name, value, place % len(values)) for place, name in enumerate(DRAFTERS) for value in values]
    by_day = [value == values[place] for _, value, place in rows]
    marks = [() if now else (NIGHTLY,) for now in by_day]
    return [pytest.param(name, value, marks=mark) for (name, value, _), mark in zip(rows, marks, strict=True)]


def combined(names: tuple[str, ...]):
    return lambda target, small: Combined([DRAFTERS[name](target, small) for name in names])


PAIRS = [
    ("token_recycling", "prompt_lookup"),
    ("tokenswift", "prompt_lookup"),
    ("longspec", "token_recycling"),
    ("longspec", "prompt_lookup"),
    ("triforce", "prompt_lookup"),
    ("medusa", "token_recycling"),
    ("tokenswift_draft_pass", "longspec"),
    ("small_model", "triforce_self"),
    ("tokenswift_draft_pass", "triforce_recent"),
]


@pytest.fixture(autouse=True)
def overflowing(monkeypatch):
    """Windows and strides that overflow within these short texts."""
    monkeypatch.setattr(SmallModelDrafter, "window", 12)
    monkeypatch.setattr(triforce, "STRIDE", 10)


@pytest.fixture
def models(tiny_target):
    """(heads, dtype) -> a target, and a smaller model of the same vocabulary that drafts for it."""
    return lambda kind, dtype=torch.float32: (
        olmo2(dtype)
        if kind == "olmo2"
        else tiny_target(
            vocab_size=VOCAB,
            n_kv_heads=HEADS.get(kind, 2),
            max_positions=POSITIONS,
            dtype=dtype,
            **OTHERS.get(kind, {}),
        ),
        tiny_target(
            vocab_size=VOCAB,
            n_kv_heads=1,
            seed=5,
            max_positions=POSITIONS,
            dtype=dtype,
            **SMALLER.get(kind, {"n_layers": 1}),
        ),
    )


def olmo2(dtype):
    """A target computed by transformers, of a family that our decoder does not know."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    known = dict(num_key_value_heads=2, max_position_embeddings=POSITIONS, pad_token_id=None, eos_token_id=None)
    model = Olmo2ForCausalLM(Olmo2Config(vocab_size=VOCAB, tie_word_embeddings=False, **sizes, **known))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    wrapped = TransformersModel(model.to(dtype))
    return Target(wrapped, None, "olmo2", model.config, check_against(wrapped), (), "transformers")


PLAIN = {}  # plain decoding's tokens by target, prompts and sampling, one list a prompt; filled when first needed


@pytest.fixture
def plain(models, plain_tokens, seeded):
    """(heads, length, dtype) -> plain decoding's tokens of every prompt, by sampling."""

    def answers(kind, length, dtype=torch.float32):
        key = kind, length, dtype
        if key not in PLAIN:
            asked, target = prompts(kind, length), models(kind, dtype)[0]
            params = [one for sampling in SAMPLINGS.values() for one in seeded(sampling, len(asked), NEW)]
            if dtype == torch.float32:
                tokens = plain_tokens(target, asked * len(SAMPLINGS), params)
            else:
                tokens = decoded(Engine(target), asked * len(SAMPLINGS), params)
            PLAIN[key] = {name: tokens[5 * i : 5 * i + 5] for i, name in enumerate(SAMPLINGS)}
        return PLAIN[key]

    return answers


def decoded(engine, asked, params) -> list[list[int]]:
    return [generation.tokens for generation in engine.generate(asked, params)]


def check(engine, want, kind, length, cases, new=NEW):
    """Assert that the answers to `cases`, (sampling, prompt) each, are plain decoding's, all in one call."""
    drawn = prompts(kind, length)
    params = [replace(SAMPLINGS[name], seed=1500 + index, max_new_tokens=new) for name, index in cases]
    found = decoded(engine, [drawn[index] for _, index in cases], params)
    for case, tokens in zip(cases, found, strict=True):
        assert tokens == want[case[0]][case[1]][:new], case


def every(samplings: Iterable[str], indices: Iterable[int] = range(5)) -> list[tuple[str, int]]:
    return [(name, index) for name in samplings for index in indices]


TARGETS = [(kind, length) for kind in HEADS for length in LENGTHS]
# Each drafter meets every target, length and sampling, and over all drafters every pair of a target, batch, sampling
# and choice of nodes occurs: two samplings a target, alone or in a batch, all nodes or those that the engine picks.
COVER = {
    (name, *TARGETS[place]): (
        [list(SAMPLINGS)[(2 * ((place + number) % 4) + more) % 8] for more in (0, 1)],
        (1, 3)[(number // 2 + place) % 2],
        (None, "auto")[(number // 4 + place) % 2],
    )
    for number, name in enumerate(DRAFTERS)
    for place in range(4)
}


def check_in_turn(models, plain, row, samplings, batch, nodes, each):
    """`each` ragged prompts a sampling, in turn of the five, on three slots, alike at first or mixed; or one alone."""
    name, kind, length = row
    target, small = models(kind)
    engine = Engine(target, DRAFTERS[name](target, small), nodes=nodes, slots=batch)
    cases = [(one, (i + k) % 5 if batch > 1 else 0) for i, one in enumerate(samplings) for k in range(each)]
    check(engine, plain(kind, length), kind, length, cases)


@pytest.mark.parametrize("row", COVER, ids="-".join)
def test_a_drafter_gives_plain_decodings_tokens(models, plain, row):
    samplings, batch, nodes = COVER[row]
    check_in_turn(models, plain, row, samplings, batch, nodes, each=batch)


@NIGHTLY
@pytest.mark.parametrize("nodes", [None, "auto"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("row", COVER, ids="-".join)
def test_a_drafter_gives_plain_decodings_tokens_in_every_way(models, plain, row, batch, nodes):
    check_in_turn(models, plain, row, SAMPLINGS, batch, nodes, each=1)


@pytest.mark.parametrize(("name", "kind"), in_turn(("moe", "gemma3", "olmo2", "gpt_oss", "qwen3_5", "ministral3")))
def test_a_drafter_gives_the_tokens_of_another_family(c_kernels, models, plain, name, kind):
    target, small = models(kind)
    engine = Engine(target, DRAFTERS[name](target, small), slots=3)
    check(engine, plain(kind, "overflow"), kind, "overflow", every(("greedy", "T1_min_p"), (0, 1, 3)))
    target, small = models(kind, torch.bfloat16)
    engine = Engine(target, DRAFTERS[name](target, small), slots=3, nodes=None)
    want = plain(kind, "overflow", torch.bfloat16)
    check(engine, want, kind, "overflow", every(("greedy", "T0.7"), (0, 1, 3)))


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_drafters_on_one_tree_give_plain_decodings_tokens(models, plain, names):
    for kind, length in (("gqa", "short"), ("mha", "overflow")):
        target, small = models(kind)
        for nodes in (None, "auto"):
            engine = Engine(target, combined(names)(target, small), slots=3, nodes=nodes)
            check(engine, plain(kind, length), kind, length, every(("greedy", "T1_top_p"), (0, 1, 4)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_bf16_needs_no_margin(c_kernels, models, plain, name):
    target, small = models("gqa", torch.bfloat16)
    engine = Engine(target, DRAFTERS[name](target, small), slots=3, nodes=None)
    want = plain("gqa", "overflow", torch.bfloat16)
    check(engine, want, "gqa", "overflow", every(("greedy", "T0.7", "T1_penalty")))


RANKED = ("greedy", "T0.7", "T1_penalty")
KINDS_ON_RANKS = ("gqa", "mha", "moe", "gemma3", "gpt_oss", "qwen3_5")
ON_RANKS = [(name, KINDS_ON_RANKS[place % len(KINDS_ON_RANKS)], "fp32") for place, name in enumerate(DRAFTERS)]
ON_RANKS += [("plain", kind, "fp32") for kind in KINDS_ON_RANKS]
HALF_ON_RANKS = ("plain", "tokenswift_draft_pass", "longspec", "triforce", "medusa+token_recycling")
ON_RANKS += [(name, "gqa", "bf16") for name in HALF_ON_RANKS]
RECORDED_ON_RANKS = {  # on a pretended GPU
    "longspec": "gqa", "triforce": "qwen3_5", "tokenswift_draft_pass": "gemma3", "medusa+token_recycling": "gqa",
}  # fmt: skip
ON_RANKS += [(name, kind, "recorded") for name, kind in RECORDED_ON_RANKS.items()]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory) -> list[dict]:
    """What each of two ranks that share the targets (ranks.py) decodes, by case."""
    out = tmp_path_factory.mktemp("ranks") / "found"
    given = json.dumps({"cases": ON_RANKS, "samplings": RANKED, "out": str(out)})
    assert launch_ranks([str(Path(__file__).with_name("ranks.py")), given], ["-1", "-1"]) == 0
    return [json.loads(Path(f"{out}-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ON_RANKS, ids=" ".join)
def test_ranks_that_share_a_target_give_plain_decodings_tokens(on_two_ranks, plain, case, request):
    """Those of the whole target in fp32. In bf16 sums over the ranks are rounded, so those of the ranks themselves; and
    the ranks' drafts differ, as a GPU's may."""
    (_, kind, precision), (found, others) = case, (of[" ".join(case)] for of in on_two_ranks)
    assert found == others
    if precision == "bf16":
        request.getfixturevalue("c_kernels")
        assert found == on_two_ranks[0]["plain gqa bf16"]
    else:
        want = plain(kind, "overflow")
        assert found == [want[sampling][index] for sampling, index in every(RANKED)]


def test_what_the_first_rank_serves_and_cancels_counts(on_two_ranks, plain):
    """Also after its last arrivals."""
    served, others = (of["served"] for of in on_two_ranks)
    want = plain("gqa", "overflow")["greedy"]
    assert served == others
    assert served["0"] == want[0] and 0 < len(served["1"]) < NEW and served["1"] == want[1][: len(served["1"])]


@pytest.mark.parametrize(("name", "lag"), in_turn((1, 0)))
def test_an_engine_is_used_again(models, plain, name, lag):
    """With another batch size, other slots, longer prompts, and after a stream that nobody read to its end."""
    target, small = models("gqa")
    engine = Engine(target, DRAFTERS[name](target, small), nodes=None)
    engine.runner.lag = lag
    want = plain("gqa", "overflow")
    check(engine, want, "gqa", "overflow", [("greedy", 3)], new=5)
    check(engine, want, "gqa", "overflow", every(("T0.7",), (0, 1, 4)), new=7)
    engine.slots = 2
    params = SamplingParams(temperature=1.0, seed=9, max_new_tokens=NEW)
    pieces = engine.stream(prompts("gqa", "overflow"), params)
    assert len([next(pieces) for _ in range(7)]) == 7
    pieces.close()
    check(engine, want, "gqa", "overflow", every(("T0.7",), (1, 4, 2, 3)), new=6)


@pytest.mark.parametrize(("name", "lag"), in_turn((0, 1)))
def test_requests_that_come_while_others_run_get_plain_decodings_tokens(models, plain, name, lag):
    """A request comes every few steps, and its prompt is read in chunks with steps between. One is cancelled. Then the
    engine is idle for a while, and goes on."""
    target, small = models("gqa")
    engine = Engine(target, DRAFTERS[name](target, small), slots=3, prefill_chunk=8)
    engine.runner.lag = lag
    asked, want = prompts("gqa", "overflow"), plain("gqa", "overflow")
    cases = [("greedy", 0), ("T0.7", 3), ("T1_penalty", 4), ("greedy", 1), ("T1_min_p", 2), ("T0.7", 4), ("greedy", 3)]
    requests = []
    for index, (sampling, prompt) in enumerate(cases):
        params = replace(SAMPLINGS[sampling], seed=1500 + prompt, max_new_tokens=NEW)
        requests.append(replace(read_requests(target, [asked[prompt]], params, POSITIONS)[0], index=index))
    turn, waited = 0, []

    def arrivals(idle):
        nonlocal turn
        turn += 1
        if idle and len(requests) < len(cases):
            waited.append(len(requests))
        if len(requests) == 1 and not idle:  # the last one comes when all others are done
            return []
        if turn == 7:
            engine.cancel(2)
        if not requests:
            return None
        return [requests.pop(0)] if turn % 3 == 0 or idle else []

    done = {}
    for piece in engine.serve(arrivals):
        if piece.generation is not None:
            assert piece.index not in done
            done[piece.index] = piece.generation
    assert waited == [1] and len(done) == len(cases) and done[2].finish_reason == "cancelled"
    for index, (sampling, prompt) in enumerate(cases):
        tokens = want[sampling][prompt]
        assert done[index].tokens == (tokens[: len(done[2].tokens)] if index == 2 else tokens), index


ALIKE = [(30, 9), (30, 17), (24, 2), (30, 4), (7, 40), (30, 9)]  # tokens of one document, and of each prompt's own


@pytest.fixture
def alike(models, plain_tokens, seeded):
    """Prompts that begin with a document's tokens, their sampling, and plain decoding's tokens."""
    generator = torch.Generator().manual_seed(5)
    document = torch.randint(VOCAB, (30,), generator=generator).tolist()
    asked = [document[:count] + torch.randint(VOCAB, (own,), generator=generator).tolist() for count, own in ALIKE]
    params = seeded(SAMPLINGS["T0.7"], len(asked), NEW)
    if "alike" not in PLAIN:
        PLAIN["alike"] = plain_tokens(models("gqa")[0], asked, params)
    return list(zip(asked, params, PLAIN["alike"], strict=True))


@pytest.mark.parametrize(("name", "lag"), in_turn((0, 1)))
def test_what_prompts_take_over_of_earlier_ones_changes_no_token(models, alike, name, lag):
    """From slots at work and from idle ones, whose first rows the passes of other slots overwrite."""
    target, small = models("gqa")
    engine = Engine(target, DRAFTERS[name](target, small), slots=3, prefill_chunk=8)
    engine.runner.lag = lag
    taken = []
    for turn in ([0, 1, 2], [4], [3, 5], [5, 3]):
        asked, params, want = zip(*(alike[i] for i in turn), strict=True)
        found = engine.generate(asked, params)
        assert [one.tokens for one in found] == list(want), turn
        taken += [one.stats.cached_tokens for one in found]
    # 30 tokens of the document are three passes and more, prompt 4 has but 7 of it; at last both come again.
    assert taken == [0, 24, 24, 0, 24, 24, 32, 32]


ANYTHING = {
    **DRAFTERS,
    **{"+".join(names): combined(names) for names in PAIRS},
    "small_model_1": lambda target, small: SmallModelDrafter(target, small, gamma=1),
    "triforce_1": lambda target, small: TriForceDrafter(target, small, chain=1, budget=2, chunk=1),
    "triforce_12": lambda target, small: TriForceDrafter(target, small, gamma=5, chain=12, budget=6, chunk=2),
    "tokenswift_all": lambda target, small: TokenSwiftDrafter(
        target, heads(target), (2, 1, 1), draft_pass="always", budget=17, ngrams=3
    ),
    "longspec_2": lambda target, small: LongSpecDrafter(target, block(target, noise=2), widths=(3, 2)),
    "token_recycling_1": lambda target, small: TokenRecycling(target, nodes=1),
}


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(i, marks=NIGHTLY) for i in range(10, 40))])
def test_whatever_is_drawn_gives_plain_decodings_tokens(models, plain_tokens, exact_dtype, seed):
    """Random drafters, engines and requests: one-token prompts, prompts up to the last position, early stops."""
    draw = random.Random(seed)
    dtype = (torch.float32, exact_dtype)[seed % 2]
    target, small = models(draw.choice(list(HEADS)), dtype)
    name = draw.choice(list(ANYTHING))
    longest = draw.choice([30, 47, POSITIONS])
    options = {
        "slots": draw.choice([None, 1, 2, 4]),
        "prefill_chunk": draw.choice([1, 3, 512]),
        "nodes": draw.choice([None, None, "auto", 3]),
        "max_length": longest,
    }
    engine = Engine(target, ANYTHING[name](target, small), **options)
    engine.runner.lag = draw.randrange(2)
    for _ in range(2):
        asked, params, want = drawn_requests(draw, target, longest, plain_tokens)
        found = engine.generate(asked, params)
        for prompt, one, tokens, generation in zip(asked, params, want, found, strict=True):
            assert generation.tokens == tokens, (name, options, engine.runner.lag)
            full = len(prompt) + len(tokens) == longest and len(tokens) < NEW
            stopped = tokens[-1] in one.stop_token_ids
            assert generation.finish_reason == ("stop" if stopped else "capacity" if full else "length")


def drawn_requests(draw, target, longest, plain_tokens):
    """Prompts, parameters and plain decoding's tokens, drawn anew if a decision is close."""
    while True:
        asked, params = [], []
        for _ in range(draw.randint(1, 5)):
            count = draw.choice([1, 2, longest - 1, longest - 5, draw.randint(1, longest - 1)])
            asked.append([draw.randrange(VOCAB) for _ in range(count)])
            stops = (draw.randrange(VOCAB),) if draw.random() < 0.3 else ()
            sampling, seed = draw.choice(list(SAMPLINGS.values())), draw.randrange(2**31)
            params.append(replace(sampling, seed=seed, max_new_tokens=NEW, stop_token_ids=stops))
        # Where a prompt leaves fewer positions, plain decoding, which has no limit here, is asked for no more than
        # those.
        fitting = [
            replace(one, max_new_tokens=min(NEW, longest - len(prompt)))
            for one, prompt in zip(params, asked, strict=True)
        ]
        if target.model.lm_head.weight.dtype == torch.bfloat16:
            return asked, params, decoded(Engine(target), asked, fitting)
        try:
            return asked, params, plain_tokens(target, asked, fitting)
        except AssertionError:
            continue
