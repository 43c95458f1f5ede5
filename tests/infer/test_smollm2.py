"""On a real model no drafter changes a token."""

import argparse
import inspect
from dataclasses import replace

import pytest
import torch

from longdraft.infer.drafters.combine import Combined
from longdraft.infer.drafters.heads import HeadsDrafter
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.small_model import SmallModelDrafter
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.drafters.triforce import TriForceDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import TreeShape
from longdraft.models.drafts.heads import Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.hf import build_decoder, load_target

PLAIN: list[list[int]] = []


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2-135m", torch.float32)


@pytest.fixture(scope="module")
def lower(smollm2):
    """Its first layers, on which drafters are as much at home, and a pass takes a sixth."""
    return first_layers(smollm2, 4)


def heads(target) -> TokenSwift:
    """Untrained heads close to the target's own next-token prediction: some of their tokens are right."""
    config = target.model.config
    shape = TokenSwiftConfig(config.hidden_size, config.rms_norm_eps, out_norm_init="target", init_std=0.002)
    draft = TokenSwift(shape, torch.Generator().manual_seed(0), target.model.norm.weight)
    return draft.to(target.model.norm.weight.dtype).requires_grad_(False)


def block(target) -> LongSpec:
    """LongSpec's block with the target's own first and last layers for weights."""
    config = LongSpecConfig.for_target(target.model.config, final_norm=True, warm_start=True, window=64)
    draft = LongSpec(config, torch.Generator().manual_seed(0), target.model)
    return draft.to(target.model.norm.weight.dtype).requires_grad_(False).eval()


def first_layers(target, count: int):
    """A smaller model of the same vocabulary: the target's first layers."""
    config = replace(target.model.config, n_layers=count)
    model = build_decoder(config, target.model.norm.weight.dtype, "cpu")
    model.load_state_dict(target.model.state_dict(), strict=False)
    model.tie()
    return replace(target, model=model)


DRAFTERS = {
    "tokenswift": lambda t: TokenSwiftDrafter(t, heads(t), TreeShape.cartesian((2, 2, 1)), draft_pass="never"),
    "tokenswift_draft_pass": lambda t: TokenSwiftDrafter(
        t, heads(t), TreeShape.cartesian((2, 1)), draft_pass="always", budget=64
    ),
    "medusa": lambda t: HeadsDrafter(
        t, Medusa(MedusaConfig(t.model.config.hidden_size)).to(t.model.norm.weight.dtype).requires_grad_(False)
    ),
    "longspec": lambda t: LongSpecDrafter(t, block(t), widths=(3, 4, 4)),
    "triforce": lambda t: TriForceDrafter(t, first_layers(t, 2), budget=64),
    "small_model": lambda t: SmallModelDrafter(t, first_layers(t, 2), gamma=3),
    "token_recycling": lambda t: TokenRecycling(t, nodes=20),
    "prompt_lookup": lambda t: PromptLookup(),
    "both": lambda t: Combined([TokenRecycling(t, nodes=12), PromptLookup()]),
}


@pytest.fixture(scope="module")
def text(smollm2):
    """180 tokens of real text, after which 20 more are decoded."""
    return smollm2.tokenizer(inspect.getsource(argparse.Action)).input_ids[:180]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_exact_on_200_tokens_of_real_text(lower, text, name, plain_tokens):
    """Greedy and sampled, side by side; plain decoding's decisions are shown once not to be close."""
    params = [
        SamplingParams(contextual_penalty=1.1, contextual_window=32, max_new_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.8, min_p=0.1, seed=2, max_new_tokens=20, ignore_eos=True),
    ]
    if not PLAIN:
        PLAIN.extend(plain_tokens(lower, [text, text], params))
    drafted = Engine(lower, DRAFTERS[name](lower), nodes=24).generate([text, text], params)
    assert [generation.tokens for generation in drafted] == PLAIN
