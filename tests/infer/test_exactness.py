"""Every drafter gives plain decoding's tokens: greedy and sampled, alone and in ragged batches with refill, with room
and with windows and budgets that overflow, on targets with as many key heads as query heads and with fewer.

fp32 on the CPU; plain decoding's decisions are shown not to be close (conftest.py).
"""

from functools import cache

import pytest
import torch

from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.medusa import MedusaDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.shape import TreeShape, likeliest_nodes
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig

VOCAB = 61
SAMPLINGS = {
    "greedy": SamplingParams(),
    "T0.7": SamplingParams(temperature=0.7),
    "T1_top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "T1_min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "T1_eta": SamplingParams(temperature=1.0, eta_cutoff=0.05),
    "greedy_penalty": SamplingParams(contextual_penalty=1.2, contextual_window=16),
    "T1_penalty": SamplingParams(temperature=1.0, contextual_penalty=1.2, contextual_window=16, min_p=0.05),
}
NEW = 18  # longer than the penalty's window
# Prompts that leave room in every window and budget below, and prompts beyond them. Five on three slots: refill.
LENGTHS = {"short": (9, 1, 5, 2, 7), "overflow": (61, 1, 33, 18, 40)}
HEADS = {"gqa": 2, "mha": 4}
# Of prompts on which no decision of plain decoding is close, under any sampling.
SEEDS = {("gqa", "short"): 12, ("gqa", "overflow"): 12, ("mha", "short"): 11, ("mha", "overflow"): 14}


def prompts(kind: str, length: str, batch: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEEDS[kind, length])
    drawn = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in LENGTHS[length]]
    return drawn[: 1 if batch == 1 else 5]


def randomised(draft, target, std=0.3):
    """Far from any identity: candidates must disagree with each other and with the target."""
    generator = torch.Generator().manual_seed(7)
    for parameter in draft.parameters():
        parameter.data.normal_(0.0, std, generator=generator)
    return draft.to(target.model.lm_head.weight.dtype).requires_grad_(False).eval()


def heads(target, kind="linear_chain"):
    config = TokenSwiftConfig(hidden_size=target.model.config.hidden_size, kind=kind, rms_norm_eps=1e-6)
    return randomised(TokenSwift(config), target)


def block(target, **options):
    config = LongSpecConfig.for_target(target.model.config, window=12, **options)
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
    "medusa": lambda target, small: MedusaDrafter(
        target, randomised(Medusa(MedusaConfig(target.model.config.hidden_size)), target)
    ),
    "longspec": lambda target, small: LongSpecDrafter(target, block(target, noise=5)),
    "longspec_chain": lambda target, small: LongSpecDrafter(target, block(target, noise=4), widths=(1, 1, 1, 1)),
    "triforce": lambda target, small: TriForceDrafter(target, small, budget=24, stride=10),
    "triforce_self": lambda target, small: TriForceDrafter(target, budget=24, stride=10),
    "triforce_streaming": lambda target, small: TriForceDrafter(target, budget=24, policy="streaming"),
    "small_model": lambda target, small: SmallModelDrafter(target, small, gamma=3, sinks=2, window=12),
    "token_recycling": lambda target, small: TokenRecycling(target),
    "token_recycling_12": lambda target, small: TokenRecycling(target, nodes=12),
    "prompt_lookup": lambda target, small: PromptLookup(),
}


def combined(names: tuple[str, ...]):
    return lambda target, small: Combined([DRAFTERS[name](target, small) for name in names])


PAIRS = [
    ("token_recycling", "prompt_lookup"),
    ("tokenswift", "prompt_lookup"),
    ("longspec", "token_recycling"),
    ("triforce", "prompt_lookup"),
    ("medusa", "token_recycling"),
    ("tokenswift_draft_pass", "longspec"),
    ("small_model", "triforce_self"),
]


@pytest.fixture
def models(tiny_target):
    """(heads) -> a target, and a smaller model of the same vocabulary that drafts for it."""
    return lambda kind: (
        tiny_target(vocab_size=VOCAB, n_kv_heads=HEADS[kind]),
        tiny_target(vocab_size=VOCAB, n_layers=1, n_kv_heads=1, seed=5),
    )


@cache
def expected(key):
    """Filled by the test that first needs it; plain decoding's tokens by case."""
    return {}


def plain(plain_tokens, seeded, target, case, sampling, asked):
    known = expected("plain")
    key = (*case, sampling, len(asked))
    if key not in known:
        known[key] = plain_tokens(target, asked, seeded(SAMPLINGS[sampling], len(asked), NEW))
    return known[key]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_gives_plain_decodings_tokens(models, plain_tokens, seeded, name, kind, length):
    target, small = models(kind)
    for batch in (1, 3):
        asked = prompts(kind, length, batch)
        # All nodes are verified greedily and under one sampling, what the engine picks under the others.
        whole = Engine(target, DRAFTERS[name](target, small), nodes=None, slots=batch)
        picked = Engine(target, DRAFTERS[name](target, small), slots=batch)
        for index, (sampling, params) in enumerate(SAMPLINGS.items()):
            result = (whole, picked)[index % 2].generate(asked, seeded(params, len(asked), NEW))
            found = [generation.tokens for generation in result]
            assert found == plain(plain_tokens, seeded, target, (kind, length), sampling, asked), (sampling, batch)


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_drafters_on_one_tree_give_plain_decodings_tokens(models, plain_tokens, seeded, names):
    for kind, length in (("gqa", "short"), ("mha", "overflow")):
        target, small = models(kind)
        engines = [Engine(target, combined(names)(target, small), slots=3, nodes=nodes) for nodes in (None, "auto")]
        for sampling in ("greedy", "T1_top_p"):
            asked = prompts(kind, length, 3)
            want = plain(plain_tokens, seeded, target, (kind, length), sampling, asked)
            for engine in engines:
                result = engine.generate(asked, seeded(SAMPLINGS[sampling], len(asked), NEW))
                assert [generation.tokens for generation in result] == want


def permuted(target, order):
    """The same network with token `order[v]` where token v was."""
    weight = target.model.embed_tokens.weight.data
    head = target.model.lm_head.weight.data
    weight[order], head[order] = weight.clone(), head.clone()
    return target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_permuting_the_vocabulary_permutes_the_output(tiny_target, monkeypatch, temperature):
    """Nothing depends on the number of a token but the noise, which is permuted alike."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    names = ("token_recycling", "prompt_lookup", "tokenswift_draft_pass", "triforce_self")
    asked = prompts("gqa", "short", 3)
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=NEW, contextual_penalty=1.1)
    straight = tiny_target(vocab_size=VOCAB)
    want = [[int(order[t]) for t in g.tokens] for g in Engine(straight).generate(asked, params)]
    turned = permuted(tiny_target(vocab_size=VOCAB), order)
    moved = [[int(order[t]) for t in prompt] for prompt in asked]
    from longdraft.kernels.gumbel import gumbel_noise

    def noise(seeds, positions, vocab):
        out = torch.empty(*positions.shape, vocab)
        out[..., order] = gumbel_noise(seeds, positions, vocab)
        return out

    monkeypatch.setattr("longdraft.infer.sampling.gumbel_noise", noise)
    for drafter in ("plain", *(DRAFTERS[name](turned, None) for name in names)):
        assert [g.tokens for g in Engine(turned, drafter, slots=3).generate(moved, params)] == want
