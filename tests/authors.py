"""Drafts with random weights in the formats in which their authors publish them, with the real tensor names."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longdraft.models.drafts.heads import TokenSwift, TokenSwiftConfig
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.target import Target

LONGSPEC_NORMS = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")


def longspec(target: Target, centre: float = 0.5, std: float = 0.3) -> LongSpec:
    """LongSpec's block with random weights, norms included."""
    draft = LongSpec(LongSpecConfig.for_target(target.model.config, noise=4))
    generator = torch.Generator().manual_seed(3)
    for parameter in draft.parameters():
        parameter.data.normal_(centre, std, generator=generator)
    return draft.requires_grad_(False)


def longspec_tensors(draft: LongSpec, prefix: str = "", norms=LONGSPEC_NORMS) -> dict[str, Tensor]:
    """The block's tensors under the authors' names, with the cross-attention projections that the authors never use."""
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


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a file of tensors, in safetensors' or PyTorch's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


def publish_longspec(folder: Path, target: Target, target_folder: Path) -> LongSpec:
    """Write a folder like LongSpec's: the target's configuration and model.safetensors."""
    draft = longspec(target, 0.0)
    write(folder / "model.safetensors", longspec_tensors(draft))
    shutil.copy(target_folder / "config.json", folder)
    return draft


def publish_tokenswift(folder: Path, target_folder: Path, n_shards: int = 3) -> TokenSwift:
    """Write a folder like TokenSwift's: the target's checkpoint, in shards, with the heads among its tensors."""
    shutil.copytree(target_folder, folder)
    content = json.loads((folder / "config.json").read_text())
    heads = TokenSwift(TokenSwiftConfig(content["hidden_size"], content["rms_norm_eps"]))
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=generator)
    tensors = load_file(folder / "model.safetensors")
    parts = {"linear": heads.proj, "input_layernorm": heads.in_norm, "post_layernorm": heads.out_norm}
    for part, modules in parts.items():
        for i, module in enumerate(modules):
            tensors[f"model.medusa_layers.{i}.{part}.weight"] = module.weight.detach().clone()
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)]
    for i, file in enumerate(files):
        save_file({name: tensors[name] for name in names[i::n_shards]}, folder / file, metadata={"format": "pt"})
    places = {name: files[i % n_shards] for i, name in enumerate(names)}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    content |= {"medusa_heads": 3, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(content))
    return heads.requires_grad_(False)
