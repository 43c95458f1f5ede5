"""kernels/tree.py: the accepted path against a look-up of (parent, token) pairs, on random tries; every way of keeping
rows against moves from a copy, on caches that hold NaN after the pass."""

import pytest
import torch

from longdraft.kernels.tree import accepted_path, keep_rows, keep_rows_reference

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


def test_a_path_of_any_strides_and_large_tokens():
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


LAYERS, PASS = 3, 9  # rows of the pass
# lengths, rows (-7 and 10**12 are beyond the counts, where any number may be), counts
CASES = {
    "one row": ([4], [[0]], [1]),
    "one row from elsewhere": ([0], [[5, -7]], [1]),
    "nothing": ([3, 0], [[-7, -7], [10**12, 2]], [0, 0]),
    "in place": ([3, 0], [[0, 1, 2], [0, 1, -7]], [3, 2]),
    "each into the one before": ([0, 2, 6], [[1, 2, 3, 4, 5, 6, 7, 8]] * 3, [8, 5, 1]),
    "ragged": ([7, 0, 1, 3], [[0, 2, 3, 8], [0, -7, 10**12, 0], [-7, 4, 4, 4], [0, 1, 4, 5]], [4, 1, 0, 4]),
    "all": ([2], [[0, 1, 2, 3, 4, 5, 6, 7, 8]], [9]),
}


@pytest.fixture(params=["for any device", "on the host"])
def implementation(request):
    return keep_rows_reference if request.param == "for any device" else keep_rows


def made(lengths, n_kv, width, dtype=torch.float32):
    """Keys and values of different strides, random up to the pass's end and NaN after it."""
    generator = torch.Generator().manual_seed(1)
    shape = LAYERS, len(lengths), max(lengths) + PASS + 2, n_kv, width
    keys = torch.randn(shape[2], shape[1], shape[0], n_kv, width, generator=generator).permute(2, 1, 0, 3, 4).to(dtype)
    values = torch.randn(*shape[:4], width + 3, generator=generator).to(dtype)[..., 1:-2]
    for slot, length in enumerate(lengths):
        keys[:, slot, length + PASS :] = values[:, slot, length + PASS :] = float("nan")
    return keys, values


def moved(cache, lengths, rows, counts):
    """The expected cache: sources are read from a copy, so the order of moves cannot matter."""
    after = cache.clone()
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for place, row in enumerate(rows[slot][:count]):
            after[:, slot, length + place] = cache[:, slot, length + row]
    return after


@pytest.mark.parametrize("name", CASES)
def test_rows_move_in_place_and_all_else_stays(implementation, name):
    lengths, rows, counts = CASES[name]
    caches = made(lengths, 3, 5)
    wanted = [moved(cache, lengths, rows, counts) for cache in caches]
    given = torch.tensor(lengths), torch.tensor(rows), torch.tensor(counts)
    implementation(*caches, *given)
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
    assert given[0].tolist() == lengths, "lengths are the caller's"


def test_strided_rows_and_no_rows_at_all(implementation):
    lengths, rows, counts = CASES["ragged"]
    caches = made(lengths, 2, 16)
    wanted = [moved(cache, lengths, rows, counts) for cache in caches]
    across = torch.tensor(rows).T.contiguous().T
    twice = torch.tensor(lengths).repeat_interleave(2)[::2], across, torch.tensor(counts).repeat_interleave(3)[::3]
    implementation(*caches, *twice)
    keep_rows(*caches, twice[0], across[:, :0], torch.zeros_like(twice[2]))
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
