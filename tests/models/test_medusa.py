"""Medusa-1's heads: the formula, zero initialisation, the loss they share with TokenSwift's."""

import pytest
import torch
import torch.nn.functional as F

from longdraft.models.drafts.loss import ahead
from longdraft.models.drafts.medusa import Medusa, MedusaConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig

D, V = 16, 50


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(n_heads=3, std=0.3, seed=1):
    return Medusa(MedusaConfig(D, n_heads, std), torch.Generator().manual_seed(seed))


def test_each_head_reads_the_state_itself():
    draft, hidden = heads(), draw(2, 5, D)
    for i, state in enumerate(draft.states(hidden)):
        torch.testing.assert_close(state, hidden + F.silu(hidden @ draft.proj[i].weight.T))
    assert draft.needs == {"post_norm"} and len(draft.states(hidden)) == 3


def test_one_head_is_one_block_of_the_chain():
    """The first head of a chain is an independent one."""
    draft, hidden = heads(1), draw(2, 5, D)
    chain = TokenSwift(TokenSwiftConfig(D, 1e-5, 1, "silu_chain"))
    chain.load_state_dict(draft.state_dict())
    assert torch.equal(chain.states(hidden)[0], draft.states(hidden)[0])


def test_initialisation():
    generator, hidden = torch.Generator().manual_seed(1), draw(3, D)
    zero, unused = Medusa(MedusaConfig(D), generator), torch.Generator().manual_seed(1)
    assert all(torch.equal(state, hidden) for state in zero.states(hidden))
    assert torch.equal(generator.get_state(), unused.get_state()), "nothing is drawn: of wide heads that takes seconds"
    same, other = heads().state_dict(), heads(seed=2).state_dict()
    assert all(torch.equal(p, same[name]) for name, p in heads().state_dict().items())
    assert not torch.equal(same["proj.0.weight"], other["proj.0.weight"])
    assert not torch.equal(same["proj.0.weight"], same["proj.1.weight"])


def test_loss_is_the_cross_entropy_of_each_head_and_reaches_each():
    draft, hidden, lm_head = heads(), draw(18, D), draw(V, D, seed=3)
    tokens = torch.randint(V, (18,), generator=torch.Generator().manual_seed(4))
    parts = [ahead(tokens, torch.ones(18, dtype=torch.bool), [0, 9, 18], i + 1) for i in (1, 2, 3)]
    loss = draft(hidden, parts, lm_head, count_ranks=True)
    for i in (1, 2, 3):
        rows = torch.tensor([*range(9 - 1 - i), *range(9, 18 - 1 - i)])
        logits = draft.states(hidden)[i - 1][rows] @ lm_head.T
        expected = F.cross_entropy(logits, tokens[rows + 1 + i], reduction="sum")
        torch.testing.assert_close(loss.sums[i - 1], expected)
    assert loss.n_labels.tolist() == [14, 12, 10]
    loss.sums.sum().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in draft.parameters())


@pytest.mark.parametrize(
    ("field", "value"), [("hidden_size", 0), ("n_heads", 0), ("init_std", -0.1)]
)  # fmt: skip
def test_config_says_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: "):
        MedusaConfig(**({"hidden_size": D} | {field: value}))
