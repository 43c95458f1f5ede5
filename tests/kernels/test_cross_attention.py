"""kernels/tree_attention.py: every implementation and the reference against attention row by row."""

import pytest
import torch

from longdraft.kernels import tree_attention as module
from longdraft.kernels.tree_attention import cross_attention
from longdraft.kernels.tree_attention import cross_attention_reference as reference


@pytest.fixture(params=["compiled", "pytorch"])
def implementation(request, monkeypatch):
    """The C kernels, or PyTorch as without a compiler."""
    if request.param == "pytorch":
        monkeypatch.setattr(module.rows, "can_attend", lambda _: False)
    else:
        request.getfixturevalue("c_kernels")


LENGTHS = ([0], [1], [63], [1100], [0, 7, 100], [1030, 3, 0])


@pytest.mark.parametrize("n_rows", [1, 2, 16, 63])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=["mha", "gqa"])
def test_every_row_reads_its_slots_rows_and_no_other(implementation, trees, heads, lengths, n_rows):
    n_heads, n_kv_heads = heads
    keys, values = trees.poisoned(lengths, 0, max(lengths) + 9, n_kv_heads, 16)
    q = trees.draw(len(lengths), n_rows, n_heads, 16, seed=7)
    out = cross_attention(q, keys, values, torch.tensor(lengths))
    torch.testing.assert_close(out, reference(q, keys, values, torch.tensor(lengths))[0], rtol=0, atol=1e-5)
    for slot, length in enumerate(lengths):
        for row in range(n_rows):
            expected = trees.row_by_row(q[slot, row], keys[slot, :length], values[slot, :length])
            difference = (out[slot, row] - expected).abs().max()
            assert difference < 1e-5, f"slot {slot}, row {row}: {difference}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_plain_arithmetic_in_the_same_precision(implementation, trees, plain, dtype):
    """At most twice the error of plain.py's attention, both measured against fp32."""
    keys, values = trees.poisoned([300], 0, 309, 2, 32)
    q, lengths = trees.draw(1, 9, 6, 32, seed=3), torch.tensor([300])
    exact = reference(q, keys, values, lengths)[0]
    low = [x.to(dtype) for x in (q, keys, values)]
    usual = plain.attention(low[0], *(x[:, :300] for x in low[1:]), torch.ones(1, 9, 300, dtype=torch.bool))
    allowed = 2 * (usual.float() - exact).abs().max()
    out = cross_attention(*low, lengths)
    assert out.dtype == dtype and (out.float() - exact).abs().max() <= allowed
