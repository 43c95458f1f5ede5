"""LongSpec's block as one C call: it gives the logits of the network's own operations and reads no other rows."""

import pytest
import torch

from longdraft.infer.drafters.longspec import block_weights
from longdraft.kernels.cpu import rows
from longdraft.kernels.cpu.draft_block import DraftBlock, Inputs, can_run
from longdraft.kernels.tree_attention import cross_attention_reference as cross_attention
from longdraft.kernels.tree_attention import tree_attention_reference as tree_attention
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig

pytestmark = pytest.mark.usefixtures("c_kernels")
WINDOW, CAPACITY, VOCAB = 7, 60, 53
KINDS = {
    "gqa": {"n_kv_heads": 2},
    "mha, final norm, other widths": {"n_kv_heads": 4, "final_norm": True, "head_dim": 24, "intermediate_size": 40},
    "one head": {"n_heads": 1, "n_kv_heads": 1, "head_dim": 16},
}
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "n_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-5,
    "max_positions": 128, "rope": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def block_of(kind, dtype):
    config = LongSpecConfig(**SHAPE | KINDS[kind], window=WINDOW)
    draft, generator = LongSpec(config), torch.Generator().manual_seed(3)
    for name, parameter in draft.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    head_ED = torch.randn(VOCAB, config.hidden_size, generator=generator)
    return draft.to(dtype).requires_grad_(False), head_ED.to(dtype)


class Case:
    """A block, and random embeddings, tokens and caches of slots of these lengths; both caches are of one length."""

    def __init__(self, kind, dtype, lengths, n_tokens=1):
        self.draft, self.head_ED = block_of(kind, dtype)
        self.config, generator = self.draft.config, torch.Generator().manual_seed(len(lengths) + n_tokens)
        self.lengths_B, self.generator = torch.tensor(lengths), generator
        shape = 2, len(lengths), CAPACITY, self.config.n_kv_heads, self.config.head_dim
        self.own, self.seen = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self.embeddings_VD = torch.randn(VOCAB, self.config.hidden_size, generator=generator).to(dtype)
        self.tokens_BT = torch.randint(VOCAB, (len(lengths), n_tokens), generator=generator)
        self.history_BS = torch.randint(VOCAB, (len(lengths), 2 * CAPACITY), generator=generator)[:, :CAPACITY]

    def block(self, weights=None, own=None):
        """The block over the caches, or over another cache of its own."""
        weights = block_weights(self.draft, self.head_ED) if weights is None else weights
        return block_for(self.draft, weights, self.embeddings_VD, self.own if own is None else own, self.seen)


def block_for(draft, weights, embeddings_VD, own, target, scale=1.0):
    config, (cos, sin) = draft.config, draft.tables(torch.arange(CAPACITY)[None])
    inputs = Inputs(embeddings_VD, scale, cos.flatten(0, -2), sin.flatten(0, 1).flatten(1))
    return DraftBlock(weights, inputs, config.n_heads, config.n_kv_heads, config.rms_norm_eps, WINDOW + 1, own, target)


def wide(bytes_NI, scales_N):
    """The weight that these int8 numbers stand for."""
    return bytes_NI.float() * scales_N[:, None]


def random_mask(batch, n_tokens, before, generator):
    """Rows that the queries read: themselves and at most four of those before, fewer than the window."""
    chosen = torch.rand(batch, n_tokens, before, generator=generator).argsort(-1)[..., :4]
    keep = torch.rand(chosen.shape, generator=generator) < 0.7
    mask = torch.zeros(batch, n_tokens, before, dtype=torch.bool).scatter(2, chosen, keep)
    return torch.cat([mask, torch.eye(n_tokens, dtype=torch.bool).expand(batch, -1, -1)], 2)


def by_operations(draft, head_ED, x_BTD, tables, own, mask_BTN, target):
    """The network's block, with the references' attention over all rows of the tree."""
    (keys, values, lengths_B), n_tokens = own, x_BTD.shape[1]
    before = mask_BTN.shape[2] - n_tokens

    def attend_self(q_BTHd, k_BTKd, v_BTKd):
        for slot, length in enumerate(lengths_B.tolist()):
            rows = slice(length + before, length + before + n_tokens)
            keys[slot, rows], values[slot, rows] = k_BTKd[slot], v_BTKd[slot]
        # The reference needs a query for every row of the tree: those before these are zero and read themselves.
        q_BNHd = torch.cat([q_BTHd.new_zeros(len(q_BTHd), before, *q_BTHd.shape[2:]), q_BTHd], 1)
        earlier = torch.eye(before, before + n_tokens, dtype=torch.bool).expand(len(q_BTHd), -1, -1)
        tree_BNN = torch.cat([earlier, mask_BTN], 1)
        return tree_attention(q_BNHd, keys, values, lengths_B, tree_BNN, WINDOW + 1)[0][:, before:]

    hidden_BTD = draft.block(x_BTD, tables, attend_self, lambda q_BTHd: cross_attention(q_BTHd, *target)[0])
    return hidden_BTD @ head_ED.T


@pytest.mark.parametrize("n_tokens, before", [(1, 0), (1, 1), (4, 1), (7, 5), (16, 21)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind, scale", [*((kind, 1.0) for kind in KINDS), ("gqa", 1.5)], ids=str)
def test_it_is_the_networks_operations(kind, scale, batch, n_tokens, before):
    """In fp32, with NaN where nothing may be read, strided keys, and slots from empty to longer than the window."""
    draft, head_ED = block_of(kind, torch.float32)
    config, generator = draft.config, torch.Generator().manual_seed(n_tokens + batch)
    lengths_B, seen_B = torch.tensor([9, 0, 20])[:batch], torch.tensor([12, 0, 1])[:batch]

    def cache(filled_B):
        rows = torch.randn(2, batch, CAPACITY, 2 * config.n_kv_heads, config.head_dim, generator=generator)
        for slot, filled in enumerate(filled_B.tolist()):
            rows[:, slot, filled:] = torch.nan
        return rows[0, :, :, : config.n_kv_heads], rows[1, :, :, : config.n_kv_heads]

    own, target = (*cache(lengths_B + before), lengths_B), (*cache(seen_B), seen_B)
    embeddings_VD = torch.randn(VOCAB, config.hidden_size, generator=generator)
    tokens_BT = torch.randint(VOCAB, (batch, n_tokens), generator=generator)
    tables = draft.tables((lengths_B + before)[:, None].expand(-1, n_tokens))
    mask_BTN = random_mask(batch, n_tokens, before, generator)
    copied = own[0].clone(), own[1].clone(), lengths_B
    expected = by_operations(draft, head_ED, scale * embeddings_VD[tokens_BT], tables, copied, mask_BTN, target)
    weights = block_weights(draft, head_ED)
    assert can_run(weights, config.head_dim)
    block = block_for(draft, weights, embeddings_VD, own[:2], target[:2], scale)
    found = block.run(tokens_BT, lengths_B, before, mask_BTN, seen_B)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found, block.run(tokens_BT, lengths_B, before, mask_BTN, seen_B))


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_it_errs_as_little_as_the_operations(kind):
    """Against fp32 with the same numbers: at most twice the error of the network's operations in bf16."""
    case, before = Case(kind, torch.bfloat16, [30, 3], n_tokens=5), 4
    draft, lengths_B, x_BTD = case.draft, case.lengths_B, case.embeddings_VD[case.tokens_BT]
    tables = draft.tables((lengths_B + before)[:, None].expand(-1, 5))
    mask_BTN = random_mask(2, 5, before, case.generator)

    def given(dtype):
        return (*case.own.to(dtype).clone(), lengths_B), mask_BTN, (*case.seen.to(dtype), lengths_B)

    found = case.block(own=case.own.clone()).run(case.tokens_BT, lengths_B, before, mask_BTN, lengths_B).float()
    operations = by_operations(draft, case.head_ED, x_BTD, tables, *given(torch.bfloat16)).float()
    wide = [table.float() for table in tables]
    exact = by_operations(draft.float(), case.head_ED.float(), x_BTD.float(), wide, *given(torch.float32))
    assert (found - exact).norm() <= 2 * (operations - exact).norm()


def test_a_row_alone_has_the_bits_of_a_row_among_others():
    case = Case("gqa", torch.bfloat16, [17], n_tokens=6)
    block = case.block()

    def run(rows):
        tokens_1T = case.tokens_BT[:, rows]
        mask_1TT = torch.eye(tokens_1T.shape[1], dtype=torch.bool)[None]
        return block.run(tokens_1T, case.lengths_B, 0, mask_1TT, case.lengths_B)

    whole = run(slice(0, 6))
    for row in range(6):
        assert torch.equal(run(slice(row, row + 1))[:, 0], whole[:, row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_missing_rows_get_the_keys_and_values_of_the_network(kind, dtype):
    """Those of the last committed tokens, of which a slot may have fewer. No other row changes but the pass's own."""
    case, n_missing = Case(kind, dtype, [30, 3, 0]), 5
    draft, lengths_B = case.draft, case.lengths_B
    positions_B5 = (lengths_B[:, None] + torch.arange(-n_missing, 0)).clamp(min=0)
    missing_BTD = case.embeddings_VD[case.history_BS.gather(1, positions_B5)]
    expected, own_kv = case.own.clone(), draft.self_kv(missing_BTD, draft.tables(positions_B5))
    for slot, length in enumerate(lengths_B.tolist()):
        for kept, fresh_BTKd in zip(expected, own_kv, strict=True):
            count = min(n_missing, length)
            kept[slot, length - count : length] = fresh_BTKd[slot, n_missing - count :]
    block, mask_B11 = case.block(), torch.ones(3, 1, 1, dtype=torch.bool)
    found = block.run(case.tokens_BT, lengths_B, 0, mask_B11, lengths_B, case.history_BS, n_missing)
    for slot, length in enumerate(lengths_B.tolist()):
        torch.testing.assert_close(case.own[:, slot, :length], expected[:, slot, :length])
        assert torch.equal(case.own[:, slot, length + 1 :], expected[:, slot, length + 1 :])
    # The pass reads them.
    assert torch.equal(found, block.run(case.tokens_BT, lengths_B, 0, mask_B11, lengths_B))


@pytest.mark.parametrize("n_tokens", [1, 3, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bytes_are_the_weights_that_the_bytes_stand_for(kind, dtype, n_tokens):
    """Bit for bit. A number is off by at most half a step of its output, and an output of zeros stays zero."""
    case, results = Case(kind, dtype, [9], n_tokens=n_tokens), []
    mask_1TT = torch.eye(n_tokens, dtype=torch.bool)[None]
    case.head_ED[3] = 0
    given = block_weights(case.draft, case.head_ED)
    in_bytes = given.in_bytes()
    for matrix, (numbers_NI, _) in zip(in_bytes.matrices, given.matrices, strict=True):
        assert ((wide(*matrix) - numbers_NI.float()).abs() <= 0.5001 * matrix.scales_N[:, None]).all()
    assert (wide(*in_bytes.head)[3] == 0).all()
    plain = [rows.Weight(wide(*matrix).to(dtype)) for matrix in in_bytes.matrices]
    for weights in (in_bytes, in_bytes._make([*plain, *in_bytes.vectors])):
        kept = case.own.clone()
        found = case.block(weights, kept).run(
            case.tokens_BT, case.lengths_B, 0, mask_1TT, case.lengths_B, case.history_BS, 2
        )
        results.append((found, kept))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def test_a_position_without_a_row_is_refused():
    block = Case("gqa", torch.float32, [0]).block()
    one, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool)
    block.run(one, torch.tensor([CAPACITY - 1]), 0, mask, torch.tensor([3]))
    for length, offset in ((CAPACITY, 0), (CAPACITY - 1, 1)):
        with pytest.raises(AssertionError, match="no room after the lengths"):
            block.run(one, torch.tensor([length]), offset, mask, torch.tensor([3]))
