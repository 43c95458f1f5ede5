"""LongSpec's block: every row against attention written out, pieces, windows, noise shifts, subsets of queries,
initialisation, gradients."""

from dataclasses import asdict, replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longdraft.kernels.linear_loss import LossPart
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, Queries, plan_queries
from longdraft.models.hf import build_decoder
from longdraft.models.passes import Pass

SHAPES = {"mha": {"n_heads": 4, "n_kv_heads": 4}, "gqa": {"n_heads": 8, "n_kv_heads": 2, "head_dim": 16}}
# Three pieces, each with its own noise shift, one of them shorter than it.
BORDERS, SHIFTS = [0, 11, 14, 37], [1, 5, 3]


@pytest.fixture(params=SHAPES)
def target(request, tiny_target):
    return tiny_target(**SHAPES[request.param])


def drafted(target, std=0.25, token_ids=None, **options) -> LongSpec:
    """A draft with weights wide enough to matter, biases and norms too."""
    draft = LongSpec(LongSpecConfig.for_target(target.model.config, **options), token_ids_E=token_ids)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return draft


class Row(NamedTuple):
    """What the block is given: pieces end to end."""

    embeddings: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor

    def piece(self, start: int, stop: int) -> "Row":
        return Row(*(x[start:stop] for x in self))

    def to(self, dtype: torch.dtype) -> "Row":
        return Row(*(x.to(dtype) if x.is_floating_point() else x for x in self))


def row_of(target, borders=BORDERS, offset=0, seed=5) -> Row:
    """Random tokens, their embeddings, Anchor-Offset positions (2 sinks a piece, the rest shifted, each piece further)
    and the target's last K and V."""
    model = target.model
    tokens = torch.randint(model.config.vocab_size, (borders[-1],), generator=torch.Generator().manual_seed(seed))
    parts = [torch.arange(stop - start) for start, stop in pairwise(borders)]
    positions = torch.cat([part + (offset + 7 * i) * bool(offset) * (part >= 2) for i, part in enumerate(parts)])
    output = model(Pass(tokens[None], positions_BT=positions[None], borders=borders, needs={"last_kv"}))
    return Row(model.embed_tokens(tokens).detach(), positions, *(x[0] for x in output.last_kv))


def planned(draft, borders=BORDERS, shifts=SHIFTS, spans=None) -> Queries:
    return plan_queries(borders, shifts, draft.config.window, spans)


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
    """Of every piece, with jumps in the positions, too: rows, not positions, count for the window and the shift."""
    draft = drafted(target, window=window, final_norm=window == 8)
    row = row_of(target, offset=offset)
    out = draft.states(*row, planned(draft))
    for (start, stop), shift in zip(pairwise(BORDERS), SHIFTS, strict=True):
        expected = row_by_row(draft, *row.piece(start, stop), shift)
        torch.testing.assert_close(out[start:stop], expected, rtol=1e-4, atol=1e-4)


def test_in_training_a_module_reads_its_own_weights_alone(target):
    """As ZeRO-3 needs it, which gathers a module's weights around its own call."""
    draft, row = drafted(target, final_norm=True), row_of(target)
    expected = draft.states(*row, planned(draft)).detach()
    for module in draft.modules():
        weights = {parameter: parameter.data for parameter in module.parameters(recurse=False)}

        def gather(*_, weights=weights):
            for parameter, data in weights.items():
                parameter.data = data

        def release(*_, weights=weights):
            for parameter in weights:
                parameter.data = parameter.new_empty(0)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        release()
    assert torch.equal(draft.states(*row, planned(draft)), expected)


def may_read(window: int) -> tuple[Tensor, Tensor]:
    """Bool [N, N]: whose embedding, and whose target key, each token's state depends on, by the definition."""
    n = BORDERS[-1]
    embeddings, keys = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, n, dtype=torch.bool)
    for (start, stop), shift in zip(pairwise(BORDERS), SHIFTS, strict=True):
        for t in range(start, stop):
            embeddings[t, max(start, t - window) : t + 1] = True
            keys[t, start : max(start, t - shift + 1)] = True
    return embeddings, keys


def test_a_token_depends_on_what_it_may_read_and_on_nothing_else(target):
    """Change one embedding, or one key with its value, at a time and see whose bits change."""
    draft, row = drafted(target, window=4), row_of(target)
    queries, (of_embeddings, of_keys) = planned(draft), may_read(4)
    with torch.no_grad():
        before = draft.states(*row, queries)
        for names, readers in ((["embeddings"], of_embeddings), (["keys", "values"], of_keys)):
            for token in range(BORDERS[-1]):
                changed = {name: getattr(row, name).clone() for name in names}
                for x in changed.values():
                    x[token] += 1.0
                after = draft.states(*row._replace(**changed), queries)
                assert torch.equal((after != before).any(1), readers[:, token]), (names, token)


SPANS = {
    "blocks": [(0, 4), (4, 9), (13, 14), (20, 37)],
    "single tokens": [(t, t + 1) for t in range(0, 37, 5)],
    "empty ones": [(0, 0), (3, 5), (11, 11), (37, 37)],
}


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("restricted", [False, True])
def test_a_subset_of_queries_is_the_whole_row_at_these(target, spans, restricted):
    """The states, and the gradient of a loss on them; of a restricted vocabulary's, too."""
    ids = torch.arange(5, 40) if restricted else None
    draft = drafted(target, window=4, final_norm=True, draft_vocab_size=35 if restricted else None, token_ids=ids)
    row, head = row_of(target, offset=20), target.model.lm_head.weight
    queries = planned(draft, spans=SPANS[spans])
    rows = torch.cat([torch.arange(*span) for span in SPANS[spans]])
    assert torch.equal(queries.rows, rows)
    whole, some = draft.states(*row, planned(draft)), draft.states(*row, queries)
    torch.testing.assert_close(some, whole[rows], rtol=1e-5, atol=1e-5)
    labels = torch.randint(35, (len(rows),), generator=torch.Generator().manual_seed(1))
    gradients = []
    for plan, part in ((planned(draft), LossPart(rows, labels)), (queries, LossPart(torch.arange(len(rows)), labels))):
        draft.zero_grad()
        draft((*row, plan), [part], head, False).sums.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in draft.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
        for name, wanted in {
            "self_qkv.weight": first.attention.qkv_proj.weight,
            "self_qkv.bias": first.attention.qkv_proj.bias if biased else torch.zeros(96),
            "self_o.weight": first.attention.o_proj.weight,
            "self_norm.weight": first.attention_norm.weight,
            "cross_q.weight": last.attention.qkv_proj.weight[:64],
            "cross_q.bias": last.attention.qkv_proj.bias[:64] if biased else torch.zeros(64),
            "cross_o.weight": last.attention.o_proj.weight,
            "cross_norm.weight": last.attention_norm.weight,
            "mlp_norm.weight": last.mlp_norm.weight,
            "gate_up.weight": last.mlp.gate_up_proj.weight,
            "down.weight": last.mlp.down_proj.weight,
            "final_norm.weight": model.norm.weight,
        }.items():
            assert torch.equal(draft.state_dict()[name], wanted), name


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_reach_every_weight_and_nothing_of_the_target(target, dtype, subset):
    """bf16, too: the frozen layers' fast paths, which know no gradient of a weight, are left alone."""
    draft, head = drafted(target, std=0.1, final_norm=True).to(dtype), target.model.lm_head.weight.detach().to(dtype)
    row = row_of(target).to(dtype)
    head.requires_grad_()
    part = LossPart(torch.arange(9), torch.arange(9))
    loss = draft((*row, planned(draft, spans=[(3, 9), (30, 37)] if subset else None)), [part], head, True)
    loss.sums.sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.abs().sum()) > 0, name
    assert head.grad is None and not any(x.requires_grad for x in row)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_every_weight_has_a_gradient_where_nothing_reads_the_target(target):
    """A pass of pieces that are all shorter than their shifts: zeros, as ranks that share a weight all need one."""
    draft, row = drafted(target), row_of(target)
    part = LossPart(torch.arange(9), torch.arange(9))
    draft((*row, planned(draft, shifts=[11, 3, 40])), [part], target.model.lm_head.weight, False).sums.sum().backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()) is ("cross" not in name), name


@pytest.mark.parametrize("spans", [None, [(2, 9), (11, 14)]])
def test_without_gradients_the_same_and_nothing_is_kept(target, spans):
    """The frozen layers' fast paths are taken then."""
    draft, row = drafted(target), row_of(target)
    queries, kept = planned(draft, spans=spans), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        with torch.no_grad():
            without = draft.states(*row, queries)
        assert not kept and not without.requires_grad
        trained = draft.states(*row, queries)
    assert kept and trained.requires_grad
    torch.testing.assert_close(without, trained, rtol=1e-6, atol=1e-6)


def test_rope_that_depends_on_the_length_goes_by_the_piece(tiny_target):
    """A short piece packed after a long one has the table of its own length."""
    target = tiny_target(rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, max_positions=16)
    draft, row = drafted(target), row_of(target)
    out = draft.states(*row, planned(draft))
    for (start, stop), shift in zip(pairwise(BORDERS), SHIFTS, strict=True):
        alone = draft.states(*row.piece(start, stop), planned(draft, [0, stop - start], [shift]))
        torch.testing.assert_close(out[start:stop], alone, rtol=1e-5, atol=1e-5)
    tables = draft.tables(row.positions[None]), draft.tables(torch.arange(11)[None])
    assert not torch.equal(tables[0][0][:, :11], tables[1][0])  # without pieces, the longest decides


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("n_kv_heads", 3, "n_heads"),
        ("draft_vocab_size", 98, "draft_vocab_size"),
        ("rope", {"rope_type": "spiral"}, "rope_type"),
    ],
)
def test_config_says_what_is_wrong(tiny_target, field, value, named):
    good = asdict(LongSpecConfig.for_target(tiny_target().model.config))
    with pytest.raises(ValueError, match=rf"^{named}: "):
        LongSpecConfig(**(good | {field: value}))
