"""Reads the tensors of the LongSpec authors' published drafts. Only this file knows their names.

It was written from descriptions of the authors' program, and tested on files that the tests make, not on a downloaded
one. The block is in drafts/longspec.py, the list of published drafts in published.py.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.files import damage_named

# Anything before these names is a prefix (`glide.`, `draft_model.`, ...). Cross-attention's k and v were never used.
PARTS = re.compile(r"(?:^|\.)((?:self|cross)_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.(weight|bias)$")
NORM = re.compile(r"(?:^|\.)(\w*norm\w*)\.weight$")
UNUSED = re.compile(r"(?:^|\.)(?:cross_attn\.[kv]_proj\.(?:weight|bias)|rotary_emb\.inv_freq)$")
NORMS = ("self_norm", "cross_norm", "mlp_norm")
FUSED = {
    "self_qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "self_o.weight": ["self_attn.o_proj.weight"],
    "cross_q.weight": ["cross_attn.q_proj.weight"],
    "cross_q.bias": ["cross_attn.q_proj.bias"],
    "cross_o.weight": ["cross_attn.o_proj.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}


def load_published(
    tensors: Mapping[str, Tensor],
    config: LongSpecConfig,
    norms: Sequence[str] | None = None,
    source: str = "the file",
    target: str = "this target",
) -> LongSpec:
    """Make the block from a published draft's tensors.

    Args:
        config: for the target that it was trained for.
        norms: the file's names of the norms before self-attention, cross-attention and feed-forward, in this order, for
            files whose names do not tell (the error that asks for them lists the names).
        source, target: what errors call the tensors and the config's target.

    Raises: ValueError if a tensor is missing, unknown, there twice or of another shape. It lists the names.
    """
    with torch.device("meta"):
        draft = LongSpec(config)
    weights = _ours(_sorted_out(tensors, norms, source), config, source)
    wrong = [
        f"{name} has shape {list(weights[name].shape)}, the target says {list(parameter.shape)}"
        for name, parameter in draft.state_dict().items()
        if weights[name].shape != parameter.shape
    ]
    if wrong:
        raise ValueError(f"{source} is no draft of {target}; give its own target:\n  " + "\n  ".join(wrong))
    draft.load_state_dict(weights, assign=True)
    return draft


def read_file(path: Path) -> Mapping[str, Tensor]:
    """Read a file's tensors by name, also from a dict whose only entry holds them."""
    with damage_named(path):
        if path.suffix == ".safetensors":
            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(content, Mapping) and len(content) == 1 and isinstance(next(iter(content.values())), Mapping):
        content = next(iter(content.values()))
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: is not a plain state dict of tensors; give the draft's weights, not a checkpoint")
    return content


def _sorted_out(tensors: Mapping[str, Tensor], norms: Sequence[str] | None, source: str) -> dict[str, Tensor]:
    """The tensors by their names without a prefix, the norms by our names. Raises ValueError for tensors that are
    missing, unknown or there twice."""
    expected = {name for names in FUSED.values() for name in names}
    names_of: dict[str, list[str]] = {}
    found_norms, unknown = [], []
    for name in tensors:
        part = PARTS.search(name)
        if UNUSED.search(name):
            continue
        if part and (short := f"{part[1]}.{part[2]}") in expected:
            names_of.setdefault(short, []).append(name)
        elif NORM.search(name):
            found_norms.append(name)
        else:
            unknown.append(name)
    twice = [name for names in names_of.values() if len(names) > 1 for name in names]
    missing = sorted(expected - names_of.keys())
    problems = [
        f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown), ("twice there", twice))
        if names
    ]
    if len(found_norms) != len(NORMS):
        problems.append(f"three norms belong there, found: {', '.join(found_norms[:8]) or 'none'}")
    if problems:
        raise ValueError(f"{source} is no published LongSpec draft:\n  " + "\n  ".join(problems))
    ours = {short: tensors[names[0]] for short, names in names_of.items()}
    ordered = _in_order(found_norms, norms, source)
    return ours | {f"{name}.weight": tensors[theirs] for name, theirs in zip(NORMS, ordered, strict=True)}


def _in_order(found: list[str], given: Sequence[str] | None, source: str) -> list[str]:
    """The norms in the order of their use, from `given` or from their names. A wrong guess would go unnoticed."""
    if given is not None:
        if sorted(given) != sorted(found):
            raise ValueError(f"norms: {', '.join(given)}; {source} has {', '.join(found)}")
        return list(given)
    short = {name: match[1] for name in found if (match := NORM.search(name))}
    numbered = sorted(found, key=lambda name: short[name])
    if [short[name].strip("abcdefghijklmnopqrstuvwxyz_") for name in numbered] in (["1", "2", "3"], ["0", "1", "2"]):
        return numbered
    first = [name for name in found if short[name] == "input_layernorm"]
    rest = [name for name in found if name not in first]
    before = [name for name in rest if "cross" in short[name] and "post" not in short[name]]
    behind = [name for name in rest if "post_cross" in short[name]]
    if len(first) == len(before + behind) == 1:
        (other,) = [name for name in rest if name not in before + behind]
        return [*first, *((before[0], other) if before else (other, behind[0]))]
    raise ValueError(
        f"norms: the names in {source} do not tell which stands before self-attention, cross-attention and "
        f"feed-forward; give them in this order: {', '.join(found)}"
    )


def _ours(theirs: dict[str, Tensor], config: LongSpecConfig, source: str) -> dict[str, Tensor]:
    """Our tensors: q, k and v joined, gate and up joined, each checked before."""
    q, kv, d, f = (
        config.n_heads * config.head_dim,
        config.n_kv_heads * config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv, "mlp.gate_proj": f, "mlp.up_proj": f}
    for module, count in rows.items():
        for name, shape in ((f"{module}.weight", [count, d]), (f"{module}.bias", [count])):
            if name in theirs and list(theirs[name].shape) != shape:
                raise ValueError(
                    f"{source}: {name} has shape {list(theirs[name].shape)}, the target says {shape}; give its own "
                    "target"
                )
    joined = {name: torch.cat([theirs[part] for part in parts]) for name, parts in FUSED.items()}
    return joined | {f"{name}.weight": theirs[f"{name}.weight"] for name in NORMS}
