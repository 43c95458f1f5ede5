"""On a real model: plain decoding is transformers' greedy `generate`; trees change no token, in fp32 and in bf16."""

import argparse
from dataclasses import replace

import pytest
import torch

from longdraft.infer.drafters.tokenswift import TokenSwiftDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.measure import flips, reference_logits
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.shape import TreeShape
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.hf import load_target, load_transformers

NEW = 24
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Then it",
    (argparse.__doc__ or "")[:900],
    "def fibonacci(n):\n",
]


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2-135m", torch.float32)


@pytest.fixture(scope="module")
def prompts(smollm2):
    return [smollm2.tokenizer(text).input_ids for text in TEXTS]


def heads(target) -> TokenSwiftDrafter:
    """Untrained heads close to the target's own next-token prediction: some of their tokens are right."""
    config = target.model.config
    shape = TokenSwiftConfig(config.hidden_size, config.rms_norm_eps, out_norm_init="target", init_std=0.002)
    draft = TokenSwift(shape, torch.Generator().manual_seed(0), target.model.norm.weight)
    small = TreeShape.cartesian((2, 2, 1))
    return TokenSwiftDrafter(target, draft.to(target.model.norm.weight.dtype).requires_grad_(False), small)


@torch.no_grad()
def test_plain_decoding_is_transformers_greedy_generate(smollm2, prompts):
    model = load_transformers("smollm2-135m", torch.float32)
    ours = Engine(smollm2).generate(prompts, SamplingParams(max_new_tokens=NEW))
    for prompt, generation in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW)
        assert generation.tokens == theirs[0, len(prompt) :].tolist()


def test_trees_change_no_token_in_fp32(smollm2, prompts):
    for sampling in (SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, seed=3)):
        params = replace(sampling, max_new_tokens=NEW, ignore_eos=True)
        plain, drafted = (Engine(smollm2, d).generate(prompts, params) for d in ("plain", heads(smollm2)))
        assert [g.tokens for g in drafted] == [g.tokens for g in plain]
        assert sum(g.stats.steps for g in drafted) < sum(g.stats.steps for g in plain)


def test_trees_change_no_token_in_bf16(smollm2, prompts):
    text = prompts[1] + [int(token) for token in prompts[0]]
    start = len(text) - 30
    reference = reference_logits(smollm2, text, start)
    try:
        smollm2.model.to(torch.bfloat16)
        for sampling in (SamplingParams(), SamplingParams(temperature=1.0, top_k=50, seed=5)):
            params = replace(sampling, max_new_tokens=NEW, ignore_eos=True)
            plain, drafted = (Engine(smollm2, d).generate(prompts, params) for d in ("plain", heads(smollm2)))
            assert [g.tokens for g in drafted] == [g.tokens for g in plain]
        report = flips(smollm2, reference, text, start, 40)
        assert (report.positions, report.flips) == (30, 0)
        assert 0 < report.dtype_error < 3
    finally:
        smollm2.model.to(torch.float32)
