"""kernels/tree_attention.py and `causal_attention` against the references and against attention row by row."""

from itertools import product

import pytest
import torch
from torch import Tensor

from longdraft.kernels import tree_attention as module
from longdraft.kernels.chain_attention import causal_attention
from longdraft.kernels.tree import attended_rows
from longdraft.kernels.tree_attention import cross_attention, cross_attention_reference, tree_attention
from longdraft.kernels.tree_attention import tree_attention_reference as reference


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_tree(n_rows: int, seed: int) -> Tensor:
    """Ancestor mask of a random tree; its last row is padding, which reads nothing."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.eye(n_rows, dtype=torch.bool)
    for node in range(1, n_rows):
        mask[node] |= mask[int(torch.randint(0, node, (), generator=generator))]
    if n_rows > 1:
        mask[-1] = False
    return mask


def chain_and_tree(n_rows: int) -> Tensor:
    """The masks of two slots without padding: a chain and a random tree."""
    return torch.stack((torch.ones(n_rows, n_rows).tril().bool(), random_tree(n_rows + 1, 1)[:n_rows, :n_rows]))


def poisoned(lengths: list[int], n_rows: int, capacity: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of different strides, with NaN wherever nothing was written."""
    keys = torch.full((len(lengths), capacity, heads, width), float("nan"))
    values = torch.full((len(lengths), heads, capacity, 2 * width), float("nan")).transpose(1, 2)[..., :width]
    for slot, length in enumerate(lengths):
        keys[slot, : length + n_rows] = draw(length + n_rows, heads, width, seed=slot)
        values[slot, : length + n_rows] = draw(length + n_rows, heads, width, seed=100 + slot)
    assert keys.stride() != values.stride()
    return keys, values


def row_by_row(q_Hd: Tensor, keys_SKd: Tensor, values_SKd: Tensor) -> Tensor:
    """One query over the rows that it may read, without a mask, in fp64."""
    groups = q_Hd.shape[0] // keys_SKd.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (keys_SKd, values_SKd))
    scores = torch.einsum("hd,shd->hs", q_Hd.double(), keys) * q_Hd.shape[-1] ** -0.5
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values).float()


def history_of(row: int, length: int, mask_TT: Tensor | None, window: int | None) -> list[int] | None:
    """The cache rows that a row of the pass reads; None for padding under a window, for which they are undefined."""
    own = list(range(row + 1)) if mask_TT is None else mask_TT[row].nonzero()[:, 0].tolist()
    history = [*range(length), *(length + i for i in own)]
    if window is None:
        return history
    return history[-window:] if own else None


def with_log_sum_exps(q: Tensor, keys: Tensor, values: Tensor, lengths_B: Tensor, mask: Tensor | None, window=None):
    """Attention and its log-sum-exps, by C or PyTorch."""
    rows = module.rows
    if q.shape[1] > rows.MOST_ATTENTION_ROWS or not rows.can_attend(q):
        lse = reference(q, keys, values, lengths_B, mask, window)[1]
        return tree_attention(q, keys, values, lengths_B, mask, window), lse
    lse = torch.empty(q.shape[:3])
    return rows.attention_rows(q, keys, values, lengths_B, mask, window, lse), lse


HEADS, BOTH = ((4, 4), (6, 2)), (False, True)  # query heads and key heads
LENGTHS = ([0], [1], [63], [1100], [0, 7, 100], [1030, 3])
# Of the products of all values every fifth, in which any three of them meet, and every third, in which any two do.
ALONE = list(product(HEADS, LENGTHS, (1, 2, 13), BOTH, BOTH, (None, 1, 5, 64)))[::5]
ALONE += list(product(HEADS[1:], ([0], [0, 7, 300]), (1, 13, 140), BOTH, BOTH, (None, 5)))[::3]
CROSS = list(product(HEADS, (*LENGTHS, [1030, 3, 0]), (1, 2, 16, 63), BOTH))[::3]


@pytest.fixture
def pytorch_only(monkeypatch):
    monkeypatch.setattr(module.rows, "can_attend", lambda _: False)


@pytest.mark.parametrize(("heads", "lengths", "n_rows", "tree", "compiled", "window"), ALONE, ids=str)
def test_against_each_row_alone(request, heads, lengths, n_rows, tree, compiled, window):
    request.getfixturevalue("c_kernels" if compiled else "pytorch_only")
    n_heads, n_kv_heads = heads
    keys, values = poisoned(lengths, n_rows, max(lengths) + n_rows + 5, n_kv_heads, 16)
    q = draw(len(lengths), n_rows, n_heads, 16, seed=7)
    masks = torch.stack([random_tree(n_rows, seed) for seed in range(len(lengths))]) if tree else None
    lengths_B = torch.tensor(lengths)
    out, lse = with_log_sum_exps(q, keys, values, lengths_B, masks, window)
    assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3]) and lse.is_contiguous()
    assert torch.equal(out, tree_attention(q, keys, values, lengths_B, masks, window))
    outputs = [out, reference(q, keys, values, lengths_B, masks, window)[0]]
    for slot, length in enumerate(lengths):
        for row in range(n_rows):
            history = history_of(row, length, None if masks is None else masks[slot], window)
            if history is None:
                continue
            expected = row_by_row(q[slot, row], keys[slot, history], values[slot, history])
            for out in outputs:
                difference = (out[slot, row] - expected).abs().max()
                assert difference < 1e-5, f"slot {slot}, row {row}: {difference}"
            seen = keys[slot, history].double().repeat_interleave(n_heads // n_kv_heads, 1)
            total = (torch.einsum("hd,shd->hs", q[slot, row].double(), seen) / 4).logsumexp(-1)
            torch.testing.assert_close(lse[slot, row].double(), total, rtol=0, atol=5e-6)
    assert all(bool(out.isfinite().all()) for out in outputs)


@pytest.mark.parametrize("compiled", BOTH)
@pytest.mark.parametrize(("n_rows", "tree", "window"), [(9, True, None), (140, False, None), (140, False, 100)])
def test_bf16_error_is_that_of_plain_bf16(request, plain, n_rows, tree, window, compiled):
    """At most twice the error of plain.py's attention in bf16, both measured against fp32."""
    request.getfixturevalue("c_kernels" if compiled else "pytorch_only")
    keys, values = poisoned([300], n_rows, 300 + n_rows, 2, 32)
    q, lengths = draw(1, n_rows, 6, 32, seed=3), torch.tensor([300])
    mask = random_tree(n_rows + 1, 1)[None, :n_rows, :n_rows] if tree else None
    exact = reference(q, keys, values, lengths, mask, window)[0]
    low = [x.bfloat16() for x in (q, keys, values)]
    seen = attended_rows(lengths, n_rows, 300 + n_rows, mask, window)
    allowed = 2 * (plain.attention(*low, seen).float() - exact).abs().max()
    assert (tree_attention(*low, lengths, mask, window).float() - exact).abs().max() <= allowed


@pytest.mark.parametrize("window", [None, 1, 7, 600, 5000])
@pytest.mark.parametrize("n_rows", [1, 63, 1100])
def test_causal_attention(n_rows, window):
    q, k, v = draw(2, n_rows, 4, 8, seed=0), draw(2, n_rows, 2, 8, seed=1), draw(2, n_rows, 2, 8, seed=2)
    expected = reference(q, k, v, torch.zeros(2, dtype=torch.int64), None, window)[0]
    torch.testing.assert_close(causal_attention(q, k, v, window), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("heads", "lengths", "n_rows", "compiled"), CROSS, ids=str)
def test_cross_attention_reads_its_slots_rows_and_no_other(request, heads, lengths, n_rows, compiled):
    request.getfixturevalue("c_kernels" if compiled else "pytorch_only")
    n_heads, n_kv_heads = heads
    keys, values = poisoned(lengths, 0, max(lengths) + 9, n_kv_heads, 16)
    given = draw(len(lengths), n_rows, n_heads, 16, seed=7), keys, values, torch.tensor(lengths)
    out = cross_attention(*given)
    torch.testing.assert_close(out, cross_attention_reference(*given)[0], rtol=0, atol=1e-5)
    for slot, length in enumerate(lengths):
        for row in range(n_rows):
            expected = row_by_row(given[0][slot, row], keys[slot, :length], values[slot, :length])
            difference = (out[slot, row] - expected).abs().max()
            assert difference < 1e-5, f"slot {slot}, row {row}: {difference}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_attentions_error_is_that_of_plain_arithmetic(request, plain, dtype, compiled):
    """At most twice the error of plain.py's attention in the same precision, both measured against fp32."""
    request.getfixturevalue("c_kernels" if compiled else "pytorch_only")
    keys, values = poisoned([300], 0, 309, 2, 32)
    q, lengths = draw(1, 9, 6, 32, seed=3), torch.tensor([300])
    exact = cross_attention_reference(q, keys, values, lengths)[0]
    low = [x.to(dtype) for x in (q, keys, values)]
    usual = plain.attention(low[0], *(x[:, :300] for x in low[1:]), torch.ones(1, 9, 300, dtype=torch.bool))
    allowed = 2 * (usual.float() - exact).abs().max()
    out = cross_attention(*low, lengths)
    assert out.dtype == dtype and (out.float() - exact).abs().max() <= allowed
