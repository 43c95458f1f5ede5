"""Published LongSpec drafts, in files made here: every tensor lands in its place, and what does not fit is named."""

import pickle
import warnings

import pytest
import torch
from safetensors.torch import save_file

from longdraft.models.draft_folder import load_draft, read_info
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.longspec_published import convert_longspec

NORMS = ("input_layernorm", "post_attention_layernorm", "post_cross_attention_layernorm")


@pytest.fixture
def target(tiny_target):
    return tiny_target(n_heads=8, n_kv_heads=2, head_dim=16)


def drafted(target) -> LongSpec:
    draft = LongSpec(LongSpecConfig.for_target(target.model.config, noise=4))
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        parameter.data.normal_(0.5, 0.3, generator=generator)
    return draft.requires_grad_(False)


def theirs(draft, prefix="", norms=NORMS) -> dict[str, torch.Tensor]:
    """The draft under the names of the descriptions, with the projections that their cross-attention never uses."""
    c = draft.config
    parts = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.n_kv_heads * c.head_dim)
    tensors = {}
    for kind in ("weight", "bias"):
        rows = getattr(draft.self_qkv, kind).split(parts)
        tensors |= {f"self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", rows, strict=True)}
        tensors[f"cross_attn.q_proj.{kind}"] = getattr(draft.cross_q, kind)
        tensors |= {f"cross_attn.{x}_proj.{kind}": torch.full_like(rows[1], torch.nan) for x in "kv"}
    gate, up = draft.gate_up.weight.chunk(2)
    tensors |= {
        "self_attn.o_proj.weight": draft.self_o.weight,
        "cross_attn.o_proj.weight": draft.cross_o.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": draft.down.weight,
    }
    values = (draft.self_norm, draft.cross_norm, draft.mlp_norm)
    tensors |= {f"{name}.weight": norm.weight for name, norm in zip(norms, values, strict=True)}
    return {prefix + name: tensor.clone() for name, tensor in tensors.items()}


def write(path, tensors):
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


@pytest.mark.parametrize("prefix", ["", "glide.", "draft_model.", "module.draft_model.layers.0."])
@pytest.mark.parametrize("file", ["draft.safetensors", "draft_model_weights.pth"])
def test_the_folder_holds_the_draft(tmp_path, target, file, prefix):
    draft = drafted(target)
    source = write(tmp_path / file, theirs(draft, prefix))
    folder = convert_longspec(source, target, tmp_path / "out")
    loaded = load_draft(folder, target, LongSpec)
    assert folder == tmp_path / "out" and loaded.config == draft.config
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    info = read_info(folder)
    assert (info.noise, info.tree["levels"], info.target["name"]) == (4, [4, 16, 16, 16, 16], target.name)


def test_other_precisions_and_what_wraps_the_tensors(tmp_path, target):
    draft = drafted(target)
    tensors = {name: tensor.half() for name, tensor in theirs(draft, "glide.").items()}
    tensors["glide.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    source = write(tmp_path / "d.pth", {"state_dict": tensors})
    folder = convert_longspec(source, target, tmp_path / "out")
    assert torch.equal(load_draft(folder).down.weight, draft.down.weight.half())
    assert load_draft(folder, target).down.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "norms",
    [
        ("input_layernorm", "cross_attn_layernorm", "post_attention_layernorm"),
        ("input_layernorm", "post_attention_layernorm", "post_cross_attn_layernorm"),
        ("norm1", "norm2", "norm3"),
        ("norm_0", "norm_1", "norm_2"),
    ],
)
def test_norms_whose_names_tell_their_place(tmp_path, target, norms):
    draft = drafted(target)
    folder = convert_longspec(write(tmp_path / "d.pth", theirs(draft, "glide.", norms)), target, tmp_path / "out")
    loaded = load_draft(folder)
    for name in ("self_norm", "cross_norm", "mlp_norm"):
        assert torch.equal(getattr(loaded, name).weight, getattr(draft, name).weight), name


def test_norms_whose_names_do_not_tell_are_asked_for(tmp_path, target):
    draft, names = drafted(target), ("pre_layernorm", "mid_layernorm", "last_layernorm")
    source = write(tmp_path / "d.pth", theirs(draft, "glide.", names))
    with pytest.raises(ValueError, match=r"give them in this order: .*glide\.mid_layernorm\.weight"):
        convert_longspec(source, target, tmp_path / "out")
    ordered = [f"glide.{name}.weight" for name in names]
    with pytest.raises(ValueError, match=r"norms: glide\.pre_layernorm\.weight;"):
        convert_longspec(source, target, tmp_path / "out", ordered[:1])
    loaded = load_draft(convert_longspec(source, target, tmp_path / "out", ordered))
    assert torch.equal(loaded.mlp_norm.weight, draft.mlp_norm.weight)


def test_what_does_not_fit_is_named_and_nothing_is_written(tmp_path, target, tiny_target):
    good = theirs(drafted(target), "glide.")
    cases = [
        (
            {n: t for n, t in good.items() if "k_proj" not in n},
            r"missing: self_attn.k_proj.bias, self_attn.k_proj.weig",
        ),
        (good | {"glide.fc.weight": torch.ones(2)}, r"unknown: glide\.fc\.weight"),
        (good | {"glide.cross_attn.o_proj.bias": torch.ones(32)}, r"unknown: glide\.cross_attn\.o_proj\.bias"),
        (good | {"other.mlp.down_proj.weight": torch.ones(2)}, r"twice there: glide\.mlp\.down_proj\.weight, other"),
        ({n: t for n, t in good.items() if "input_lay" not in n}, r"three norms belong there, found: glide\.post_att"),
        (good | {f"layers.{i}.x": torch.ones(1) for i in range(30)}, r"unknown: layers\.0\.x, .* and 22 more"),
        (good | {"glide.self_attn.q_proj.weight": torch.ones(64, 32)}, r"q_proj\.weight has shape \[64, 32\]"),
        (good | {"glide.mlp.down_proj.weight": torch.ones(32, 3)}, r"down\.weight has shape \[32, 3\]"),
        ({"step": 3, "weights": good}, "holds no state dict of tensors alone"),
    ]
    for tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            convert_longspec(write(tmp_path / "d.pth", tensors), target, tmp_path / "out")
    source = write(tmp_path / "d.pth", good)
    with pytest.raises(ValueError, match=r"has shape .*; give its own target"):
        convert_longspec(source, tiny_target(n_heads=4), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read(tmp_path, target):
    with pytest.raises(ValueError, match="is no file; give the published draft's weights"):
        convert_longspec(tmp_path, target, tmp_path / "out")
    for name in ("d.pth", "d.safetensors", "empty.pth"):
        (tmp_path / name).write_bytes(b"" if "empty" in name else b"<html>not found</html>")
        with pytest.raises(ValueError, match="cannot be read as a state dict"):
            convert_longspec(tmp_path / name, target, tmp_path / "out")


def test_a_pickle_that_would_run_code_is_refused(tmp_path, target):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "proof"), "w"))

    (tmp_path / "d.pth").write_bytes(pickle.dumps({"glide.x": Harmful()}))
    with warnings.catch_warnings(), pytest.raises(ValueError, match="cannot be read as a state dict"):
        warnings.simplefilter("ignore")
        convert_longspec(tmp_path / "d.pth", target, tmp_path / "out")
    assert not (tmp_path / "proof").exists()
