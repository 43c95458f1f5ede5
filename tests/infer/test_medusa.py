"""Medusa's drafter: each level holds its head's top ranks on the state before the root; decoding is plain decoding."""

import pytest
import torch

from longdraft.infer.drafters.heads import HeadsDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.kernels.choice import gumbel_noise
from longdraft.models.drafts.heads import Medusa, MedusaConfig
from longdraft.models.passes import Pass

VOCAB = 61
PROMPTS = [[5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1], [3], [8, 8, 21, 0, 6]]


def heads(target, n_heads=3, std=0.3):
    config = MedusaConfig(target.model.config.hidden_size, n_heads, std)
    draft = Medusa(config, torch.Generator().manual_seed(7))
    return draft.to(target.model.lm_head.weight.dtype).requires_grad_(False)


class Watched(HeadsDrafter):
    """Compares every proposal with the heads on a fresh pass over the slot's text."""

    compared = 0

    def propose(self, state, budget):
        tree = super().propose(state, budget)
        ranks, levels = self.shape.ranks, self.shape.depth
        for slot, text in enumerate(state.committed):
            if not state.active[slot] or len(text) == 1:
                continue
            hidden = self._target.model(Pass(torch.tensor([text[:-1]]), needs={"post_norm"})).post_norm[:, -1]
            expected = []
            for head, state_1D in enumerate(self.draft.states(hidden)[:levels], start=1):
                scores, params = self._head.weight @ state_1D[0], state.sampling.params[slot]
                if params.temperature:
                    noise = gumbel_noise(torch.tensor([params.seed]), torch.tensor([[len(text) - 1 + head]]), VOCAB)
                    scores = scores / params.temperature + noise[0, 0]
                expected.append(scores.topk(ranks).indices.tolist())
            paths = [
                [expected[i][rank] for i, rank in enumerate(node)] for node in self.shape.nodes[: budget.max_nodes]
            ]
            assert tree.paths()[slot] == paths
            self.compared += 1
        return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [None, 5])
def test_levels_are_the_heads_top_ranks(target, temperature, nodes):
    """Of the state before the root, with the noise of the positions proposed; with fewer nodes, the first ones."""
    drafter = Watched(target, heads(target))
    drafter._target = target
    params = [SamplingParams(temperature=temperature, seed=seed, max_new_tokens=15) for seed in range(3)]
    Engine(target, drafter, slots=2, nodes=nodes, prefill_chunk=4).generate(PROMPTS, params)
    assert drafter.compared > 20 and drafter.max_nodes == 39 and drafter.max_depth == 3


def test_a_tree_has_no_more_ranks_than_the_vocabulary_has_tokens(tiny_target, plain_tokens, seeded):
    target, prompts = tiny_target(vocab_size=2), [[1], [0, 1, 1, 0]]
    drafter, params = HeadsDrafter(target, heads(target)), seeded(SamplingParams(temperature=0.8), 2, 15)
    found = Engine(target, drafter, nodes=None).generate(prompts, params)
    assert [one.tokens for one in found] == plain_tokens(target, prompts, params)
    assert drafter.max_nodes == 2 + 4 + 8
