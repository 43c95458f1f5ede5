"""TokenSwift's and Medusa's heads: their formulas, initialisation, and the gradient along a chain."""

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.heads import Heads, Medusa, MedusaConfig, TokenSwift, TokenSwiftConfig
from longdraft.train.methods.base import ahead

D, V = 12, 31
READS = {"linear_chain": "pre_norm", "silu_chain": "post_norm", "medusa": "post_norm"}


def heads(kind: str, seed: int | None = 0, n_heads: int = 3, std: float = 0.3) -> Heads:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if kind == "medusa":
        return Medusa(MedusaConfig(D, n_heads, std), generator)
    return TokenSwift(TokenSwiftConfig(D, 1e-5, n_heads, kind, init_std=std), generator)


def rms_norm(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def written_out(draft, kind, hidden):
    """METHODS, section 1, line by line: the states that the LM head reads."""
    states, first = [], hidden
    for i in range(draft.config.n_heads):
        w = draft.proj[i].weight
        if kind == "linear_chain":
            hidden = hidden + rms_norm(hidden, draft.in_norm[i].weight) @ w.T
            states.append(rms_norm(hidden, draft.out_norm[i].weight))
        else:
            hidden = first if kind == "medusa" else hidden
            hidden = hidden + F.silu(hidden @ w.T)
            states.append(hidden)
    return states


@pytest.fixture(params=READS)
def kind(request) -> str:
    return request.param


def test_states_follow_the_formula(kind):
    draft, generator = heads(kind), torch.Generator().manual_seed(1)
    for name, p in draft.named_parameters():
        if "norm" in name:
            p.data.normal_(1.0, 0.3, generator=generator)
    hidden = torch.randn(2, 5, D, generator=generator) * 30
    for got, expected in zip(draft.states(hidden), written_out(draft, kind, hidden), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    one_position = draft.states(hidden[1, 3])
    torch.testing.assert_close(torch.stack(one_position), torch.stack(draft.states(hidden))[:, 1, 3])
    assert draft.reads == READS[kind]
    n_weights = 3 * (D * D + 2 * D) if kind == "linear_chain" else 3 * D * D
    assert sum(p.numel() for p in draft.parameters()) == n_weights


def test_initialisation(kind):
    first, again, other = heads(kind).state_dict(), heads(kind).state_dict(), heads(kind, 1).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not torch.equal(first["proj.0.weight"], other["proj.0.weight"])
    assert not torch.equal(first["proj.0.weight"], first["proj.1.weight"])
    assert not any(layer.weight.any() for layer in heads(kind, None).proj)
    wide = TokenSwift(TokenSwiftConfig(400, 1e-5), torch.Generator().manual_seed(5))
    assert wide.proj[0].weight.std().item() == pytest.approx(0.02, rel=0.01)
    generator = torch.Generator().manual_seed(1)
    heads("medusa", std=0.0), Medusa(MedusaConfig(D), generator)
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state()), "nothing is drawn"


def test_zero_weights_are_the_targets_own_prediction():
    """The paper's form starts at the base distribution when W is 0 and the output norm is the target's; SiLU(0) = 0."""
    final, hidden = torch.rand(D), torch.randn(4, D)
    linear = TokenSwift(TokenSwiftConfig(D, 1e-5, out_norm_init="target", init_std=0.0), None, final)
    assert all(torch.equal(state, F.rms_norm(hidden, (D,), final, 1e-5)) for state in linear.states(hidden))
    assert all((norm.weight == 1).all() for norm in linear.in_norm)
    for kind in ("silu_chain", "medusa"):
        assert all(torch.equal(state, hidden) for state in heads(kind, std=0.0).states(hidden))


def test_gradients_reach_every_head_and_not_the_lm_head(kind):
    draft, generator = heads(kind), torch.Generator().manual_seed(2)
    hidden_ND, lm_head_VD = (torch.randn(rows, D, generator=generator) for rows in (18, V))
    tokens_N = torch.randint(V, (18,), generator=generator)
    parts = [ahead(tokens_N, torch.ones(18, dtype=torch.bool), [0, 7, 18], i + 1) for i in (1, 2, 3)]
    out = draft((hidden_ND,), parts, lm_head_VD, False)
    (out.sums.sum() if kind == "medusa" else out.sums[2]).backward()  # a chain's last loss alone reaches the first head
    assert all(float(layer.weight.grad.abs().sum()) > 0 for layer in draft.proj)
    assert lm_head_VD.grad is None and out.top_k_counts.shape == (3, 0)


def test_heads_without_norms_cannot_start_from_the_targets():
    with pytest.raises(ValueError, match=r"^out_norm_init: "):
        TokenSwiftConfig(D, 1e-5, kind="silu_chain", out_norm_init="target")
