"""Combinations: the union of what the drafters propose, whose classes stay apart, and that it changes no token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.budget import Budget
from longdraft.infer.choice.slots import SlotSampling
from longdraft.infer.drafters.base import Drafter
from longdraft.infer.drafters.combine import MOST_NODES, Combined
from longdraft.infer.drafters.prompt_lookup import PromptLookup
from longdraft.infer.drafters.token_recycling import TokenRecycling
from longdraft.infer.engine import Engine
from longdraft.infer.history import History
from longdraft.infer.sampling import SamplingParams
from longdraft.infer.slot_state import SlotState
from longdraft.infer.tree import TokenTree
from longdraft.models.footprint import sizes

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)
TWO_SLOTS = st.tuples(PATHS, PATHS)


class Fixed(Drafter):
    """Proposes the same paths in every step, as far as there is room."""

    max_depth = 4

    def __init__(self, paths, classes=None, max_nodes=24):
        self.paths, self.classes, self.max_nodes = paths, classes, max_nodes

    def propose(self, state, budget):
        tree = TokenTree.from_paths(state.roots.tolist(), self.paths)
        width = min(tree.width, 1 + budget.max_nodes)
        classes = None if self.classes is None else torch.tensor(self.classes)[:, :width]
        return TokenTree(tree.tokens[:, :width], tree.parents[:, :width], classes)


def state_of(roots):
    batch = len(roots)
    sampling = SlotSampling([SamplingParams()] * batch, torch.device("cpu"))
    zeros = torch.zeros(batch, dtype=torch.int64)
    return SlotState(torch.tensor(roots), zeros, zeros == 0, History(batch, 8), sampling, [[root] for root in roots])


def as_sets(tree):
    return [{tuple(path) for path in paths} for paths in tree.paths()]


@settings(max_examples=60, deadline=None)
@given(proposals=st.lists(TWO_SLOTS, min_size=2, max_size=4), max_nodes=st.integers(0, 30))
def test_the_union_of_all_paths_as_far_as_there_is_room(proposals, max_nodes):
    drafters = [Fixed(paths) for paths in proposals]
    state, combined = state_of([8, 9]), Combined(drafters)
    whole, tree = (combined.propose(state, Budget(most)) for most in (combined.max_nodes, max_nodes))
    wanted = [
        set().union(*sets) for sets in zip(*(as_sets(d.propose(state, Budget(24))) for d in drafters), strict=True)
    ]
    assert as_sets(whole) == wanted
    assert tree.tokens[:, 0].tolist() == [8, 9]
    for found, all_paths, paths in zip(as_sets(tree), wanted, tree.paths(), strict=True):
        assert found <= all_paths and len(found) == len(paths), "siblings carry different tokens"
        assert len(found) == min(max_nodes, len(all_paths)) or max_nodes < 24, "a drafter was cut short by its own room"
        assert len(found) <= max_nodes
    assert (tree.parents < torch.arange(tree.width)).all()
    plain = TokenTree(tree.tokens, tree.parents)
    assert torch.equal(tree.ancestors, plain.ancestors)
    assert torch.equal(tree.depths, plain.depths)


def test_drafters_take_turns_and_a_node_that_is_there_costs_no_turn():
    first, second = Fixed([[[1, 2, 3]]]), Fixed([[[1], [5], [6], [7, 8]]])
    combined, state = Combined([first, second]), state_of([0])
    assert combined.propose(state, Budget(24)).paths() == [[[1], [5], [1, 2], [6], [1, 2, 3], [7], [7, 8]]]
    assert combined.propose(state, Budget(3)).paths() == [[[1], [5], [1, 2]]]
    assert Combined([second, first]).propose(state, Budget(3)).paths() == [[[1], [1, 2], [5]]]


def test_classes_tell_the_drafter_its_own_class_and_agreement():
    first, second = Fixed([[[1, 2]]]), Fixed([[[1, 3], [4]]], classes=[[0, 9, 9, 7]], max_nodes=10)
    combined = Combined([first, second])
    tree = combined.propose(state_of([0]), Budget(24))
    kinds = {tuple(path): kind for path, kind in zip(tree.paths()[0], tree.classes[0, 1:].tolist(), strict=True)}
    alone = len(first.class_stages) + len(second.class_stages)
    assert len(combined.class_stages) == 2 * alone == 2 * (25 + 11)
    # [1] is the first drafter's node 1 and the second one agrees; its own others come after the first one's 25.
    assert kinds == {(1,): alone + 1, (1, 2): 2, (1, 3): 25 + 9, (4,): 25 + 7}


def test_it_is_as_wide_and_deep_as_its_parts_and_asks_for_what_they_need(tiny_target):
    target = tiny_target(dtype=torch.bfloat16)
    lookup, recycling = PromptLookup(length=9, candidates=1), TokenRecycling(target, 20)
    combined = Combined([lookup, recycling])
    assert (combined.max_nodes, combined.max_depth) == (18 + 20, 9)
    assert Combined([PromptLookup(), TokenRecycling(target)]).max_nodes == MOST_NODES
    assert combined.needs == {"post_norm"}
    Engine(target, combined).generate([[1, 2, 3]], SamplingParams(max_new_tokens=3))
    assert combined.needs == {"logits"} and int((recycling.candidates[:, 0] >= 0).sum()) >= 3


def test_what_its_parts_allocate_adds_up():
    class Allocating(Fixed):
        def allocations(self, batch, capacity):
            return {"rows": [((batch, capacity), torch.int64)]}

    assert sizes(Combined([Allocating([]), Fixed([]), Allocating([])]).allocations(3, 10)) == {"rows": 2 * 3 * 10 * 8}


def test_combinations_that_cannot_be():
    lookup = PromptLookup()
    for drafters in ([lookup], [lookup, lookup], [lookup, "plain"]):
        with pytest.raises(ValueError, match="drafters"):
            Combined(drafters)


def test_all_let_go_of_a_cache():
    class Holding(Fixed):
        cache = "held"

        def release(self):
            self.cache = None

    drafters = [Holding([]), Holding([])]
    Combined(drafters).release()
    assert [drafter.cache for drafter in drafters] == [None, None]
