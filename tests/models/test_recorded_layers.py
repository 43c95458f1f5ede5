"""Layers whose calls on a CPU are recorded: every bit is that of the layers called one by one, pass after pass."""

import copy
import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from longdraft.kernels.cpu_impl import program, rows
from longdraft.kernels.linear import linear
from longdraft.models import recorded_layers
from longdraft.models.passes import Pass

pytestmark = pytest.mark.usefixtures("c_kernels")
KINDS = {
    "gqa": {},
    "mha, tied": {"n_kv_heads": 4, "tie_embeddings": True},
    "sliding": {"sliding_windows": (5, None, 9), "n_layers": 3},
    "rope by length": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_positions": 24},
    "qk norm": {"qk_norm": True},
}
NOT_RECORDED = {"qk norm"}  # PyTorch computes it
ALL = {"logits", "pre_norm", "post_norm", "last_kv", "queries"}
NEEDS = ({"logits"}, ALL, {"last_kv", "queries"})
STEPS = 5


def tensors(output):
    parts = [output.logits, output.pre_norm, output.post_norm, output.queries, *(output.last_kv or ())]
    return [part for part in parts if part is not None]


def random_trees(batch, width, generator):
    """Ancestor masks [B, N, N] of random tries and their nodes' depths [B, N]."""
    mask = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    for slot in range(batch):
        for node in range(1, width):
            mask[slot, node] |= mask[slot, int(torch.randint(node, (), generator=generator))]
    return mask, mask.sum(-1) - 1


def decode(model, batch, width, tree, needs):
    """Outputs of some passes behind each other, some rows of each kept, and the cache at last; the same every time."""
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
        outputs.append(
            model(
                Pass(tokens, cache=cache, positions_BT=positions, tree_mask_BTT=masks, needs=needs, queries_at_B=rows_B)
            )
        )
        copies.append([part.clone() for part in tensors(outputs[-1])])
        counts = torch.randint(1, width + 1, (batch,), generator=generator)
        cache.commit(torch.arange(width).expand(batch, -1), counts)
    for output, kept in zip(outputs, copies, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(tensors(output), kept, strict=True)), "overwritten"
    return [*outputs, cache]


def programs(model, cache):
    return [
        known.program for known in model.recorded_layers._known.get(cache, {}).values() if known.program is not None
    ]


@pytest.mark.parametrize("needs", NEEDS, ids=["logits", "all", "last layer's keys"])
@pytest.mark.parametrize(("batch", "width", "tree"), [(1, 1, False), (1, 6, True), (3, 1, False), (3, 5, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_unrecorded_layers(tiny_target, monkeypatch, kind, batch, width, tree, needs):
    model = tiny_target(dtype=torch.bfloat16, **KINDS[kind]).model
    *found, cache = decode(model, batch, width, tree, needs)
    assert len(programs(model, cache)) == (0 if kind in NOT_RECORDED else 2), "of the prompt, and of the passes"
    monkeypatch.setattr(recorded_layers, "MOST_ROWS", 0)
    *wanted, plain_cache = decode(model, batch, width, tree, needs)
    assert programs(model, plain_cache) == []
    for one, other in zip(found, wanted, strict=True):
        assert len(tensors(one)) == len(tensors(other)) > 0
        assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))
    assert torch.equal(cache.keys, plain_cache.keys) and torch.equal(cache.values, plain_cache.values)


def test_only_narrow_passes_are_recorded_and_fp32_while_decoding(tiny_target):
    model = tiny_target(dtype=torch.bfloat16).model
    cache = model.new_cache(1, 80)
    for width, count, fresh in ((33, 0, False), (33, 0, False), (1, 1, True), (32, 2, True), (1, 2, False)):
        model.recorded_layers.fresh = False
        model(Pass(torch.zeros(1, width, dtype=torch.int64), cache=cache))
        assert (len(programs(model, cache)), model.recorded_layers.fresh) == (count, fresh), width
    fp32 = tiny_target().model
    cache = fp32.new_cache(1, 80)
    for _ in range(2):
        fp32(Pass(torch.zeros(1, 2, dtype=torch.int64), cache=cache))
    assert programs(fp32, cache) == [] and not fp32.recorded_layers.fresh, "fp32 products are PyTorch's"
    with rows.decoding():
        for width, count in ((33, 0), (2, 1), (2, 1), (1, 2)):
            fp32(Pass(torch.zeros(1, width, dtype=torch.int64), cache=cache))
            assert len(programs(fp32, cache)) == count, width


@pytest.mark.parametrize("tree", [False, True])
def test_fp32_while_decoding_is_as_close_as_pytorchs(tiny_target, tree):
    model = tiny_target(n_layers=3).model
    *wanted, _ = decode(model, 2, 4, tree, ALL)
    with rows.decoding():
        *found, cache = decode(model, 2, 4, tree, ALL)
        assert programs(model, cache)
    for one, other in zip(found, wanted, strict=True):
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_weights_that_come_and_go_are_not_recorded(tiny_target):
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
    assert entered == [0, 1, 2] * 3 and programs(model, cache) == []


def test_a_full_cache_is_refused_as_ever(tiny_target):
    model = tiny_target(dtype=torch.bfloat16).model
    cache, token = model.new_cache(1, 4), torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(4):
        model(Pass(token, cache=cache))
        cache.commit(None, torch.tensor([1]))
    assert len(programs(model, cache)) == 1
    before = cache.keys.clone(), cache.values.clone()
    with pytest.raises(AssertionError, match="needs a capacity of at least 5, the cache has 4"):
        model(Pass(token, cache=cache))
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])


@pytest.mark.parametrize("how", ["in place", "elsewhere"])
def test_other_weights(tiny_target, how):
    model, other = (tiny_target(dtype=torch.bfloat16, seed=seed).model for seed in (0, 1))
    token = torch.tensor([[3]])
    cache, wanted = model.new_cache(1, 8), other(Pass(token, cache=other.new_cache(1, 8))).logits
    for _ in range(3):
        assert not torch.equal(model(Pass(token, cache=cache)).logits, wanted)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        if how == "in place":
            mine.copy_(theirs)
        else:
            mine.data = theirs.data.clone()
    for _ in range(3):
        assert torch.equal(model(Pass(token, cache=cache)).logits, wanted)


def test_recordings_go_with_their_cache(tiny_target):
    model = tiny_target(dtype=torch.bfloat16).model
    cache = model.new_cache(1, 8)
    for _ in range(3):
        model(Pass(torch.zeros(1, 1, dtype=torch.int64), cache=cache))
    (recorded,) = programs(model, cache)
    program_left, keys_left = weakref.ref(recorded), weakref.ref(cache.keys)
    del cache, recorded
    gc.collect()
    assert program_left() is None and keys_left() is None and len(model.recorded_layers._known) == 0


def test_a_copy_of_a_decoder_records_for_itself(tiny_target):
    model = tiny_target(dtype=torch.bfloat16).model
    token, cache = torch.tensor([[3]]), model.new_cache(1, 8)
    for _ in range(3):
        wanted = model(Pass(token, cache=cache)).logits
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    cache = twin.new_cache(1, 8)
    assert all(torch.equal(twin(Pass(token, cache=cache)).logits, wanted) for _ in range(3))


def test_a_program_reads_its_inputs_anew():
    x, weight = torch.randn(2, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    made = program.Program(lambda: linear(x, weight))
    assert torch.equal(made.outputs, linear(x, weight))
    x.mul_(-2)
    again = made.run()
    assert again is made.outputs and torch.equal(again, linear(x, weight))


@pytest.mark.parametrize("computes", [lambda x: x + 1, lambda x: x.T.contiguous(), lambda x: x.sum().item()])
def test_a_program_of_what_pytorch_computes_is_refused(computes):
    x, weight = torch.randn(2, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    with pytest.raises(program.Unrecordable, match="aten"):
        program.Program(lambda: computes(linear(x, weight)))
    assert rows.listener.get() is None


@pytest.mark.parametrize("width", [1, 6])
def test_what_a_recording_keeps_is_told_before(tiny_target, width):
    model = tiny_target(dtype=torch.bfloat16, n_layers=3).model
    cache = model.new_cache(2, 20)
    for _ in range(2):
        model(Pass(torch.zeros(2, width, dtype=torch.int64), cache=cache))
    (recorded,) = programs(model, cache)
    (known,) = model.recorded_layers._known[cache].values()
    old = {x.untyped_storage().data_ptr() for x in (*model.parameters(), cache.keys, cache.values, cache.lengths)}
    old |= {x.untyped_storage().data_ptr() for x in known.inputs}
    named = {x.untyped_storage() for _, _, given in recorded._kept for x in given if x is not None}
    kept = {storage.data_ptr(): storage.nbytes() for storage in named if storage.data_ptr() not in old}
    told = recorded_layers.recorded_bytes(model.config, 2 * width, model.embed_tokens.weight)
    assert sum(kept.values()) == told
    assert recorded_layers.recorded_bytes(model.config, 33, model.embed_tokens.weight) == 0
    assert recorded_layers.recorded_bytes(model.config, 2 * width, torch.zeros(1)) == 2 * told, "fp32, while decoding"
    assert recorded_layers.recorded_bytes(model.config, 2, torch.zeros(1).double()) == 0
