"""A reduced matrix of exactness for each implementation of attention: compiled C, PyTorch, Triton interpreted."""

from importlib import import_module

import pytest
import torch

from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels import tree_attention as attention
from longdraft.models.decoder import Decoder

NEW = 10


def use(name, monkeypatch) -> list[int]:
    """Let the runtime's attention go through this implementation; returns a list that grows with Triton's calls."""
    calls: list[int] = []
    if name != "compiled":
        monkeypatch.setattr(attention.rows, "can_attend", lambda _: False)
        monkeypatch.setattr(Decoder, "_layers_in_c", lambda self, x, context: None)  # which attends in C as well
    if name == "triton":
        kernels = import_module("longdraft.kernels.triton.tree_attention")
        original = kernels.tree_attention
        monkeypatch.setattr(kernels, "tree_attention", lambda *a: calls.append(1) or original(*a))
        monkeypatch.setattr(attention, "triton_for", lambda q: kernels)
    return calls


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0)], ids=["greedy", "T1"])
@pytest.mark.parametrize("name", ["compiled", "pytorch", "triton"])
def test_every_implementation_gives_the_same_tokens(tiny_target, plain_tokens, seeded, monkeypatch, name, sampling):
    target = tiny_target(n_layers=1, vocab_size=61)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(61, (n,), generator=generator).tolist() for n in (9, 3)]
    params = seeded(sampling, len(prompts), NEW)
    expected = plain_tokens(target, prompts, params)
    calls = use(name, monkeypatch)
    for drafter in ("plain", "token_recycling+prompt_lookup"):
        engine = Engine(target, drafter, slots=2, nodes=6)
        assert [one.tokens for one in engine.generate(prompts, params)] == expected
    assert bool(calls) == (name == "triton")
