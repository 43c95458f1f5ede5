"""Converts drafts that their authors published to draft folders: LongSpec's blocks, TokenSwift's merged checkpoints.

LongSpec's tensor names were taken from descriptions of the authors' program, and tested on files that the tests make.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from longdraft.models.draft_folder import CONFIG, Draft, DraftInfo, check_out, read_config, save_draft, target_entry
from longdraft.models.drafts.longspec import LongSpec, LongSpecConfig
from longdraft.models.drafts.tokenswift import TokenSwift, TokenSwiftConfig
from longdraft.models.files import damage_named
from longdraft.models.hf import METADATA, describe_target, lasting_name, load_target
from longdraft.models.hf_weights import TOKENSWIFT_HEADS, file_tensors, folder_tensors
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
# The names that are known of the norms before self-attention, cross-attention and feed-forward.
NORM_NAMES = (
    ("input_layernorm", "cross_attn_layernorm", "post_attention_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "post_cross_attn_layernorm"),
    ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"),
    ("norm1", "norm2", "norm3"),
)
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
D = TypeVar("D", TokenSwift, LongSpec)


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
            checkpoint, the checkpoint itself, which has its target's weights and is loaded to hash them.
        norms: names of LongSpec's norms, as of `published_block`.

    Returns: the draft and what its folder says of it.
    Raises: ValueError if the source cannot be had, is no published draft or is for another target, or if `out` cannot
        be written. It names tensors and files.
    """
    check_out(out)
    place, name = _fetch(source)
    train_config: dict[str, Any] = {"converted_from": name or place.name}
    if (place / CONFIG).is_file() and "medusa_heads" in read_config(place):
        if norms is not None:
            raise ValueError("norms: those of a LongSpec draft, and this is TokenSwift's checkpoint; leave them out")
        merged, path = load_target(place), target or name or str(place)
        draft: Draft = _heads(place, merged)
        entry, tree = target_entry(merged), [TOKENSWIFT_RANKS] * draft.config.n_heads
        entry["name"] = target or name or merged.name
        length, noise = TOKENSWIFT_LENGTH, None
    else:
        path = target or LONGSPEC_TARGETS.get(name or "")
        if path is None:
            pairs = "; ".join(f"{draft} with {own}" for draft, own in LONGSPEC_TARGETS.items())
            raise ValueError(
                f"target: {place} does not say which model it is for; name that (the authors pair {pairs})"
            )
        known = describe_target(path, gguf_file)
        config = LongSpecConfig.for_target(known.model.config, noise=LONGSPEC_NOISE)
        draft = published_block(read_weights(place), config, norms, str(place))
        entry, tree, length, noise = target_entry(known), LONGSPEC_TREE, LONGSPEC_LENGTH, LONGSPEC_NOISE
    versions = {name: version(name) for name in ("longdraft", "torch")}
    train_config["target"] = {"path": lasting_name(path), "gguf_file": gguf_file}
    info = DraftInfo(entry, length, {"levels": tree}, versions, train_config, noise)
    save_draft(out, draft, info)
    return draft, info


def _fetch(source: str | Path) -> tuple[Path, str | None]:
    """The file or folder, and its hub name if it was downloaded from there because it is not on this machine."""
    local = Path(source).expanduser()
    if local.exists():
        return local, None
    name, weights = str(source), [["*.safetensors"], ["*.bin", "*.pth"]]
    return hub_folder(name, METADATA, weights, refusal=f"source: {name} is no file and no folder"), name


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
    return _filled(draft, {name: torch.cat(joined) for name, joined in parts.items()}, source)


def _in_order(found: list[str], given: Sequence[str] | None, source: str) -> list[str]:
    """The norms in the order of their use, from `given` or from their names. A wrong guess would go unnoticed."""
    if given is not None:
        if sorted(given) != sorted(found):
            raise ValueError(f"norms: {', '.join(given)}; {source} has {', '.join(found)}")
        return list(given)
    by_short_name = {match[1]: name for name in found if (match := NORM.search(name))}
    for names in NORM_NAMES:
        if by_short_name.keys() == set(names):
            return [by_short_name[name] for name in names]
    raise ValueError(
        f"norms: the names in {source} do not tell which stands before self-attention, cross-attention and "
        f"feed-forward; give them in this order: {', '.join(found)}"
    )


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors by name of a file, or of a folder: its only .pth file, or files as `save_pretrained` writes them."""
    pickles = sorted(path.glob("*.pth"))
    if path.is_dir():
        if len(pickles) != 1 or any(path.glob("*.safetensors")):
            return dict(folder_tensors(path))
        (path,) = pickles
    if path.suffix == ".safetensors":
        return dict(file_tensors(path))
    with damage_named(path):
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(content, Mapping) and len(content) == 1 and isinstance(next(iter(content.values())), Mapping):
        content = next(iter(content.values()))
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path}: is not a plain state dict of tensors; give the draft's weights, not a checkpoint")
    return content


def _heads(folder: Path, merged: Target) -> TokenSwift:
    """The heads of a merged checkpoint, which is loaded as a target already."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in folder_tensors(folder):
        if name.startswith(TOKENSWIFT_HEADS):
            match = HEAD.fullmatch(name)
            tensors[f"{OUR_PARTS[match[2]]}.{match[1]}.weight" if match else name] = tensor
    shape, count = merged.model.config, merged.hf_config.to_dict()["medusa_heads"]
    with torch.device("meta"):
        draft = TokenSwift(TokenSwiftConfig(shape.hidden_size, shape.rms_norm_eps, n_heads=count))
    return _filled(draft, tensors, str(folder))


def _filled(draft: D, weights: dict[str, Tensor], source: str) -> D:
    """The draft with these weights in place of those of the meta device."""
    try:
        draft.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{source} does not fit its target: {' '.join(str(error).split())}; give its own") from error
    return draft
