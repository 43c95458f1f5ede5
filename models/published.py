"""Converts drafts that their authors published to draft folders: LongSpec's blocks, TokenSwift's merged checkpoints.

LongSpec's tensor names were taken from descriptions of the authors' program, and tested on files that the tests make.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from longdraft.models.draft_folder import CONFIG, Draft, DraftInfo, check_out, read_config, save_draft, target_entry
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.files import damage_named
from longdraft.models.hf import METADATA, describe_target, lasting_name, read_target_config
from longdraft.models.hf_weights import TOKENSWIFT_HEADS, folder_tensors
from longdraft.models.hub import hub_folder
from longdraft.models.target import Target

# LongSpec's repositories and their targets, as the authors' program pairs them.
LONGSPEC_TARGETS = {
    "sail/longspec-vicuna-7b-v1.5-16k": "lmsys/vicuna-7b-v1.5-16k",
    "sail/longspec-vicuna-13b-v1.5-16k": "lmsys/vicuna-13b-v1.5-16k",
    "sail/longspec-longchat-7b-v1.5-32k": "lmsys/longchat-7b-v1.5-32k",
    "sail/longspec-longchat-13b-16k": "lmsys/longchat-13b-16k",
    "sail/longspec-Llama-3-8B-Instruct-262k": "gradientai/Llama-3-8B-Instruct-262k",
    "sail/longspec-QwQ-32B-Preview": "Qwen/QwQ-32B-Preview",
}
# How the drafts were trained and are used, from the papers (LongSpec: Appendix E; TokenSwift: Tables 7 and 9).
LONGSPEC_TREE, LONGSPEC_NOISE, LONGSPEC_LENGTH = [4, 16, 16, 16, 16], 4, 32768
TOKENSWIFT_RANKS, TOKENSWIFT_LENGTH = 3, 8192
# LongSpec's tensors. Anything before these names is a prefix (`glide.`, `draft_model.`, ...). Cross-attention's k and v
# were never used.
PART = re.compile(r"(?:^|\.)((?:self|cross)_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.(weight|bias)$")
NORM = re.compile(r"(?:^|\.)(\w*norm\w*)\.weight$")
UNUSED = re.compile(r"(?:^|\.)(?:cross_attn\.[kv]_proj\.(?:weight|bias)|rotary_emb\.inv_freq)$")
# Ours, and which of theirs are joined in it.
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
# TokenSwift's tensors, and our names for their parts.
HEAD = re.compile(re.escape(TOKENSWIFT_HEADS) + r"(\d+)\.(linear|input_layernorm|post_layernorm)\.weight")
OUR_PARTS = {"linear": "proj", "input_layernorm": "in_norm", "post_layernorm": "out_norm"}


def convert(
    source: str | Path,
    out: str | Path,
    target: str | None = None,
    gguf_file: str | None = None,
    norms: Sequence[str] | None = None,
) -> tuple[Draft, DraftInfo]:
    """Write the draft folder of a published draft, completely or not at all.

    Args:
        source: a file of weights or a folder, as it was published, or a hub name.
        target, gguf_file: the model that the draft is for. None: as the authors pair them; for TokenSwift's merged
            checkpoint, the checkpoint itself, which has its target's weights. A base named instead must have the same.
        norms: names of LongSpec's norms, as of `published_block`.

    Returns: the draft and what its folder says of it.
    Raises: ValueError if the source cannot be had, is no published draft or is for another target, or if `out` cannot
        be written. It names tensors and files.
    """
    check_out(out)
    place, name = _fetch(source)
    merged = _is_merged(place)
    if merged and norms is not None:
        raise ValueError("norms: those of a LongSpec draft, and this is TokenSwift's checkpoint; leave them out")
    if merged:
        draft, entry, path = _tokenswift(place, name, target, gguf_file)
    else:
        draft, entry, path = _longspec(place, name, target, gguf_file, norms)
    block = isinstance(draft.config, LongSpecConfig)
    info = DraftInfo(
        target=entry,
        train_length=LONGSPEC_LENGTH if block else TOKENSWIFT_LENGTH,
        tree={"levels": LONGSPEC_TREE if block else [TOKENSWIFT_RANKS] * draft.config.n_heads},
        versions={name: version(name) for name in ("longdraft", "torch")},
        train_config={
            "target": {"path": lasting_name(path), "gguf_file": gguf_file},
            "converted_from": name or place.name,
        },
        noise=LONGSPEC_NOISE if block else None,
    )
    save_draft(out, draft, info)
    return draft, info


def _fetch(source: str | Path) -> tuple[Path, str | None]:
    """The file or folder, and its hub name if it was downloaded from there because it is not on this machine."""
    local = Path(source).expanduser()
    if local.exists():
        return local, None
    name, weights = str(source), [["*.safetensors"], ["*.bin", "*.pth"]]
    return hub_folder(name, METADATA, weights, refusal=f"source: {name} is no file and no folder"), name


def _is_merged(path: Path) -> bool:
    """Whether this folder is a model with TokenSwift's heads in it."""
    return (path / CONFIG).is_file() and "medusa_heads" in read_config(path)


def _longspec(
    place: Path, name: str | None, target: str | None, gguf_file: str | None, norms: Sequence[str] | None
) -> tuple[Draft, dict[str, str], str]:
    """The block, how its folder names the target (`target_entry`), and the target's name or path."""
    path = target or LONGSPEC_TARGETS.get(name or "")
    if path is None:
        raise ValueError(
            f"target: {place} does not say which model it is for; name that (the authors pair "
            f"{'; '.join(f'{draft} with {own}' for draft, own in LONGSPEC_TARGETS.items())})"
        )
    known = describe_target(path, gguf_file)
    if place.is_dir():
        _compare_rope(place, known)
    config = LongSpecConfig.for_target(known.model.config, noise=LONGSPEC_NOISE)
    return published_block(_weights(place), config, norms, str(place)), target_entry(known), path


def published_block(
    tensors: Mapping[str, Tensor], config: LongSpecConfig, norms: Sequence[str] | None = None, source: str = "the file"
) -> LongSpec:
    """LongSpec's block from the tensors of a published one.

    Args:
        config: for the target that it was trained for.
        norms: the file's names of the norms before self-attention, cross-attention and feed-forward, in this order, for
            files whose names do not tell (the error that asks for them lists the names).
        source: what errors call the tensors.

    Raises: ValueError if a tensor is missing, unknown, there twice or of another shape. It lists the names.
    """
    expected = {name for names in FUSED.values() for name in names}
    theirs, found_norms, problems = dict[str, Tensor](), list[str](), list[str]()
    for name, tensor in tensors.items():
        part = PART.search(name)
        short = f"{part[1]}.{part[2]}" if part else ""
        if UNUSED.search(name):
            continue
        if NORM.search(name):
            found_norms.append(name)
        elif short in expected and short not in theirs:
            theirs[short] = tensor
        else:
            problems.append(f"{'twice there' if short in theirs else 'unknown'}: {name}")
    problems += [f"missing: {name}" for name in sorted(expected - theirs.keys())]
    if len(found_norms) != 3:
        problems.append(f"three norms belong there, found: {', '.join(found_norms[:8]) or 'none'}")
    if problems:
        raise ValueError(f"{source} is no published LongSpec draft: {'; '.join(problems[:8])}")
    ordered = zip(("self_norm", "cross_norm", "mlp_norm"), _in_order(found_norms, norms, source), strict=True)
    parts = {ours: [theirs[name] for name in names] for ours, names in FUSED.items()}
    parts |= {f"{ours}.weight": [tensors[name]] for ours, name in ordered}
    with torch.device("meta"):
        draft = LongSpec(config)
    for name, parameter in draft.state_dict().items():
        rows = sum(len(part) for part in parts[name])
        if {(rows, *part.shape[1:]) for part in parts[name]} != {tuple(parameter.shape)}:
            shapes = ", ".join(str(list(part.shape)) for part in parts[name])
            raise ValueError(f"{source}: {name} has {shapes}, the target has {list(parameter.shape)}; give its own")
    draft.load_state_dict({name: torch.cat(joined) for name, joined in parts.items()}, assign=True)
    return draft


def _in_order(found: list[str], given: Sequence[str] | None, source: str) -> list[str]:
    """The norms in the order of their use, from `given` or from their names. A wrong guess would go unnoticed."""
    if given is not None:
        if sorted(given) != sorted(found):
            raise ValueError(f"norms: {', '.join(given)}; {source} has {', '.join(found)}")
        return list(given)
    short = {name: match[1] for name in found if (match := NORM.search(name))}
    numbered = sorted(found, key=lambda name: short[name])
    if [re.sub(r"\D", "", short[name]) for name in numbered] in (["1", "2", "3"], ["0", "1", "2"]):
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


def _weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of a folder: its only .pth file, or files as `save_pretrained` writes them."""
    pickles = sorted(path.glob("*.pth"))
    if path.is_dir() and len(pickles) == 1 and not any(path.glob("*.safetensors")):
        (path,) = pickles
    return dict(folder_tensors(path) if path.is_dir() else read_file(path))


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


def _compare_rope(folder: Path, target: Target) -> None:
    """Warn if the configuration beside the draft has another RoPE than the target. Vicuna's and LongChat's tensors have
    the same shapes, so nothing else tells them apart."""
    if not (folder / CONFIG).is_file():
        return
    try:
        config = read_target_config(folder)
    except ValueError:  # of an unknown kind of model: the tensors' shapes must do
        return
    theirs, ours = dict(config.rope.parameters), dict(target.model.config.rope.parameters)
    if theirs != ours:
        warnings.warn(
            f"{folder / CONFIG} has the RoPE {theirs}, and {target.name} has {ours}: where the draft was not trained "
            "for this target, it guesses badly; check --target",
            stacklevel=2,
        )


def _tokenswift(
    folder: Path, name: str | None, base: str | None, gguf_file: str | None
) -> tuple[Draft, dict[str, str], str]:
    """The heads of a merged checkpoint, and what `_longspec` returns beside the block. Reads only as much of the target
    as tells it from others."""
    merged = describe_target(folder, sample=True)
    count = merged.hf_config.to_dict()["medusa_heads"]
    if type(count) is not int or count < 1:
        raise ValueError(f"{folder / CONFIG}: medusa_heads is {count!r}, not a number of heads; download it again")
    config = TokenSwiftConfig(merged.model.config.hidden_size, merged.model.config.rms_norm_eps, n_heads=count)
    with torch.device("meta"):
        draft = TokenSwift(config)
    draft.load_state_dict(_heads(folder, draft), assign=True)
    if base is None:
        return draft, target_entry(merged) | {"name": name or merged.name}, name or str(folder)
    known = describe_target(base, gguf_file, sample=True)
    different = [part for part in ("config", "weights") if known.fingerprint[part] != merged.fingerprint[part]]
    if different:
        raise ValueError(
            f"target: {base} has another {' and other '.join(different)} than {folder}, in which the heads were "
            "trained; name their base, or leave it out: the checkpoint is then the draft's target itself"
        )
    return draft, target_entry(known), base


def _heads(folder: Path, draft: TokenSwift) -> dict[str, Tensor]:
    """The heads' tensors by our names. Raises ValueError that names what is missing, unknown or of another shape."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in folder_tensors(folder, lambda name: name.startswith(TOKENSWIFT_HEADS)):
        if name.startswith(TOKENSWIFT_HEADS):
            match = HEAD.fullmatch(name)
            tensors[f"{OUR_PARTS[match[2]]}.{match[1]}.weight" if match else name] = tensor
    shapes, found = ({name: p.shape for name, p in group.items()} for group in (draft.state_dict(), tensors))
    if wrong := sorted(name for name in shapes | found if shapes.get(name) != found.get(name)):
        raise ValueError(
            f"{folder} does not hold {draft.config.n_heads} heads of TokenSwift's; missing, unknown or of another "
            f"shape: {', '.join(wrong[:12])}"
        )
    return tensors
