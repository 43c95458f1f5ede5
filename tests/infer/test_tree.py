"""TokenTree and Trie: shapes, masks compared with paths, taking and padding nodes. TreeShape: static trees."""

from itertools import combinations
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.infer.tree import PAD, ROOT, TokenTree, TreeShape, Trie, likeliest_nodes

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


def test_chain_ends_at_a_negative_token():
    tree = TokenTree.from_chain(torch.tensor([1, 2]), torch.tensor([[5, -1, 6], [7, 8, 9]]))
    assert tree.parents.tolist() == [[ROOT, 0, PAD, PAD], [ROOT, 0, 1, 2]]
    assert tree.paths() == [[[5]], [[7], [7, 8], [7, 8, 9]]]


@st.composite
def forests(draw):
    """Paths of trees of three sequences, of unequal sizes."""
    return draw(st.lists(PATHS, min_size=3, max_size=3))


@settings(max_examples=60, deadline=None)
@given(forest=forests(), data=st.data())
def test_take_keeps_the_trie_of_the_nodes_taken(forest, data):
    """In any order with parents before children, paths, classes, masks and depths follow their nodes."""
    tree = TokenTree.from_paths([1, 2, 3], forest)
    tree = tree.pad_to(tree.width + 1)
    tree = TokenTree(tree.tokens, tree.parents, torch.randint(9, tree.tokens.shape))
    if data.draw(st.booleans()):
        _ = tree.ancestors, tree.depths
    width = data.draw(st.integers(1, tree.width))
    orders = []
    for parents in tree.parents.tolist():
        order, open_nodes = [0], [n for n in range(1, tree.width) if parents[n] == 0]
        while open_nodes and len(order) < width:
            node = open_nodes.pop(data.draw(st.integers(0, len(open_nodes) - 1)))
            order.append(node)
            open_nodes += [n for n in range(1, tree.width) if parents[n] == node]
        padding = [n for n in range(1, tree.width) if parents[n] == PAD]
        orders.append((order + padding)[:width])
    width = min(map(len, orders))
    orders = [order[:width] for order in orders]
    taken = tree.take(torch.tensor(orders))
    paths = [dict(zip(real_nodes(tree, b), tree.paths()[b], strict=True)) for b in range(3)]
    for b, order in enumerate(orders):
        assert taken.paths()[b] == [paths[b][n] for n in order[1:] if n in paths[b]]
    assert torch.equal(taken.classes, tree.classes.gather(1, torch.tensor(orders)))
    plain = TokenTree(taken.tokens, taken.parents)
    assert torch.equal(taken.ancestors, plain.ancestors) and torch.equal(taken.depths, plain.depths)
    assert torch.equal(TokenTree(tree.tokens, tree.parents).take(torch.tensor(orders)).classes, torch.tensor(orders))


def real_nodes(tree, slot):
    return [n for n in range(1, tree.width) if tree.parents[slot, n] != PAD]


@settings(max_examples=60, deadline=None)
@given(forest=forests(), extra=st.integers(0, 3))
def test_a_trie_made_on_the_host_is_the_tree_of_its_paths(forest, extra):
    """Nodes, masks and depths are equal, for slots of unequal sizes."""
    tries = [Trie(root) for root in (1, 2, 3)]
    for trie, paths in zip(tries, forest, strict=True):
        for path in paths:
            node = 0
            for token in path:
                child = trie.child(node, token)
                node = trie.add(node, token, kind=10 * node + token) if child is None else child
        assert sum(trie.degree(node) for node in range(len(trie))) == len(trie) - 1
    tree, plain = TokenTree.from_tries(tries), TokenTree.from_paths([1, 2, 3], forest)
    assert torch.equal(tree.tokens, plain.tokens) and torch.equal(tree.parents, plain.parents)
    assert torch.equal(tree.ancestors, plain.ancestors) and torch.equal(tree.depths, plain.depths)
    there = tree.parents >= 0
    assert torch.equal(tree.classes[there], (10 * tree.parents + tree.tokens)[there])
    wider = tree.pad_to(tree.width + extra)
    assert wider.paths() == plain.paths() and torch.equal(wider.classes[:, : tree.width], tree.classes)


@settings(max_examples=40, deadline=None)
@given(forest=forests())
def test_a_node_sees_its_own_prefix_and_nothing_else(forest):
    """The nodes that a node sees spell its path."""
    tree = TokenTree.from_paths([1, 2, 3], forest)
    for b in range(3):
        for node, path in zip(real_nodes(tree, b), tree.paths()[b], strict=True):
            seen = tree.ancestors[b, node].nonzero().flatten()
            assert tree.tokens[b, seen].tolist() == [b + 1, *path]
            assert tree.depths[b, node] == len(path)
        for node in set(range(1, tree.width)) - set(real_nodes(tree, b)):
            assert tree.ancestors[b, node].nonzero().flatten().tolist() == [node]


RATES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.05], [0.3, 0.1, 0.02]]


def test_ranked_tokens_come_to_their_nodes():
    shape = TreeShape(((0,), (2,), (0, 1), (2, 0)))
    ranked = torch.tensor([[[10, 11, 12], [20, 21, 22]], [[30, 31, 32], [40, 41, 42]]])
    tree = shape.fill(torch.tensor([1, 2]), ranked)
    assert tree.paths() == [[[10], [12], [10, 21], [12, 20]], [[30], [32], [30, 41], [32, 40]]]
    assert tree.tokens[:, 0].tolist() == [1, 2] and tree.classes is None
    shorter = shape.first(3)
    assert shorter is shape.first(3) and shorter.nodes == shape.nodes[:3]
    assert shape.first(4) is shape.first(9) is shape


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_likeliest_nodes_is_the_best_tree_of_its_size(count):
    """Compared with every valid tree of that size."""
    everything = TreeShape.cartesian((3, 3, 3)).nodes

    def valid(nodes):
        return all(node[:-1] in nodes or len(node) == 1 for node in nodes)

    trees = (nodes for nodes in combinations(everything, count) if valid(set(nodes)))

    def expected(nodes):
        return sum(prod(RATES[level][rank] for level, rank in enumerate(node)) for node in nodes)

    best = max(map(expected, trees))
    assert expected(likeliest_nodes(RATES, count).nodes) == pytest.approx(best)
