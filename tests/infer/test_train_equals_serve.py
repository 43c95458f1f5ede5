"""LongSpec's block computes in training what it computes in serving, with the same weights.

The drafter decodes in the engine, and the logits that it ranks by are kept: at tree level j, behind every node that it
extends. Then the same tokens lie in one packed row, as the trainer lays it: other documents before, between and behind,
a piece a path with its own noise shift, plain positions, the target's pass over the whole row, the block over all of
it or over the queries in question. At noise shift j the logits behind each node are those of level j.
fp32; the tolerance is 1e-5 of the largest logit. With any other noise shift they are far from it.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from longdraft.infer.budget import Budget
from longdraft.infer.drafters.longspec import LongSpecDrafter
from longdraft.infer.engine import Engine
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, plan_queries
from longdraft.models.passes import Pass

VOCAB, WINDOW, NEW = 61, 8, 10
LEVELS = 5
# Shorter than the window, longer than it, a root alone.
PROMPTS = [[5, 9, 2, 7, 11, 30, 2, 9, 4, 4, 1, 17, 3], [8, 8, 21, 0, 6], [3]]
TARGETS = {
    "mha": {"n_kv_heads": 4},
    "gqa": {"n_heads": 8, "n_kv_heads": 2, "head_dim": 16, "n_layers": 3},
    "sliding": {"sliding_windows": (6, None)},
}


@dataclass
class Seen:
    """A node that the drafter extended: the text up to it, its level's number, and the logits it was ranked by."""

    path: list[int]
    level: int
    logits: Tensor


class Recording(LongSpecDrafter):
    """Keeps what `SlotState.best`, the one door to the drafter's ranking, is given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen: list[Seen] = []

    def propose(self, state: SlotState, budget: Budget):
        best, given = state.best, []

        def watched(logits, offset, *others):
            given.append((offset, logits.clone()))
            return best(logits, offset, *others)

        state.best = watched
        try:
            tree = super().propose(state, budget)
        finally:
            del state.best
        for slot in state.active.nonzero()[:, 0].tolist():
            paths = [[], *tree.paths()[slot]]
            assert state.committed[slot][-1] == state.roots[slot] and tree.depths[slot].tolist() == list(
                map(len, paths)
            )
            for level, logits in given:
                nodes = [path for path in paths if len(path) == level - 1]
                assert len(nodes) == logits.shape[1]
                for path, of_node in zip(nodes, logits[slot], strict=True):
                    self.seen.append(Seen(state.committed[slot] + path, level, of_node))
        return tree


@pytest.fixture(params=TARGETS)
def target(request, tiny_target):
    return tiny_target(vocab_size=VOCAB, **TARGETS[request.param])


def drafted(target, **options) -> LongSpec:
    ids = torch.arange(0, VOCAB, 3) if "draft_vocab_size" in options else None
    draft = LongSpec(LongSpecConfig.for_target(target.model.config, window=WINDOW, **options), token_ids_E=ids)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in draft.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
    return draft


def served(target, draft: LongSpec, widths, temperature: float) -> list[Seen]:
    """All that the drafter ranked by while three prompts were decoded on two slots."""
    drafter = Recording(target, draft.requires_grad_(False), widths)
    params = [SamplingParams(temperature=temperature, seed=7 + i, max_new_tokens=NEW) for i in range(len(PROMPTS))]
    Engine(target, drafter, slots=2, prefill_chunk=4, nodes=None).generate(PROMPTS, params)
    draft.requires_grad_(True)
    return drafter.seen


def trained(target, draft: LongSpec, seen: list[Seen], shifts: list[int], whole: bool) -> list[Tensor]:
    """Logits behind the last token of each path, from one packed row in which each is a piece with its own shift.

    `whole`: the block runs for all tokens, otherwise for the last of each path alone. What follows a path in its own
    document, and the documents between, is made up.
    """
    generator = torch.Generator().manual_seed(3)

    def others(most: int) -> list[int]:
        return torch.randint(
            VOCAB, (int(torch.randint(1, most, (), generator=generator)),), generator=generator
        ).tolist()

    tokens, borders, noise, ends = others(20), [0], [3], []
    borders.append(len(tokens))
    for one, shift in zip(seen, shifts, strict=True):
        ends.append(len(tokens) + len(one.path) - 1)
        tokens += one.path + others(12)
        borders.append(len(tokens))
        noise.append(shift)
        if len(borders) % 7 == 0:
            tokens += others(30)
            borders.append(len(tokens))
            noise.append(1 + len(borders) % LEVELS)
    row = torch.tensor(tokens)
    keys, values = target.model(Pass(row[None], borders=borders, needs={"last_kv"})).last_kv
    positions = torch.cat([torch.arange(size) for size in torch.tensor(borders).diff().tolist()])
    queries = plan_queries(borders, noise, draft.config.window, None if whole else [(end, end + 1) for end in ends])
    states = draft.states(target.model.embed_tokens(row).detach(), positions, keys[0], values[0], queries)
    assert states.requires_grad  # this is the training form: no fast path of frozen layers
    head = target.model.lm_head.weight if draft.token_ids is None else target.model.lm_head.weight[draft.token_ids]
    return list((states[ends] if whole else states).detach() @ head.detach().T)


def errors(logits: list[Tensor], seen: list[Seen]) -> list[float]:
    largest = max(float(one.logits.abs().max()) for one in seen)
    return [float((ours - one.logits).abs().max()) / largest for ours, one in zip(logits, seen, strict=True)]


CASES = {
    "beam, greedy": ((2, 3, 3, 2, 2), 0.0, {}),
    "chain, sampled, restricted": ((1, 1, 1, 1, 1), 1.0, {"final_norm": True, "draft_vocab_size": 21}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_in_training_are_the_logits_in_serving(target, case):
    widths, temperature, options = CASES[case]
    draft = drafted(target, **options)
    seen = served(target, draft, widths, temperature)
    levels = [one.level for one in seen]
    assert set(levels) == set(range(1, LEVELS + 1)) and len(seen) > 100
    assert max(len(one.path) for one in seen) > WINDOW + LEVELS > min(len(one.path) for one in seen)
    for whole in (True, False):
        worst = max(errors(trained(target, draft, seen, levels, whole), seen))
        assert worst < 1e-5, worst
    # A shift that is off by one is another function, wherever the target has said anything yet.
    off = errors(trained(target, draft, seen, [level + 1 for level in levels], False), seen)
    reading = [e for e, one in zip(off, seen, strict=True) if len(one.path) > one.level]
    assert min(reading) > 1e-4 and sum(reading) / len(reading) > 0.05
