"""`accepted_path` of kernels/tree.py against a look-up of (parent, token) pairs, on random tries."""

import pytest
import torch

from longdraft.kernels.tree import accepted_path

VOCAB = 7


def tries(n_slots, n_nodes, seed, chain=False):
    """Tokens and parents of tries, some padded at their ends, with different siblings, and choices that often agree."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most):
        return int(torch.randint(most, (), generator=generator))

    tokens, parents, choices = [], [], []
    for slot in range(n_slots):
        real = n_nodes if slot == 0 else 1 + draw(n_nodes)
        slot_tokens, slot_parents, taken = [draw(VOCAB)], [-1], set()
        for node in range(1, real):
            parent = node - 1 if chain else draw(node)
            free = [token for token in range(VOCAB + node) if (parent, token) not in taken]
            slot_tokens.append(free[draw(min(3, len(free)))])
            slot_parents.append(parent)
            taken.add((parent, slot_tokens[-1]))
        picked = [draw(VOCAB) for _ in range(n_nodes)]
        for node in reversed(range(1, real)):  # mostly, a node's first child is chosen
            if draw(8):
                picked[slot_parents[node]] = slot_tokens[node]
        tokens.append(slot_tokens + [0] * (n_nodes - real))
        parents.append(slot_parents + [-2] * (n_nodes - real))
        choices.append(picked)
    return [torch.tensor(part) for part in (tokens, parents, choices)]


def by_lookup(tokens, parents, choices, max_depth):
    """One slot's path, by a dict."""
    children = {(p, t): n for n, (p, t) in enumerate(zip(parents, tokens, strict=True)) if p >= 0}
    path = [0]
    while len(path) <= max_depth and (child := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path


@pytest.mark.parametrize(("n_nodes", "max_depth", "chain"), [
    (1, 0, False), (1, 3, False), (2, 1, True), (5, 4, False), (5, 9, True), (63, 2, False), (64, 9, False),
    (65, 20, True), (128, 6, False),
])  # fmt: skip
def test_the_path_is_that_of_a_look_up(n_nodes, max_depth, chain):
    given = tries(3, n_nodes, seed=n_nodes + chain, chain=chain)
    active = torch.tensor([True, False, True])
    rows, chosen, counts = accepted_path(*given, active, max_depth)
    assert rows.shape == chosen.shape == (3, max_depth + 1)
    assert rows.dtype == chosen.dtype == counts.dtype == torch.int64
    for slot, lists in enumerate(zip(*(part.tolist() for part in given), strict=True)):
        path = by_lookup(*lists, max_depth)
        assert rows[slot, : len(path)].tolist() == path
        assert chosen[slot, : len(path)].tolist() == [lists[2][node] for node in path]
        assert int(counts[slot]) == (len(path) if active[slot] else 0)
        assert set(rows[slot, len(path) :].tolist()) <= {path[-1]}, "the last node repeats after the path"
        assert set(chosen[slot, len(path) :].tolist()) <= {lists[2][path[-1]]}


def test_any_strides_and_large_tokens():
    tokens, parents, choices = tries(3, 20, seed=5)
    tokens, choices = tokens + 2**40, choices + 2**40
    active = torch.tensor([True, False, False, True, True, False])[::2]
    wanted = accepted_path(tokens, parents, choices, active, 6)
    wide = torch.stack([choices, torch.full_like(choices, -1)], -1)
    found = accepted_path(tokens.T.contiguous().T, parents[:, None].expand(-1, 2, -1)[:, 1], wide[..., 0], active, 6)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    same = parents[:1].expand(3, -1), tokens[:1].expand(3, -1), choices[:1].expand(3, -1)
    rows, _, counts = accepted_path(same[1], same[0], same[2], torch.ones(3, dtype=torch.bool), 6)
    assert len(set(counts.tolist())) == 1 and (rows == rows[0]).all()
