"""All layers as one C call give the same bits as the layers called one by one, pass after pass."""

import copy
import pickle
from contextlib import contextmanager

import pytest
import torch

from longdraft.kernels.cpu import library
from longdraft.kernels.cpu.layers import LayerTable
from longdraft.models import decoder
from longdraft.models.passes import Pass

pytestmark = pytest.mark.usefixtures("c_kernels")
KINDS = {
    "gqa": {},
    "mha, tied": {"n_kv_heads": 4, "tie_embeddings": True},
    "sliding": {"sliding_windows": (5, None, 9), "n_layers": 3},
    "rope by length": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_positions": 24},
    "qk norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "o_bias": True, "mlp_bias": True},
}
ALL = {"logits", "pre_norm", "post_norm", "last_kv", "queries"}
NEEDS = ({"logits"}, ALL, {"last_kv", "queries"})
STEPS = 5


def tensors(output):
    parts = [output.logits, output.pre_norm, output.post_norm, output.queries, *(output.last_kv or ())]
    return [part for part in parts if part is not None]


def random_trees(batch, width, generator):
    """The ancestor masks [B, N, N] of random tries, and their nodes' depths [B, N]."""
    mask = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    for slot in range(batch):
        for node in range(1, width):
            mask[slot, node] |= mask[slot, int(torch.randint(node, (), generator=generator))]
    return mask, mask.sum(-1) - 1


def decode(model, batch, width, tree, needs):
    """The outputs of several passes in a row, of each of which some rows are kept, and the cache; always the same."""
    generator = torch.Generator().manual_seed(batch + width)
    cache = model.new_cache(batch, 60)
    cache.keys.zero_(), cache.values.zero_()
    cache.reset(prompt_lengths=[9, 2, 30][:batch])
    model(Pass(torch.randint(97, (batch, 5), generator=generator), cache=cache))
    cache.commit(None, torch.tensor([5, 1, 3][:batch]))
    outputs, copies = [], []
    for step in range(STEPS):
        masks, positions = None, None
        if tree:
            masks, depths = random_trees(batch, width, generator)
            positions = cache.lengths[:, None] + depths
        tokens = torch.randint(97, (batch, width), generator=generator)
        rows_B = torch.full((batch,), step % width)
        tree_parts = {"positions_BT": positions, "tree_mask_BTT": masks}
        outputs.append(model(Pass(tokens, cache=cache, needs=needs, queries_at_B=rows_B, **tree_parts)))
        copies.append([part.clone() for part in tensors(outputs[-1])])
        counts = torch.randint(1, width + 1, (batch,), generator=generator)
        cache.commit(torch.arange(width).expand(batch, -1), counts)
    for output, kept in zip(outputs, copies, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors(output), kept, strict=True)), "overwritten"
    return [*outputs, cache]


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """A list that gets the number of tokens of every pass whose layers are one call."""
    found, run = [], LayerTable.run

    def watched(self, x_BTD, *args):
        found.append(x_BTD.shape[0] * x_BTD.shape[1])
        return run(self, x_BTD, *args)

    monkeypatch.setattr(LayerTable, "run", watched)
    return found


@pytest.mark.parametrize("needs", NEEDS, ids=["logits", "all", "last layer's keys"])
@pytest.mark.parametrize(("batch", "width", "tree"), [(1, 1, False), (1, 6, True), (3, 1, False), (3, 5, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_layers_one_by_one(tiny_target, monkeypatch, calls, kind, batch, width, tree, needs):
    model = tiny_target(dtype=torch.bfloat16, **KINDS[kind]).model
    *found, cache = decode(model, batch, width, tree, needs)
    assert calls == [batch * 5] + [batch * width] * STEPS, "the prompt, and the passes"
    monkeypatch.setattr(decoder, "MOST_TOKENS", 0)
    *wanted, plain_cache = decode(model, batch, width, tree, needs)
    assert len(calls) == 1 + STEPS
    for one, other in zip(found, wanted, strict=True):
        assert len(tensors(one)) == len(tensors(other)) > 0
        assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    assert torch.equal(cache.keys, plain_cache.keys) and torch.equal(cache.values, plain_cache.values)


def test_only_narrow_passes_are_one_call_and_fp32_while_decoding(tiny_target, calls):
    model = tiny_target(dtype=torch.bfloat16).model
    cache = model.new_cache(1, 80)
    for width in (33, 1, 32):
        model(Pass(torch.zeros(1, width, dtype=torch.int64), cache=cache))
    model(Pass(torch.zeros(1, 5, dtype=torch.int64)))
    assert calls == [1, 32]
    fp32 = tiny_target().model
    cache = fp32.new_cache(1, 80)
    fp32(Pass(torch.zeros(1, 2, dtype=torch.int64), cache=cache))
    assert len(calls) == 2, "fp32 products are PyTorch's"
    with library.decoding():
        for width in (33, 2, 1):
            fp32(Pass(torch.zeros(1, width, dtype=torch.int64), cache=cache))
    assert calls == [1, 32, 2, 1]


@pytest.mark.parametrize(
    "shape", [{"head_dim": 12}, {"hidden_size": 36, "n_heads": 2}, {"intermediate_size": 44}], ids=str
)
def test_shapes_that_c_does_not_take_go_layer_by_layer(tiny_target, calls, shape):
    model = tiny_target(dtype=torch.bfloat16, **shape).model
    *outputs, _ = decode(model, 1, 4, True, ALL)
    assert calls == [] and all(part.isfinite().all() for output in outputs for part in tensors(output))


@pytest.mark.parametrize("tree", [False, True])
def test_fp32_while_decoding_is_as_close_as_pytorchs(tiny_target, calls, tree):
    model = tiny_target(n_layers=3).model
    *wanted, _ = decode(model, 2, 4, tree, ALL)
    with library.decoding():
        *found, _ = decode(model, 2, 4, tree, ALL)
        assert calls
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_weights_that_come_and_go_go_layer_by_layer(tiny_target, calls):
    model = tiny_target(dtype=torch.bfloat16, n_layers=3).model
    entered = []

    @contextmanager
    def around(layer):
        entered.append(layer.attention.layer)
        yield

    model.around_layer = around
    cache = model.new_cache(1, 8)
    for _ in range(3):
        model(Pass(torch.zeros(1, 1, dtype=torch.int64), cache=cache))
    assert entered == [0, 1, 2] * 3 and calls == []


def test_a_full_cache_is_refused_as_ever(tiny_target, calls):
    model = tiny_target(dtype=torch.bfloat16).model
    cache, token = model.new_cache(1, 4), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(4):
        model(Pass(token, cache=cache))
        cache.commit(None, torch.tensor([1]))
    assert calls == [1] * 4
    before = cache.keys.clone(), cache.values.clone()
    with pytest.raises(AssertionError, match="needs a capacity of at least 5, the cache has 4"):
        model(Pass(token, cache=cache))
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])


@pytest.mark.parametrize("how", ["in place", "other parameters", "cast"])
def test_other_weights(tiny_target, calls, how):
    model, other = (tiny_target(dtype=torch.bfloat16, seed=seed).model for seed in (0, 1))
    token = torch.tensor([[3]])
    cache, wanted = model.new_cache(1, 8), other(Pass(token, cache=other.new_cache(1, 8))).logits
    for _ in range(3):
        assert not torch.equal(model(Pass(token, cache=cache)).logits, wanted)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if how == "in place":
            mine.copy_(theirs)
    if how == "other parameters":
        model.load_state_dict(other.state_dict(), assign=True)
    if how == "cast":
        model.load_state_dict(other.state_dict())
        with library.decoding():
            model.float()(Pass(token, cache=model.new_cache(1, 8)))
        model.bfloat16()
    for _ in range(3):
        assert torch.equal(model(Pass(token, cache=cache)).logits, wanted)
    assert len(calls) == 7 + (how == "cast")


@pytest.mark.parametrize("name", ["attention.o_proj", "mlp.down_proj", "mlp_norm", "attention.qkv_proj"])
def test_one_weight_that_lies_elsewhere_is_seen(tiny_target, calls, name):
    model, other = (tiny_target(dtype=torch.bfloat16, seed=seed).model for seed in (0, 0))
    token, cache = torch.tensor([[3]]), model.new_cache(1, 20)
    before = model(Pass(token, cache=cache)).logits
    for each in (model, other):
        weight = each.layers[1].get_submodule(name).weight
        weight.data = weight.data.clone() * -2
    wanted = other(Pass(token, cache=other.new_cache(1, 20))).logits
    assert not torch.equal(wanted, before) and torch.equal(model(Pass(token, cache=cache)).logits, wanted)
    assert len(calls) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_decoder_has_a_table_of_its_own(tiny_target, calls, copied):
    model = tiny_target(dtype=torch.bfloat16).model
    token = torch.tensor([[3]])
    wanted = model(Pass(token, cache=model.new_cache(1, 8))).logits
    twin = copied(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(twin(Pass(token, cache=twin.new_cache(1, 8))).logits, wanted) and calls == [1, 1]
