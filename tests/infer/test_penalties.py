"""Penalties and bans, compared with formulas for one node in plain Python and with transformers."""

import random
from dataclasses import replace

import pytest
import torch

from longdraft.infer.choice import slots as sampling_module
from longdraft.infer.choice.penalties import Penalties
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.tree import PAD, TokenTree
from longdraft.kernels import backend

CPU = torch.device("cpu")
VOCAB = 23
MANY = [
    SamplingParams(),
    SamplingParams(contextual_penalty=1.2, contextual_window=4),
    SamplingParams(contextual_penalty=0.7, contextual_window=1000),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.4),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(banned_token_ids=(0, 7, 22)),
    SamplingParams(logit_bias={3: 2.5, 4: -1.25, 22: -100.0}),
    SamplingParams(min_new_tokens=7, stop_token_ids=(2, 5)),
    SamplingParams(
        contextual_penalty=1.1,
        contextual_window=3,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        banned_token_ids=[3],
        logit_bias={1: 0.75, 3: 9.0},
        stop_token_ids=[4],
        min_new_tokens=5,
    ),
]


def by_hand(logits, p: SamplingParams, tokens: list[int], prompt_length: int) -> torch.Tensor:
    """Penalise one row of logits; `tokens` is its node's whole history, itself included."""
    row = [torch.tensor(x, dtype=torch.float32) for x in logits.float().tolist()]

    def scaled(value, penalty):
        penalty = torch.tensor(penalty, dtype=torch.float32)
        return value / penalty if value > 0 else value * penalty

    for token in set(tokens[-p.contextual_window :]):
        row[token] = scaled(row[token], p.contextual_penalty)
    for token in set(tokens):
        row[token] = scaled(row[token], p.repetition_penalty)
    generated = tokens[prompt_length:]
    for token in set(generated):
        counted = torch.tensor(p.frequency_penalty, dtype=torch.float32) * generated.count(token)
        row[token] = row[token] - (torch.tensor(p.presence_penalty, dtype=torch.float32) + counted)
    for token, bias in p.logit_bias.items():
        row[token] = row[token] + torch.tensor(bias, dtype=torch.float32)
    for token in [*p.banned_token_ids, *(p.stop_token_ids if len(generated) < p.min_new_tokens else ())]:
        row[token] = torch.tensor(-torch.inf)
    return torch.stack(row)


def penalised(params, logits_BV, history, positions_B):
    """Penalised logits of one node a slot, at the end of the history."""
    return Penalties(params, CPU).apply(logits_BV[:, None], history, positions_B[:, None])[:, 0]


def histories(count: int, capacity: int, seed: int):
    """Random prompts with random continuations: (History, token lists, prompt lengths, positions)."""
    draw = random.Random(seed)
    history, all_tokens, prompts = History(count, capacity), [], []
    history.tokens.random_(VOCAB, generator=torch.Generator().manual_seed(seed))  # void beyond the root
    for slot in range(count):
        prompt_length = draw.randint(1, capacity // 2)
        tokens = [draw.randrange(VOCAB) for _ in range(draw.randint(prompt_length, capacity))]
        history.start(slot, tokens[:prompt_length])
        for t in range(prompt_length, len(tokens)):
            history.tokens[slot, t] = tokens[t]
        all_tokens.append(tokens)
        prompts.append(prompt_length)
    return history, all_tokens, prompts, torch.tensor([len(tokens) - 1 for tokens in all_tokens])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_penalty_equals_the_formula(seed, dtype):
    """Slots alone and together, with histories of unequal lengths, shorter and longer than the windows."""
    history, all_tokens, prompts, positions = histories(len(MANY), 30, seed)
    logits = (torch.randn(len(MANY), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
    logits[:, 5] = -torch.inf
    together = penalised(MANY, logits, history, positions)
    for b, params in enumerate(MANY):
        expected = by_hand(logits[b], params, all_tokens[b], prompts[b])
        assert torch.equal(together[b].float(), expected), params
        one = History(1, 30)
        one.tokens, one.prompt_lengths = history.tokens[b : b + 1], history.prompt_lengths[b : b + 1]
        alone = penalised([params], logits[b : b + 1], one, positions[b : b + 1])
        assert torch.equal(alone[0].float(), expected), params


def test_without_penalties_nothing_is_computed_and_beside_them_no_bit_changes():
    history, _, _, positions = histories(2, 20, 3)
    logits = torch.randn(2, VOCAB)
    logits[0, :4] = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf])
    plain = [SamplingParams(temperature=0.7, top_p=0.5), SamplingParams()]
    assert Penalties(plain, CPU).apply(logits, history, positions[:, None]) is logits
    for other in MANY[1:]:
        out = penalised([plain[0], other], logits, history, positions)
        assert torch.equal(out[0].view(torch.int32), logits[0].view(torch.int32))


@pytest.mark.parametrize("host_knows", [True, False])
def test_reading_more_of_the_history_changes_nothing(monkeypatch, host_knows):
    """On a GPU, where the host does not know lengths, the whole capacity is read, whatever stands after the root;
    elsewhere unused capacity costs nothing."""
    history, _, _, positions = histories(len(MANY), 30, 11)
    logits, wide = torch.randn(len(MANY), 3, VOCAB), History(len(MANY), 90)
    wide.tokens[:], wide.prompt_lengths = torch.randint(VOCAB, wide.tokens.shape), history.prompt_lengths
    wide.tokens[:, :30] = history.tokens
    read, counts = History.read, []
    monkeypatch.setattr(History, "read", lambda self, first, count: counts.append(count) or read(self, first, count))
    for params in (MANY, MANY[:2] * 5, [MANY[4]] * 10):
        with monkeypatch.context() as patch:
            expected = Penalties(params, CPU).apply(logits, history, positions[:, None])
            patch.setattr(backend, "is_host", lambda device: host_knows)
            assert torch.equal(Penalties(params, CPU).apply(logits, wide, positions[:, None]), expected)
    assert max(counts) == (int(positions.max()) + 1 if host_knows else 90)


@pytest.mark.parametrize("most_scores", [1 << 23, 8 * VOCAB * 4])
@pytest.mark.parametrize("seed", range(2))
def test_all_nodes_at_once_are_each_node_with_its_path_written_out(monkeypatch, seed, most_scores):
    """Penalised logits and, with every filter, choices have equal bits, for all nodes at once and a few at a time."""
    monkeypatch.setattr(sampling_module, "MOST_SCORES", most_scores)
    narrow, all_tokens, _, positions = histories(len(MANY), 24, seed)
    history = History(len(MANY), 34)
    history.tokens[:, :24], history.prompt_lengths = narrow.tokens, narrow.prompt_lengths
    draw = random.Random(seed)
    # Few tokens, so that paths and histories share some; trees of unequal width, so that there is padding.
    paths = [[[draw.randrange(5) for _ in range(draw.randint(1, 6))] for _ in range(3)] for _ in MANY]
    tree = TokenTree.from_paths([tokens[-1] for tokens in all_tokens], paths)
    filters = [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"eta_cutoff": 0.2}, {}]
    params = [replace(p, temperature=0.7 * (b % 3 > 0), seed=b, **filters[b % 5]) for b, p in enumerate(MANY)]
    sampling, logits = SlotSampling(params, CPU), torch.randn(len(MANY), tree.width, VOCAB) * 3
    places = positions[:, None] + tree.depths
    found = sampling.choose_all(logits, history, tree.tokens, places, tree.ancestors)
    of_nodes = sampling.penalties.apply(logits, history, places, tree.tokens, tree.ancestors)
    for node in range(tree.width):
        own = History(len(MANY), 34)
        own.tokens[:], own.prompt_lengths = history.tokens, history.prompt_lengths
        for slot in range(len(MANY)):
            for above in tree.ancestors[slot, node].nonzero()[:, 0].tolist():
                own.tokens[slot, places[slot, above]] = tree.tokens[slot, above]
        alone = penalised(params, logits[:, node], own, places[:, node])
        real = tree.parents[:, node] != PAD
        assert torch.equal(of_nodes[real, node], alone[real]), node
        assert torch.equal(found[real, node], sampling.choose(logits[:, node], own, places[:, node])[real]), node
    of_roots = tree.tokens[:, :1], places[:, :1]
    assert torch.equal(sampling.choose_all(logits[:, :1], history, *of_roots), found[:, :1])


def test_a_restricted_vocabulary_is_a_part_of_the_whole():
    """For logits of some ids, in any order, penalised logits are those of all at these ids, whoever is banned."""
    history, _, _, positions = histories(len(MANY), 30, 2)
    logits, ids = torch.randn(len(MANY), 4, VOCAB), torch.tensor([20, 3, 5, 0, 7, 11, 2])
    penalties, roots = Penalties(MANY, CPU), positions[:, None]
    whole = penalties.apply(logits, history, roots)
    assert torch.equal(penalties.apply(logits[..., ids], history, roots, ids_R=ids), whole[..., ids])
    assert torch.equal(penalties.apply(logits, history, roots), whole)


def test_history_writes_stay_inside():
    """A path may go past the last position; what is written there is dropped, and nothing else changes."""
    history = History(2, 5)
    history.start(0, [1, 2, 3, 4, 5])
    history.start(1, [6])
    history.write(torch.tensor([[5], [1]]), torch.tensor([[9], [7]]))
    assert history.tokens.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert history.read(torch.tensor([3, -1]), 3).tolist() == [[4, 5, 5], [6, 6, 7]]
    assert history.prompt_lengths.tolist() == [5, 1]


def test_stop_tokens_are_banned_until_enough_are_new():
    """After a prompt of 3 tokens, at each number of new ones."""
    history = History(12, 30)
    history.prompt_lengths.fill_(3)
    params = [SamplingParams(min_new_tokens=7, stop_token_ids=(2,))] * 12
    found = penalised(params, torch.zeros(12, VOCAB), history, torch.arange(12) + 2)
    assert found[:, 2].isneginf().tolist() == [new < 7 for new in range(12)]
