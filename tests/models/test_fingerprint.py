"""The hash of a target's weights is the same for the same weights wherever they come from, and differs for others."""

import torch

from longdraft.models.fingerprint import weights_hash


def test_any_other_weights_are_others(tiny_target):
    target = tiny_target(n_layers=4, qk_norm=True)
    first = weights_hash(target.model)
    assert first == weights_hash(tiny_target(n_layers=4, qk_norm=True, dtype=torch.bfloat16).model)
    assert first != weights_hash(tiny_target(n_layers=4, qk_norm=True, seed=1).model)
    layers = ("layers.0.", "layers.1.", "layers.3.")  # the first, the middle and the last one
    seen = {name: p for name, p in target.model.named_parameters() if name.startswith(layers) or "layers" not in name}
    assert len(seen) == 3 + 3 * 8
    for name, weight in seen.items():
        weight.data[-1] *= 1.1
        assert weights_hash(target.model) != first, name
        weight.data[-1] /= 1.1
    for part in ("embed_tokens", "layers.0"):  # a difference that bf16 does not show
        next(target.model.get_submodule(part).parameters()).data *= 1 + 2e-7
    assert weights_hash(target.model) == first


def test_weights_that_are_not_here_have_none(tiny_target):
    target = tiny_target()
    target.model.layers[1].mlp.down_proj.weight.data = torch.empty(0)
    assert weights_hash(target.model) is None
    assert weights_hash(tiny_target(dtype=torch.float16).model) is None
    with torch.device("meta"):
        meta = type(target.model)(target.model.config)
    assert weights_hash(meta) is None
