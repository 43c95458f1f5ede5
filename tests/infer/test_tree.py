"""The trie: shapes, derived masks against paths, join and padding."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.tree import PAD, ROOT, TokenTree

TOKENS = st.integers(0, 4)
PATHS = st.lists(st.lists(TOKENS, max_size=5), max_size=8)


def as_set(paths):
    return {tuple(path) for path in paths}


def prefixes(paths):
    return {tuple(path[: n + 1]) for path in paths for n in range(len(path))}


@settings(max_examples=100, deadline=None)
@given(first=PATHS, second=PATHS)
def test_from_paths_is_a_trie_of_all_prefixes(first, second):
    tree = TokenTree.from_paths([7, 8], [first, second])
    assert tree.tokens[:, 0].tolist() == [7, 8] and tree.parents[:, 0].tolist() == [ROOT, ROOT]
    for found, wanted in zip(tree.paths(), (first, second), strict=True):
        assert len(found) == len(as_set(found)), "siblings carry different tokens"
        assert as_set(found) == prefixes(wanted)
    index = torch.arange(tree.width).expand_as(tree.parents)
    assert (tree.parents < index).all()


@settings(max_examples=60, deadline=None)
@given(paths=PATHS, extra=st.integers(0, 3))
def test_ancestors_and_depths_equal_the_paths(paths, extra):
    tree = TokenTree.from_paths([0], [paths])
    tree = tree.pad_to(tree.width + extra)
    parents = tree.parents[0].tolist()
    for node, parent in enumerate(parents):
        above = {node}
        while parent >= 0:
            above.add(parent)
            parent = parents[parent]
        assert set(tree.ancestors[0, node].nonzero().flatten().tolist()) == above
        assert tree.depths[0, node] == len(above) - 1


@settings(max_examples=60, deadline=None)
@given(first=PATHS, second=PATHS)
def test_join_keeps_this_trees_nodes_first(first, second):
    one, two = TokenTree.from_paths([3], [first]), TokenTree.from_paths([3], [second])
    both = one.join(two)
    assert as_set(both.paths()[0]) == prefixes(first) | prefixes(second)
    assert both.paths()[0][: one.width - 1] == one.paths()[0]


def test_chain_of_forty_reaches_the_root():
    tree = TokenTree.from_chain(torch.tensor([1]), torch.arange(40)[None])
    assert tree.depths[0].tolist() == list(range(41))
    assert torch.equal(tree.ancestors[0], torch.ones(41, 41).tril().bool())


def test_chain_ends_at_a_negative_token():
    tree = TokenTree.from_chain(torch.tensor([1, 2]), torch.tensor([[5, -1, 6], [7, 8, 9]]))
    assert tree.parents.tolist() == [[ROOT, 0, PAD, PAD], [ROOT, 0, 1, 2]]
    assert tree.paths() == [[[5]], [[7], [7, 8], [7, 8, 9]]]


def test_with_tokens_shares_the_shape():
    tree = TokenTree.from_paths([0], [[[1, 2], [3]]])
    mask = tree.ancestors
    assert tree.with_tokens(tree.tokens + 1).ancestors is mask
