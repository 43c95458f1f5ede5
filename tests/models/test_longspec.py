"""LongSpec's block: every row against attention written out, windows, noise shifts, initialisation, gradients."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.hf import build_decoder

SHAPES = {"mha": {"n_heads": 4, "n_kv_heads": 4}, "gqa": {"n_heads": 8, "n_kv_heads": 2, "head_dim": 16}}
T = 23


@pytest.fixture(params=SHAPES)
def target(request, tiny_target):
    return tiny_target(**SHAPES[request.param])


def drafted(target, std=0.25, **options) -> LongSpec:
    """A draft with weights wide enough to matter, biases and norms too."""
    draft = LongSpec(LongSpecConfig.for_target(target.model.config, **options))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return draft


def rows_of(target, batch=2, offset=0, seed=5):
    """Tokens, their embeddings, Anchor-Offset positions (4 sinks, the rest shifted) and the target's last K and V."""
    model = target.model
    tokens = torch.randint(model.config.vocab_size, (batch, T), generator=torch.Generator().manual_seed(seed))
    positions = (torch.arange(T) + offset * (torch.arange(T) >= 4)).expand(batch, T)
    keys, values = model(tokens, positions_BT=positions, needs={"last_kv"}).last_kv
    return model.embed_tokens(tokens), positions, keys, values


def rotated(x_Hd, position, config):
    half = config.head_dim // 2
    angles = position * config.rope["rope_theta"] ** (-torch.arange(half).double() / half)
    a, b = x_Hd.double()[:, :half], x_Hd.double()[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)


def attention(q_Hd, keys_SKd, values_SKd):
    groups = q_Hd.shape[0] // keys_SKd.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (keys_SKd, values_SKd))
    weights = (torch.einsum("hd,shd->hs", q_Hd, keys) * q_Hd.shape[1] ** -0.5).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, values).flatten()


def row_by_row(draft, embeddings_TD, positions_T, keys_TKd, values_TKd, shift):
    """METHODS.md 2, one row at a time in fp64."""
    c = draft.config
    p = {name: parameter.detach().double() for name, parameter in draft.named_parameters()}
    q_rows, kv_rows = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim

    def norm(x, name):
        return F.rms_norm(x, (c.hidden_size,), p[f"{name}.weight"], c.rms_norm_eps)

    own_k, own_v, outputs = [], [], []
    for t, (x, position) in enumerate(zip(embeddings_TD.double(), positions_T.tolist(), strict=True)):
        qkv = p["self_qkv.weight"] @ norm(x, "self_norm") + p["self_qkv.bias"]
        own_k.append(rotated(qkv[q_rows : q_rows + kv_rows].view(-1, c.head_dim), position, c))
        own_v.append(qkv[q_rows + kv_rows :].view(-1, c.head_dim))
        first = max(0, t - c.window)
        q = rotated(qkv[:q_rows].view(-1, c.head_dim), position, c)
        x = x + p["self_o.weight"] @ attention(q, torch.stack(own_k[first:]), torch.stack(own_v[first:]))
        if t >= shift:
            q = p["cross_q.weight"] @ norm(x, "cross_norm") + p["cross_q.bias"]
            q = rotated(q.view(-1, c.head_dim), position, c)
            stop = t - shift + 1
            x = x + p["cross_o.weight"] @ attention(q, keys_TKd[:stop], values_TKd[:stop])
        gate, up = (p["gate_up.weight"] @ norm(x, "mlp_norm")).chunk(2)
        x = x + p["down.weight"] @ (F.silu(gate) * up)
        outputs.append(norm(x, "final_norm") if c.final_norm else x)
    return torch.stack(outputs).float()


@pytest.mark.parametrize("offset", [0, 90])
@pytest.mark.parametrize("window", [1, 8, 512])
def test_every_row_is_the_formula(target, window, offset):
    """With a jump in the positions, too: rows, not positions, count for the window and the shift."""
    draft = drafted(target, window=window, final_norm=window == 8)
    inputs = rows_of(target, offset=offset)
    out = draft(*inputs, shifts=[1, 5])
    for row, shift in enumerate((1, 5)):
        expected = row_by_row(draft, *(x[row] for x in inputs), shift)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)


def test_a_window_of_512_is_513_keys_with_its_own(target):
    """A row's output changes with the embedding 512 rows before, not with the one 513 before."""
    draft = drafted(target)
    assert draft.config.window == 512
    torch.manual_seed(0)
    x, positions = torch.randn(1, 514, 32), torch.arange(514)[None]
    none = torch.zeros(1, 514, draft.config.n_kv_heads, draft.config.head_dim)
    out = draft(x, positions, none, none, [514])[0, -1]
    for row, seen in ((0, False), (1, True)):
        changed = x.clone()
        changed[0, row] += 1.0
        assert torch.equal(draft(changed, positions, none, none, [514])[0, -1], out) is not seen


def test_rows_before_the_shift_get_nothing_from_the_target(target):
    """A shift beyond the row is a draft without cross-attention, whatever the target's values."""
    draft, (x, positions, keys, values) = drafted(target), rows_of(target)
    shifted = draft(x, positions, keys, values, [3, T + 4])
    blind = draft(x, positions, torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan), [T, T])
    assert torch.equal(shifted[0, :3], blind[0, :3]) and torch.equal(shifted[1], blind[1])
    assert not torch.equal(shifted[0, 3], blind[0, 3])


def test_keys_and_values_depend_on_token_and_position_alone(target):
    """`self_kv` gives what the block attends to, so that serving never runs the block over a prompt."""
    draft, (x, positions, *_) = drafted(target, window=8), rows_of(target)
    seen = []

    def attend(q, k, v):
        seen.extend((k, v))
        return torch.zeros_like(q)

    tables = draft.tables(positions)
    draft.block(x, tables, attend, torch.zeros_like)
    for ours, theirs in zip(draft.self_kv(x, tables), seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_same_seed_same_draft(target):
    def weights(seed):
        config = LongSpecConfig.for_target(target.model.config)
        return LongSpec(config, torch.Generator().manual_seed(seed)).state_dict()

    one, same, other = weights(1), weights(1), weights(2)
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        if weight.dim() == 1:
            assert torch.equal(weight, torch.full_like(weight, float("norm" in name)))
        else:
            assert not torch.equal(weight, other[name])
            assert abs(float(weight.std()) - 0.02) < 0.003 and abs(float(weight.mean())) < 0.003


def test_parameter_count_of_llama_3_8b():
    config = LongSpecConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, n_heads=32, n_kv_heads=8, head_dim=128,
        rms_norm_eps=1e-5, max_positions=262144, rope={"rope_type": "default", "rope_theta": 2.8e8},
    )  # fmt: skip
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LongSpec(config).parameters())
    assert round(count / 1e6, 1) == 251.7


def test_warm_start_takes_the_targets_first_and_last_layer(tiny_target):
    for biased in (False, True):
        target = tiny_target(n_heads=8, n_kv_heads=2)
        model = target.model
        if biased:
            model = build_decoder(replace(model.config, attention_bias=True), torch.float32, "cpu")
            for i, parameter in enumerate(model.parameters()):
                parameter.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(i))
        config = LongSpecConfig.for_target(model.config, warm_start=True, final_norm=True)
        draft = LongSpec(config, torch.Generator().manual_seed(1), model)
        first, last = model.layers[0], model.layers[-1]
        assert torch.equal(draft.self_qkv.weight, first.attention.qkv_proj.weight)
        assert torch.equal(draft.self_o.weight, first.attention.o_proj.weight)
        assert torch.equal(draft.self_norm.weight, first.attention_norm.weight)
        assert torch.equal(draft.cross_q.weight, last.attention.qkv_proj.weight[:64])
        assert torch.equal(draft.cross_o.weight, last.attention.o_proj.weight)
        assert torch.equal(draft.cross_norm.weight, last.attention_norm.weight)
        assert torch.equal(draft.mlp_norm.weight, last.mlp_norm.weight)
        assert torch.equal(draft.gate_up.weight, last.mlp.gate_up_proj.weight)
        assert torch.equal(draft.down.weight, last.mlp.down_proj.weight)
        assert torch.equal(draft.final_norm.weight, model.norm.weight)
        wanted = first.attention.qkv_proj.bias if biased else torch.zeros(96)
        assert torch.equal(draft.self_qkv.bias, wanted)
        wanted = last.attention.qkv_proj.bias[:64] if biased else torch.zeros(64)
        assert torch.equal(draft.cross_q.bias, wanted)


def test_what_starts_from_the_target_needs_it(tiny_target):
    target = tiny_target()
    config = LongSpecConfig.for_target(target.model.config, warm_start=True)
    with pytest.raises(ValueError, match=r"draft\.warm_start: it starts from the target's weights; give the target"):
        LongSpec(config, torch.Generator())
    with pytest.raises(ValueError, match="not of this draft's intermediate_size"):
        LongSpec(config, torch.Generator(), tiny_target(intermediate_size=64).model)
    LongSpec(config)  # for weights read from a file


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_weight(target, dtype):
    """bf16, too: the frozen layers' fast paths, which know no gradient of a weight, are left alone."""
    draft = drafted(target, std=0.1, final_norm=True).to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in rows_of(target)]
    draft(*inputs, shifts=[1, 4]).float().square().mean().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().sum()) > 0, name


def test_training_and_serving_compute_the_same(target):
    draft, inputs = drafted(target), rows_of(target)
    trained = draft(*inputs, shifts=[1, 2])
    assert trained.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(draft(*inputs, shifts=[1, 2]), trained, rtol=1e-6, atol=1e-6)


def test_restricted_vocabulary_is_a_buffer(tiny_target):
    target = tiny_target()
    config = LongSpecConfig.for_target(target.model.config, draft_vocab_size=3)
    draft = LongSpec(config, token_ids_E=torch.tensor([4, 90, 7], dtype=torch.int32))
    assert draft.state_dict()["token_ids"].tolist() == [4, 90, 7] and draft.token_ids.dtype == torch.int64
    assert draft.to(torch.bfloat16).token_ids.dtype == torch.int64
    assert LongSpec(config).token_ids.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"token_ids_E: \[2\] ids for a draft_vocab_size of 3"):
        LongSpec(config, token_ids_E=torch.tensor([4, 90]))
    with pytest.raises(ValueError, match="draft_vocab_size is None"):
        LongSpec(LongSpecConfig.for_target(target.model.config), token_ids_E=torch.tensor([4]))


def test_config_survives_json(tiny_target):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}  # fmt: skip
    config = LongSpecConfig.for_target(tiny_target(rope=rope).model.config, noise=4, final_norm=True)
    assert LongSpecConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", 0, "draft.window: 0"),
        ("noise", 0, "draft.noise: 0"),
        ("n_kv_heads", 3, "draft.n_heads: 4 is no multiple of n_kv_heads"),
        ("draft_vocab_size", 98, "draft.draft_vocab_size: 98; give 1 to 97"),
        ("rope", {"rope_type": "spiral"}, "rope_type is 'spiral'"),
    ],
)
def test_config_says_what_is_wrong(tiny_target, field, value, message):
    good = asdict(LongSpecConfig.for_target(tiny_target().model.config))
    with pytest.raises(ValueError, match=message):
        LongSpecConfig(**(good | {field: value}))


def test_shifts_must_be_one_a_row_and_positive(target):
    draft, inputs = drafted(target), rows_of(target)
    for shifts in ([1], [0, 1]):
        with pytest.raises(ValueError, match="shifts"):
            draft(*inputs, shifts=shifts)
