"""The heads against the paper's formulas, their loss, their gradient along the chain."""

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.loss import ahead
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig

D, V = 12, 31


def heads(kind: str = "linear_chain", n_heads: int = 3, seed: int = 0) -> TokenSwift:
    return TokenSwift(TokenSwiftConfig(D, 1e-5, n_heads, kind, init_std=0.3), torch.Generator().manual_seed(seed))


def rms_norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def written_out(draft: TokenSwift, hidden):
    """METHODS, section 1, line by line: the states that the LM head reads."""
    states = []
    for i in range(draft.config.n_heads):
        w = draft.proj[i].weight
        if draft.config.kind == "silu_chain":
            hidden = hidden + F.silu(hidden @ w.T)
            states.append(hidden)
        else:
            hidden = hidden + rms_norm(hidden, draft.in_norm[i].weight) @ w.T
            states.append(rms_norm(hidden, draft.out_norm[i].weight))
    return states


@pytest.fixture(params=["linear_chain", "silu_chain"])
def kind(request) -> str:
    return request.param


def test_states_follow_the_formula(kind):
    draft = heads(kind)
    generator = torch.Generator().manual_seed(1)
    for name, p in draft.named_parameters():
        if "norm" in name:
            p.data.normal_(1.0, 0.3, generator=generator)
    hidden = torch.randn(2, 5, D, generator=generator) * 30
    for got, expected in zip(draft.states(hidden), written_out(draft, hidden), strict=True):
        assert got.shape == (2, 5, D)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    one_position = draft.states(hidden[1, 3])
    torch.testing.assert_close(torch.stack(one_position), torch.stack(draft.states(hidden))[:, 1, 3])


def test_parameter_count_and_needs(kind):
    draft = heads(kind)
    expected = 3 * (D * D + 2 * D) if kind == "linear_chain" else 3 * D * D
    assert sum(p.numel() for p in draft.parameters()) == expected
    assert draft.needs == ({"pre_norm"} if kind == "linear_chain" else {"post_norm"})


def test_initialisation():
    config = TokenSwiftConfig(400, 1e-5)
    first, again = (TokenSwift(config, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    for layer in first.proj:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert all((norm.weight == 1).all() for norm in [*first.in_norm, *first.out_norm])
    assert not torch.equal(first.proj[0].weight, first.proj[1].weight)
    assert not any(layer.weight.any() for layer in TokenSwift(config).proj)

    final = torch.rand(400)
    draft = TokenSwift(TokenSwiftConfig(400, 1e-5, out_norm_init="target"), torch.Generator().manual_seed(5), final)
    assert all(torch.equal(norm.weight, final) for norm in draft.out_norm)
    assert all((norm.weight == 1).all() for norm in draft.in_norm)


def test_zero_weights_are_the_targets_own_prediction():
    """The paper's form starts at the base distribution when W is 0 and the output norm is the target's; SiLU(0) = 0."""
    final, hidden = torch.rand(D), torch.randn(4, D)
    linear = TokenSwift(TokenSwiftConfig(D, 1e-5, out_norm_init="target", init_std=0.0), None, final)
    assert all(torch.equal(state, F.rms_norm(hidden, (D,), final, 1e-5)) for state in linear.states(hidden))
    silu = TokenSwift(TokenSwiftConfig(D, 1e-5, kind="silu_chain", init_std=0.0))
    assert all(torch.equal(state, hidden) for state in silu.states(hidden))


def test_loss_is_each_heads_cross_entropy_and_gradient_flows_along_the_chain(kind):
    """At token t head i proposes token t + 1 + i, in two pieces that lie end to end."""
    draft = heads(kind)
    generator = torch.Generator().manual_seed(2)
    hidden_ND = torch.randn(18, D, generator=generator)
    lm_head_VD = torch.randn(V, D, generator=generator)
    tokens_N = torch.randint(V, (18,), generator=generator)
    parts = [ahead(tokens_N, torch.ones(18, dtype=torch.bool), [0, 7, 18], i + 1) for i in (1, 2, 3)]
    out = draft(hidden_ND, parts, lm_head_VD, True)
    for i, state_ND in enumerate(written_out(draft, hidden_ND), start=1):
        rows = [*range(7 - 1 - i), *range(7, 18 - 1 - i)]
        logits, labels = state_ND[rows] @ lm_head_VD.T, tokens_N[[row + 1 + i for row in rows]]
        torch.testing.assert_close(
            out.sums[i - 1], F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-5, atol=1e-5
        )
        assert out.n_labels[i - 1] == len(rows)
        ranks = (logits.argsort(-1, descending=True) == labels[:, None]).float().argmax(1)
        assert out.rank_counts[i - 1].tolist() == [(ranks == k).sum() for k in range(3)]

    out.sums[2].backward()  # the last head's loss alone reaches the first head
    first = draft.proj[0].weight.grad
    assert first is not None and first.abs().sum() > 0
    assert lm_head_VD.grad is None
    assert draft(hidden_ND, parts, lm_head_VD, False).rank_counts.shape == (3, 0)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("kind", {"kind": "mlp"}),
        ("out_norm_init", {"out_norm_init": "zeros"}),
        ("out_norm_init", {"kind": "silu_chain", "out_norm_init": "target"}),
        ("n_heads", {"n_heads": 0}),
        ("init_std", {"init_std": -0.1}),
    ],
)
def test_errors_name_the_field(field, values):
    with pytest.raises(ValueError, match=rf"^{field}: "):
        TokenSwiftConfig(D, 1e-5, **values)
