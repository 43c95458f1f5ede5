"""triton/tree_attention.py against the reference on hostile shapes, in Triton's interpreter or on a GPU."""

import pytest
import torch

from longdraft.kernels.tree import MOST_ROWS, PassPlan, attended_rows, pack_tree
from longdraft.kernels.tree_attention import cross_attention_reference as cross_reference
from longdraft.kernels.tree_attention import tree_attention_reference as reference
from longdraft.kernels.triton import tuning
from longdraft.kernels.triton.tree_attention import cross_attention, tree_attention
from longdraft.kernels.triton.tuning import Choice, blocks, choose_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = [Choice(128, 128, 3, 8), Choice(256, 64, 4, 8), Choice(128, 64, 3, 8, ahead=1)]
# Only half precision has large blocks, and a GPU's compiler takes three times as long for them in fp32.
DTYPE, ALLOWED = (torch.float16, 4e-3) if DEVICE == "cuda" else (torch.float32, 2e-6)


@pytest.fixture(autouse=True)
def large_blocks(request, monkeypatch):
    """Makes the interpreter, whose time depends on the number of blocks, use half precision's blocks for fp32."""
    if DEVICE == "cpu" and "small_blocks" not in request.fixturenames:
        monkeypatch.setattr(tuning, "blocks", lambda rows, width, _, memory: blocks(rows, width, 2, memory))


@pytest.fixture
def small_blocks():
    """Makes the test use the blocks of fp32."""


def run(q, keys, values, lengths, masks, window=None, n_splits=None, choice=None):
    """(Output, log-sum-exp) of the kernel on its device, from and to tensors on the CPU."""
    tensors = [x.to(DEVICE) for x in (q, keys, values, lengths)]
    plan = PassPlan(tensors[-1], q.shape[1], None if masks is None else masks.to(DEVICE))
    out, lse = tree_attention(*tensors, plan.bits_BT2, plan.depth_BT, window, n_splits, choice)
    return out.cpu(), lse.cpu()


def expected_lse(q, keys, lengths, masks, window):
    """Natural log-sum-exp of every row's open scores, [B, T, H], computed in fp64."""
    n_rows, groups = q.shape[1], q.shape[2] // keys.shape[2]
    n_keys = int(lengths.max()) + n_rows
    opened = attended_rows(lengths, n_rows, n_keys, masks, window)
    k = keys[:, :n_keys].double().nan_to_num(0.0).repeat_interleave(groups, 2)
    scores = torch.einsum("bthd,bshd->bths", q.double(), k) * q.shape[-1] ** -0.5
    return scores.masked_fill(~opened[:, :, None], float("-inf")).logsumexp(-1).float()


def drawn(trees, lengths, n_rows, n_heads, n_kv, width, is_tree, spare=0):
    """Queries, a poisoned cache of `spare` more rows than are needed, lengths and masks."""
    keys, values = trees.poisoned(lengths, n_rows, max(lengths) + n_rows + spare, n_kv, width)
    masks = torch.stack([trees.random_tree(n_rows, seed) for seed in range(len(lengths))]) if is_tree else None
    return trees.draw(len(lengths), n_rows, n_heads, width, seed=7), keys, values, torch.tensor(lengths), masks


def check(q, keys, values, lengths_B, masks, window, *options, allowed=2e-6, padding=False):
    """Holds outputs and log-sum-exps against the reference. Padding has no place in a history, so its output under a
    window is undefined, but finite."""
    wanted = reference(q.float(), keys, values, lengths_B, masks, window)[0]
    lse = expected_lse(q, keys, lengths_B, masks, window)
    out, found = run(q, keys, values, lengths_B, masks, window, *options)
    read = torch.ones_like(wanted[:, :, 0, 0], dtype=torch.bool)
    if masks is not None and window is not None and not padding:
        read &= masks.any(-1)
    assert out.isfinite().all() and (out - wanted)[read].abs().max() < allowed
    torch.testing.assert_close(found[read], lse[read], rtol=0, atol=allowed)


CASES = [
    # heads, key heads, width, lengths, rows
    (4, 4, 16, [0], 1),
    (4, 4, 16, [63], 13),
    (6, 2, 64, [0, 90], 9),
    (8, 1, 32, [200, 3], 5),
    (2, 1, 80, [65], 3),  # a width that is not a power of two
    (2, 1, 128, [40], 70),  # more rows than one word of bits
    (2, 2, 256, [17], 2),
]


# Of the second case all combinations of tree and window, of any other one two with both values of each.
COMBINED = [
    (case, tree, window)
    for i, case in enumerate(CASES)
    for tree in (False, True)
    for window in (None, 9)
    if i == 1 or (tree == (window is None)) == i % 2
]


@pytest.mark.parametrize(("case", "tree", "window"), COMBINED, ids=str)
def test_against_the_reference(trees, case, tree, window):
    n_heads, n_kv, width, lengths, n_rows = case
    check(*drawn(trees, lengths, n_rows, n_heads, n_kv, width, tree, spare=5), window, 3, padding=True)


def at_borders(block: int) -> list[int]:
    """Numbers of committed rows around whole blocks of keys, and 0."""
    return [0, block - 1, block, block + 1, 12 * block - 1, 12 * block + 1]


@pytest.mark.parametrize(("tree", "window", "n_splits"), [
    (False, None, 1), (False, 160, 3), (True, None, 3), (True, 160, 1),
])  # fmt: skip
def test_lengths_at_the_borders_of_blocks(trees, small_blocks, tree, window, n_splits):
    """A window of 160 leaves whole blocks between the keys that only some rows read and the pass's own rows."""
    n_rows, width = 7, 32
    lengths = at_borders(blocks(2 * n_rows, width, 4, 99 * 1024)[1])
    check(*drawn(trees, lengths, n_rows, 2, 1, width, tree), window, n_splits)


@pytest.mark.parametrize("n_rows", [1, 16, 65, 128])
def test_passes_of_all_widths(trees, merged, n_rows):
    """Trees, whose ancestors are two words, and chains under a window."""
    for is_tree, window in ((True, None), (False, 200)):
        check(*drawn(trees, [29, 260], n_rows, 1, 1, 16, is_tree), window, 1)


@pytest.mark.parametrize("choice", [None, *LARGE], ids=str)
def test_a_row_does_not_depend_on_the_depth_of_those_beside_it(trees, merged, choice):
    """Bit for bit: the order in which a row reads its keys depends on shapes and lengths alone."""
    n_rows, length = 20, torch.tensor([600])
    keys, values = trees.poisoned([600], n_rows, 620, 1, 16)
    q, chain = trees.draw(1, n_rows, 8, 16, seed=7), torch.ones(n_rows, n_rows, dtype=torch.bool).tril()[None]
    flat = torch.eye(n_rows, dtype=torch.bool)[None]
    for window in (None, 400):
        deep, shallow = (run(q, keys, values, length, mask, window, 1, choice) for mask in (chain, flat))
        assert all(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(deep, shallow, strict=True))


def test_blocks_fit_the_fast_memory():
    """With 227 KiB and with 99 KiB per program blocks are the same; with less they are smaller."""
    for width in (16, 64, 80, 128, 256, 512):
        for itemsize in (2, 4):
            for rows in (1, 16, 17, 1024):
                found = [blocks(rows, width, itemsize, kib * 1024) for kib in (227, 99, 64)]
                assert all(block_m >= 16 and 16 <= block_n <= 64 for block_m, block_n in found)
                held = [(block_m + 4 * block_n) * width * itemsize for block_m, block_n in found]
                assert held[2] <= 64 * 1024 or found[2] == (16, 16)
                assert found[0] == found[1] or width == 512
    assert blocks(256, 128, 2, 99 * 1024) == (128, 64) and blocks(256, 128, 2, 64 * 1024) == (128, 32)


# Length, whether it is a tree, window and runs. A third of all combinations: any two values meet.
PASSES = [(401, True, None, 4), (401, False, 270, 1), (512, True, 270, 1), (384, False, None, 1), (3, True, None, 2)]
OF_LARGE = [
    (choice, n_rows, *PASSES[k])
    for i, choice in enumerate(LARGE)
    for j, n_rows in enumerate((1, 16, 64, 128))
    for k in range(len(PASSES))
    if (i + j + k) % 3 == 0
]


@pytest.mark.parametrize(("choice", "n_rows", "length", "is_tree", "window", "n_splits"), OF_LARGE, ids=str)
def test_large_blocks(trees, merged, choice, n_rows, length, is_tree, window, n_splits):
    """Several blocks of 128 keys and a part of one, also under a window that leaves whole blocks between the keys that
    only some rows read and the pass's own rows; runs of which some are empty; a cache that is shorter than a block."""
    n_heads = 4 if n_rows < 64 else 2  # up to 256 queries of a key head
    *tensors, lengths_B, masks = drawn(trees, [length], n_rows, n_heads, 1, 16, is_tree)
    masks = masks | torch.eye(n_rows, dtype=torch.bool) if is_tree else None
    check(*(x.to(DTYPE) for x in tensors), lengths_B, masks, window, n_splits, choice, allowed=ALLOWED)


# Triton's interpreter cannot multiply bf16; tests/gpu tests it on a GPU.
@pytest.mark.parametrize("length", [63, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16])
def test_error_in_low_precision_is_that_of_plain_arithmetic(trees, plain, dtype, length):
    """At most twice the error of plain.py's attention in the same precision, both against fp32."""
    keys, values = trees.poisoned([length], 9, length + 9, 2, 64)
    q, mask, lengths = trees.draw(1, 9, 6, 64, seed=3), trees.random_tree(9, 1)[None], torch.tensor([length])
    mask[:, -1, -1] = True
    exact = reference(q, keys, values, lengths, mask)[0]
    low = [x.to(dtype) for x in (q, keys, values)]
    full = torch.cat((torch.ones(1, 9, length, dtype=torch.bool), mask), 2)
    allowed = 2 * (plain.attention(*low, full).float() - exact).abs().max()
    for n_splits in (1, 4):
        assert (run(*low, lengths, mask, None, n_splits)[0].float() - exact).abs().max() <= allowed


def test_bits_are_the_mask(trees):
    for n_rows in (1, 63, 64, 65, MOST_ROWS):
        mask = torch.stack([trees.random_tree(n_rows, seed) for seed in range(3)])
        bits, depth = pack_tree(mask), PassPlan(torch.zeros(3), n_rows, mask).depth_BT
        places = torch.arange(n_rows)
        assert torch.equal((bits[:, :, places // 64] >> (places % 64) & 1).bool(), mask)
        assert torch.equal(depth, (mask.sum(-1) - 1).clamp(min=0).int())
    with pytest.raises(AssertionError, match="a tree of 129 rows has more than the 128 that fit"):
        pack_tree(torch.ones(1, 129, 129, dtype=torch.bool))


def test_runs_follow_the_shapes_alone():
    assert choose_splits(1000, 1 << 17, 132, 64) == 1  # enough programs without splits
    assert choose_splits(8, 1 << 17, 132, 64) == 64
    assert choose_splits(8, 100, 132, 64) == 1  # too few keys to share
    assert all(choose_splits(8, 1 << n, 132, 64) <= choose_splits(8, 1 << n + 1, 132, 64) for n in range(6, 17))


def test_runs_of_a_measured_choice_fill_the_processors_as_often_as_it_says():
    """8 or 17 or 34 programs for each of 16 key heads and blocks of queries on 132 processors, as far as there are four
    blocks of keys for a run."""
    assert [choose_splits(16, 1 << 16, 132, 64, programs) for programs in (1, 2, 4)] == [8, 16, 33]
    assert choose_splits(8, 1 << 17, 132, 64, 4) == 64 and choose_splits(200, 1 << 17, 132, 64, 1) == 1
    assert choose_splits(16, 1024, 132, 64, 2) == 4 and choose_splits(16, 10, 132, 64, 2) == 1


@pytest.mark.parametrize("n_splits", [None, 4])
@pytest.mark.parametrize("case", [(4, 4, 16, [0], 1), (6, 2, 64, [1, 0, 130], 9), (8, 1, 80, [64, 63], 16)], ids=str)
def test_cross_attention_reads_no_row_of_the_pass(trees, case, n_splits):
    """The cache ends at the longest slot's length, without room for the pass, and has NaN after each length."""
    n_heads, n_kv, width, lengths, n_rows = case
    keys, values = trees.poisoned(lengths, 0, max(*lengths, 1), n_kv, width)
    q, lengths_B = trees.draw(len(lengths), n_rows, n_heads, width, seed=3), torch.tensor(lengths)
    out, lse = cross_attention(*(x.to(DEVICE) for x in (q, keys, values, lengths_B)), n_splits)
    torch.testing.assert_close(out.cpu(), cross_reference(q, keys, values, lengths_B)[0], rtol=0, atol=2e-5)
    assert [bool(x.isneginf().all()) for x in lse.cpu()] == [length == 0 for length in lengths]
