"""The tensors of published LongSpec drafts, in files made here: each lands in its place, what does not fit is named."""

import pickle
import warnings

import pytest
import torch

from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.published import published_block, published_tensors


@pytest.fixture
def target(tiny_target):
    return tiny_target(n_heads=8, n_kv_heads=2, head_dim=16)


def loaded(path, target) -> LongSpec:
    config = LongSpecConfig.for_target(target.model.config, noise=4)
    return published_block(published_tensors(path), config, str(path))


@pytest.mark.parametrize(("file", "prefix", "norms", "dtype"), [
    ("draft.safetensors", "",
     ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"), torch.float32),
    ("draft_model_weights.pth", "glide.",
     ("input_layernorm", "cross_attn_layernorm", "post_attention_layernorm"), torch.float16),
    ("d.pth", "draft_model.",
     ("input_layernorm", "post_attention_layernorm", "post_cross_attn_layernorm"), torch.float32),
    ("d.safetensors", "module.draft_model.layers.0.", ("norm1", "norm2", "norm3"), torch.bfloat16),
])  # fmt: skip
def test_every_tensor_lands_in_its_place(tmp_path, target, file, prefix, norms, dtype, authors):
    """A table of RoPE is not read."""
    draft = authors.longspec(target)
    tensors = {name: tensor.to(dtype) for name, tensor in authors.longspec_tensors(draft, prefix, norms).items()}
    tensors[f"{prefix}self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    found = loaded(authors.write(tmp_path / file, tensors), target)
    assert found.config == draft.config
    for name, weight in draft.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.to(dtype)), name


def test_what_does_not_fit_is_named(tmp_path, target, tiny_target, authors):
    good = authors.longspec_tensors(authors.longspec(target), "glide.")
    cases = [
        (
            {n: t for n, t in good.items() if "k_proj" not in n},
            r"missing: self_attn.k_proj.bias",
        ),
        (good | {"glide.fc.weight": torch.ones(2)}, r"unknown: glide\.fc\.weight"),
        (good | {"glide.cross_attn.o_proj.bias": torch.ones(32)}, r"unknown: cross_attn\.o_proj\.bias"),
        (good | {"other.mlp.down_proj.weight": torch.ones(2)}, r"unknown: other\.mlp\.down_proj\.weight"),
        ({n: t for n, t in good.items() if "input_lay" not in n}, r"unknown: post_self_attention_layernorm"),
        (
            authors.longspec_tensors(authors.longspec(target), "glide.", ("pre_layernorm", "mid_norm", "norm")),
            r"unknown: pre_layernorm\.weight",
        ),
        (good | {f"layers.{i}.x": torch.ones(1) for i in range(30)}, r"unknown: layers\.0\.x"),
        (good | {"glide.self_attn.q_proj.weight": torch.ones(64, 32)}, r"self_qkv\.weight"),
        (good | {"glide.mlp.down_proj.weight": torch.ones(32, 3)}, r"down\.weight"),
        ({"step": 3, "weights": good}, "unknown: weights"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            loaded(authors.write(tmp_path / "d.pth", tensors), target)
    source = authors.write(tmp_path / "d.pth", good)
    with pytest.raises(ValueError, match=r"self_qkv\.weight"):
        loaded(source, tiny_target(n_heads=4))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, target):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "proof"), "w"))

    (tmp_path / "d.pth").write_bytes(pickle.dumps({"glide.x": Harmful()}))
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"d\.pth"):
        warnings.simplefilter("ignore")
        loaded(tmp_path / "d.pth", target)
    assert not (tmp_path / "proof").exists()
