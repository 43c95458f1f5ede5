"""Exactness for the runtime's tests: plain decoding's tokens, with proof that none of its decisions was close.

fp32 on the CPU. Passes of different widths differ in rounding, so a comparison of tokens also asserts that every
decision of plain decoding had a margin of more than ten times that difference: a failure is then a bug, not luck.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from longdraft.infer.choice.grammar import masked
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.combine import Combined
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import TokenTree
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.passes import Pass
from longdraft.models.target import Target


class Proposer(Drafter):
    """A drafter made of a function (request, tokens so far, max_nodes) -> candidate paths."""

    def __init__(self, paths, max_nodes=12, max_depth=4):
        self.paths, self.max_nodes, self.max_depth, self.requests = paths, max_nodes, max_depth, {}

    def on_start(self, slot, request, cache):
        self.requests[slot] = request

    def on_prefill(self, slot, prompt, start, end, output):
        assert output.last_kv is not None

    def propose(self, state, budget):
        roots = state.roots.tolist()
        paths = [
            self.paths(self.requests[slot], tokens, budget.max_nodes) if active else []
            for slot, (tokens, active) in enumerate(zip(state.committed, state.active.tolist(), strict=True))
        ]
        return TokenTree.from_paths(roots, paths)

    def on_step(self, state, tree, accepted, output):
        assert output.logits is None  # it did not request them


class Margins(SlotSampling):
    """Records how close each decision was, in logits: the gap to the second choice and to every filter's border."""

    smallest = float("inf")

    def choose(self, logits_BV, history, positions_B, allowed_BW=None):
        if allowed_BW is not None:
            logits_BV = masked(logits_BV, allowed_BW)
        best = self.scores(logits_BV, history, positions_B).float().topk(2).values
        gaps = [(best[:, 0] - best[:, 1]) * self.divisors[:, 0]]
        penalised_BV = self.penalties.apply(logits_BV[:, None], history, positions_B[:, None])[:, 0]
        for params, row in zip(self.params, penalised_BV, strict=True):
            gaps += [self.border(params, row)] if params.temperature else []
        Margins.smallest = min(Margins.smallest, *(float(gap.min()) for gap in gaps))
        return super().choose(logits_BV, history, positions_B)

    @staticmethod
    def border(params, logits):
        """The smallest change of a logit that moves a token over a filter's border."""
        gap, ordered = torch.tensor(torch.inf), logits.float().sort(descending=True).values
        ordered = ordered[ordered > -torch.inf]
        scaled = ordered / params.temperature
        if params.top_k and params.top_k < len(ordered):
            gap = torch.minimum(gap, ordered[params.top_k - 1] - ordered[params.top_k])
        if params.top_p < 1:
            mass = scaled.softmax(0).cumsum(0)
            # If logits rise by e inside and fall by e outside, the mass m inside grows by 2 m (1 - m) e / T.
            slope = 2 * params.top_p * (1 - params.top_p) / params.temperature
            gap = torch.minimum(gap, (mass[:-1] - params.top_p).abs().min() / slope)
        if params.min_p:
            away = scaled - scaled[0] - torch.tensor(params.min_p).log()
            least = params.min_tokens_to_keep
            by_rank = ordered[least - 1] - ordered[least] if least < len(ordered) else torch.tensor(torch.inf)
            gap = torch.minimum(gap, by_rank if (away >= 0).sum() < least else away.abs().min())
        if params.eta_cutoff:
            log_probs = scaled.log_softmax(0)
            entropy = -(log_probs.exp() * log_probs).sum()
            cutoff = torch.tensor(params.eta_cutoff)
            border = cutoff.log().minimum(cutoff.sqrt().log() - entropy)
            gap = torch.minimum(gap, (log_probs - border).abs().min())
        return gap


def width_difference(target, prompt: Sequence[int]) -> float:
    """The largest difference of any logit between one-row passes and one pass of all rows."""
    tokens = torch.tensor([prompt])
    model = target.model
    whole, single = model.new_cache(1, len(prompt) + 1), model.new_cache(1, len(prompt) + 1)
    together = model(Pass(tokens, cache=whole)).logits
    rows = []
    for i in range(tokens.shape[1]):
        rows.append(model(Pass(tokens[:, i : i + 1], cache=single)).logits)
        single.commit(None, torch.tensor([1]))
    return float((together - torch.cat(rows, 1)).abs().max())


@pytest.fixture(scope="session")
def made(shared) -> Callable[..., tuple]:
    """(name, put, others) -> a target, and the drafter of this name from test_exactness.py or from what `others`
    returns for that module; several as a+b. `put` is applied to each network, e.g. to move it to a device.
    """
    exactness, make_target = shared("infer/test_exactness.py"), shared("tiny_target.py").make_tiny_target
    randomised = exactness.randomised

    def make(name, put=lambda network: network, others=lambda exactness: {}):
        exactness.randomised = lambda draft, target, **options: put(randomised(draft, target, **options))
        target = make_target(vocab_size=61, n_kv_heads=2, max_positions=90)
        small = make_target(vocab_size=61, n_layers=1, n_kv_heads=1, seed=5, max_positions=90)
        for network in (target.model, small.model):
            put(network)
        makers = exactness.DRAFTERS | others(exactness)
        drafters = [makers[one](target, small) for one in name.split("+") if one != "plain"]
        return target, Combined(drafters) if len(drafters) > 1 else [*drafters, name][0]

    return make


@pytest.fixture
def proposer() -> type[Proposer]:
    """A drafter made of a function; see `Proposer`."""
    return Proposer


@pytest.fixture
def seeded() -> Callable[..., list[SamplingParams]]:
    """(sampling, number of prompts, new tokens) -> one SamplingParams per prompt, with seeds 1500, 1501, ..."""
    return lambda sampling, count, new: [replace(sampling, seed=1500 + i, max_new_tokens=new) for i in range(count)]


@pytest.fixture
def plain_tokens(monkeypatch) -> Callable[..., list[list[int]]]:
    """(target, prompts, params) -> plain decoding's tokens, after asserting that no decision was close."""

    def decode(target, prompts, params):
        Margins.smallest = float("inf")
        with monkeypatch.context() as patch:
            patch.setattr("longdraft.infer.slot_pool.SlotSampling", Margins)
            result = Engine(target).generate(prompts, params)
        difference = width_difference(target, max(prompts, key=len)[-512:])  # a pass per row is slow
        assert Margins.smallest > 10 * difference, (Margins.smallest, difference)
        return [generation.tokens for generation in result]

    return decode


@pytest.fixture
def memoryless(tiny_target) -> tuple[Target, LongSpec]:
    """A target whose next token depends only on the last one, and a LongSpec block that computes the same."""
    target = tiny_target(vocab_size=61, std=0.5)
    block = LongSpec(LongSpecConfig.for_target(target.model.config, window=8, final_norm=True)).requires_grad_(False)
    for name, parameter in [*target.model.named_parameters(), *block.named_parameters()]:
        if any(part in name for part in ("o_proj", "down", "self_o", "cross_o")):
            parameter.data.zero_()
    block.final_norm.weight.data.copy_(target.model.norm.weight)
    return target, block


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=61)


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """(lengths) -> prompts of these lengths, in tokens of that target."""

    def drawn(*lengths):
        generator = torch.Generator().manual_seed(11)
        return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]

    return drawn
