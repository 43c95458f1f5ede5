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


def embeddings_of(config, dtype, generator):
    return torch.randn(VOCAB, config.hidden_size, generator=generator).to(dtype)


def block_for(draft, weights, embeddings_VD, own, target, scale=1.0):
    config, (cos, sin) = draft.config, draft.tables(torch.arange(CAPACITY)[None])
    inputs = Inputs(embeddings_VD, scale, cos.flatten(0, -2), sin.flatten(0, 1).flatten(1))
    return DraftBlock(weights, inputs, config.n_heads, config.n_kv_heads, config.rms_norm_eps, WINDOW + 1, own, target)


def wide(bytes_NI, scales_N):
    """The weight that these int8 numbers stand for."""
    return bytes_NI.float() * scales_N[:, None]


def some_tokens(*shape, generator):
    return torch.randint(VOCAB, shape, generator=generator)


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
    embeddings_VD = embeddings_of(config, torch.float32, generator)
    tokens_BT = some_tokens(batch, n_tokens, generator=generator)
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
    draft, head_ED = block_of(kind, torch.bfloat16)
    config, generator = draft.config, torch.Generator().manual_seed(1)
    lengths_B, batch, n_tokens, before = torch.tensor([30, 3]), 2, 5, 4
    shape = 2, batch, CAPACITY, config.n_kv_heads, config.head_dim
    own, seen = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    embeddings_VD = embeddings_of(config, torch.bfloat16, generator)
    tokens_BT = some_tokens(batch, n_tokens, generator=generator)
    tables = draft.tables((lengths_B + before)[:, None].expand(-1, n_tokens))
    mask_BTN, x_BTD = random_mask(batch, n_tokens, before, generator), embeddings_VD[tokens_BT]

    def given(dtype):
        return (*own.to(dtype).clone(), lengths_B), mask_BTN, (*seen.to(dtype), lengths_B)

    block = block_for(draft, block_weights(draft, head_ED), embeddings_VD, own.clone(), seen)
    found = block.run(tokens_BT, lengths_B, before, mask_BTN, lengths_B).float()
    operations = by_operations(draft, head_ED, x_BTD, tables, *given(torch.bfloat16)).float()
    wide = [table.float() for table in tables]
    exact = by_operations(draft.float(), head_ED.float(), x_BTD.float(), wide, *given(torch.float32))
    assert (found - exact).norm() <= 2 * (operations - exact).norm()


def test_a_row_alone_has_the_bits_of_a_row_among_others():
    draft, head_ED = block_of("gqa", torch.bfloat16)
    config, generator = draft.config, torch.Generator().manual_seed(2)
    lengths_B = torch.tensor([17])
    own, seen = (torch.randn(2, 1, CAPACITY, 2, 8, generator=generator).bfloat16() for _ in range(2))
    embeddings_VD, tokens_1T = embeddings_of(config, torch.bfloat16, generator), some_tokens(1, 6, generator=generator)
    block = block_for(draft, block_weights(draft, head_ED), embeddings_VD, own, seen)

    def run(rows):
        mask_1TT = torch.eye(len(tokens_1T[0, rows]), dtype=torch.bool)[None]
        return block.run(tokens_1T[:, rows], lengths_B, 0, mask_1TT, lengths_B)

    whole = run(slice(0, 6))
    for row in range(6):
        assert torch.equal(run(slice(row, row + 1))[:, 0], whole[:, row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_missing_rows_get_the_keys_and_values_of_the_network(kind, dtype):
    """Those of the last committed tokens, of which a slot may have fewer. No other row changes but the pass's own."""
    draft, head_ED = block_of(kind, dtype)
    config, generator, n_missing = draft.config, torch.Generator().manual_seed(4), 5
    lengths_B, positions_5 = torch.tensor([30, 3, 0]), torch.arange(-n_missing, 0)
    shape = 3, CAPACITY, config.n_kv_heads, config.head_dim
    keys, values, seen = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
    embeddings_VD = embeddings_of(config, dtype, generator)
    tokens_B1 = some_tokens(3, 1, generator=generator)
    history_BS = some_tokens(3, 2 * CAPACITY, generator=generator)[:, :CAPACITY]  # rows apart
    positions_B5 = (lengths_B[:, None] + positions_5).clamp(min=0)
    missing_BTD = embeddings_VD[history_BS.gather(1, positions_B5)]
    expected, own_kv = (keys.clone(), values.clone()), draft.self_kv(missing_BTD, draft.tables(positions_B5))
    for slot, length in enumerate(lengths_B.tolist()):
        for kept, fresh_BTKd in zip(expected, own_kv, strict=True):
            count = min(n_missing, length)
            kept[slot, length - count : length] = fresh_BTKd[slot, n_missing - count :]
    block = block_for(draft, block_weights(draft, head_ED), embeddings_VD, (keys, values), (seen, seen))
    mask_B11 = torch.ones(3, 1, 1, dtype=torch.bool)
    found = block.run(tokens_B1, lengths_B, 0, mask_B11, lengths_B, history_BS, n_missing)
    for kept, wanted in zip((keys, values), expected, strict=True):
        for slot, length in enumerate(lengths_B.tolist()):
            torch.testing.assert_close(kept[slot, :length], wanted[slot, :length])
            assert torch.equal(kept[slot, length + 1 :], wanted[slot, length + 1 :])
    # The pass reads them.
    assert torch.equal(found, block.run(tokens_B1, lengths_B, 0, mask_B11, lengths_B))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_bytes_are_the_weights_that_the_bytes_stand_for(kind, dtype):
    """Bit for bit. A number is off by at most half a step of its output, and an output of zeros stays zero."""
    draft, head_ED = block_of(kind, dtype)
    head_ED[3] = 0
    config, generator, lengths_B = draft.config, torch.Generator().manual_seed(5), torch.tensor([9])
    shape = 2, 1, CAPACITY, config.n_kv_heads, config.head_dim
    own, seen = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    embeddings_VD = embeddings_of(config, dtype, generator)
    tokens_1T, history_1S = some_tokens(1, 17, generator=generator), some_tokens(1, CAPACITY, generator=generator)
    given = block_weights(draft, head_ED)
    in_bytes = given.in_bytes()
    for matrix, (numbers_NI, _) in zip(in_bytes.matrices, given.matrices, strict=True):
        assert ((wide(*matrix) - numbers_NI.float()).abs() <= 0.5001 * matrix.scales_N[:, None]).all()
    assert (wide(*in_bytes.head)[3] == 0).all()
    plain = [rows.Weight(wide(*matrix).to(dtype)) for matrix in in_bytes.matrices]
    mask_1TT, results = torch.eye(17, dtype=torch.bool)[None], []
    for weights in (in_bytes, in_bytes._make([*plain, *in_bytes.vectors])):
        kept = own.clone()
        block = block_for(draft, weights, embeddings_VD, kept, seen)
        results.append((block.run(tokens_1T, lengths_B, 0, mask_1TT, lengths_B, history_1S, 2), kept))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def test_a_position_without_a_row_is_refused():
    draft, head_ED = block_of("gqa", torch.float32)
    own, seen = (torch.zeros(2, 1, CAPACITY, 2, 8) for _ in range(2))
    block = block_for(draft, block_weights(draft, head_ED), torch.zeros(VOCAB, 32), own, seen)
    one, mask = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool)
    block.run(one, torch.tensor([CAPACITY - 1]), 0, mask, torch.tensor([3]))
    for length, offset in ((CAPACITY, 0), (CAPACITY - 1, 1)):
        with pytest.raises(AssertionError, match="no room after the lengths"):
            block.run(one, torch.tensor([length]), offset, mask, torch.tensor([3]))
