"""Networks with a GPU's small kernels (Liger's, and RoPE's with the cache's rows), in Triton's interpreter.

They give what plain PyTorch gives, in passes of every kind, and the same gradients in training.
"""

from importlib import import_module

import pytest
import torch

from longdraft.kernels import backend
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig, plan_queries
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.passes import Pass

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has them without an interpreter")
ALL = {"logits", "pre_norm", "post_norm", "last_kv", "queries"}


@pytest.fixture
def small_kernels(monkeypatch, shared):
    """A function that puts these kernels in place."""
    liger = shared("ligers.py").interpreted(monkeypatch)
    triton = import_module("longdraft.kernels.triton.rotate")

    def take() -> None:
        monkeypatch.setattr(backend, "liger_layers", lambda device_type: liger)
        monkeypatch.setattr(backend, "triton_kernels", lambda name, _: triton if name == "rotate" else None)

    return take


def passes(model):
    """The outputs of passes of all kinds.

    With a cache: whole prompts, then, after ragged lengths, a chain, a tree and a chain that ends early. Without one:
    two rows, pieces in chunks of rows, and a pass that ends before the last attention.
    """
    found = []

    def made(*args, needs=ALL, **kwargs):
        output = model(Pass(*args, needs=needs, **kwargs))
        parts = output.logits, output.pre_norm, output.post_norm, output.queries, *(output.last_kv or ())
        found.extend(part.clone() for part in parts if part is not None)

    tokens = torch.arange(2 * 5).view(2, 5)
    cache = model.new_cache(2, 24)
    cache.keys.zero_(), cache.values.zero_()
    made(tokens, cache=cache, needs={"last_kv", "logits"})
    cache.commit(None, torch.tensor([5, 3]))
    made(tokens[:, :1], cache=cache)
    cache.commit(None, torch.tensor([1, 0]))
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool).expand(2, -1, -1)
    positions = cache.lengths[:, None] + mask.sum(-1) - 1
    made(tokens[:, :4], cache=cache, tree_mask_BTT=mask, positions_BT=positions, logits_at_BR=tokens[:, :2] % 4)
    cache.commit(torch.tensor([[0, 2, 3], [0, 1, 1]]), torch.tensor([3, 2]))
    made(tokens[:, :2], cache=cache, needs={"last_kv", "queries"})
    made(tokens)
    made(tokens.view(1, -1), borders=[0, 4, 10], chunk=3)
    made(tokens.view(1, -1), borders=[0, 4, 10], needs={"last_kv"})
    return [*found, cache.keys, cache.values]


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "sliding_windows": (3, None)}], ids=str)
def test_passes_of_a_decoder(tiny_target, small_kernels, options):
    model = tiny_target(**options).model
    wanted = passes(model)
    small_kernels()
    for ours, theirs in zip(passes(model), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def draft_gradients(draft, loss):
    draft.zero_grad()
    loss(draft).backward()
    return {name: weight.grad.clone() for name, weight in draft.named_parameters()}


@pytest.mark.parametrize("kind", ["longspec", "tokenswift"])
def test_gradients_of_a_draft(tiny_target, small_kernels, kind):
    target = tiny_target().model
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, target.config.hidden_size, generator=generator)
    keys = torch.randn(2, 9, 2, 8, generator=generator)
    weights = torch.randn(9, target.config.hidden_size, generator=generator)
    if kind == "longspec":
        config = LongSpecConfig.for_target(target.config, window=4, final_norm=True)
        draft = LongSpec(config, generator, target)
        queries = plan_queries([0, 5, 9], [1, 2], 4)
        loss = lambda draft: (draft.states(rows, torch.arange(9), *keys, queries) * weights).sum()  # noqa: E731
    else:
        draft = TokenSwift(TokenSwiftConfig(target.config.hidden_size, 1e-6, init_std=0.2), generator)
        loss = lambda draft: sum((state * weights).sum() for state in draft.states(rows))  # noqa: E731
    wanted = draft_gradients(draft, loss)
    small_kernels()
    found = draft_gradients(draft, loss)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-4 * float(wanted[name].abs().max()))
