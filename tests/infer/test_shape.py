"""Static tree shapes: the Cartesian tree and the likeliest nodes."""

from itertools import combinations

import pytest
import torch

from longdraft.infer.shape import TreeShape, likeliest_nodes, path_rate

RATES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.05], [0.3, 0.1, 0.02]]


def test_cartesian_three_by_three_has_39_nodes_below_the_root():
    shape = TreeShape.cartesian((3, 3, 3))
    assert (len(shape.nodes), shape.depth, shape.ranks) == (39, 3, 3)
    assert TreeShape.cartesian((1, 3, 3, 3)).nodes[0] == (0,) and len(TreeShape.cartesian((1, 3, 3, 3)).nodes) == 40


def test_ranked_tokens_come_to_their_nodes():
    shape = TreeShape(((0,), (2,), (0, 1), (2, 0)), first_class=7)
    ranked = torch.tensor([[[10, 11, 12], [20, 21, 22]], [[30, 31, 32], [40, 41, 42]]])
    tree = shape.fill(torch.tensor([1, 2]), ranked)
    assert tree.paths() == [[[10], [12], [10, 21], [12, 20]], [[30], [32], [30, 41], [32, 40]]]
    assert tree.tokens[:, 0].tolist() == [1, 2] and tree.classes.tolist() == [[0, 7, 8, 9, 10]] * 2
    shorter = shape.first(3)
    assert shorter is shape.first(3) and shorter.nodes == shape.nodes[:3] and shorter.first_class == 7
    assert shape.first(4) is shape.first(9) is shape


def test_a_child_without_its_parent_is_refused():
    with pytest.raises(ValueError, match=r"node \(1, 0\) must come once, and after its parent \(1,\)"):
        TreeShape(((0,), (1, 0)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_likeliest_nodes_is_the_best_tree_of_its_size(count):
    """Compared with every valid tree of that size."""
    everything = TreeShape.cartesian((3, 3, 3)).nodes

    def valid(nodes):
        return all(node[:-1] in nodes or len(node) == 1 for node in nodes)

    trees = (nodes for nodes in combinations(everything, count) if valid(set(nodes)))
    best = max(sum(path_rate(RATES, node) for node in nodes) for nodes in trees)
    assert sum(path_rate(RATES, node) for node in likeliest_nodes(RATES, count).nodes) == pytest.approx(best)


def test_likeliest_nodes_ends_with_all_of_them():
    assert set(likeliest_nodes(RATES, 99).nodes) == set(TreeShape.cartesian((3, 3, 3)).nodes)
